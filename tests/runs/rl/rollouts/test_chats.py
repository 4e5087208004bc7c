"""Dialogues in a chat template have the tokens of transformers, and only what was sampled is trained."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_support import PLAIN, said, tokenizer_folder

from planetary.core.errors import UserError
from planetary.data.tokenizer import JsonTokenizer, load_tokenizer
from planetary.runs.rl.environments.judging import Judged, verdict_of
from planetary.runs.rl.environments.problems import check_tools, problems_of
from planetary.runs.rl.environments.tasks import Problem, Task
from planetary.runs.rl.rollouts.chats import PolicyChats
from planetary.runs.rl.rollouts.dialogues import RolloutLimits, Rollouts

FOLDER = Path(__file__).parents[3] / "data" / "chat" / "chat_templates"
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
WRITTEN = {
    "qwen-2_5-with-tools": CALL,
    "llama-3_1-with-tools": '{"name": "add", "parameters": {"a": 2, "b": 3}}',
}
"""Calls as the families write them."""
QWEN = (FOLDER / "qwen-2_5-with-tools.jinja").read_text()


class Adding(Task):
    """A task with a tool."""

    tools = (TOOL,)
    most_calls = 2

    def judge(self, prompt: Any, completions: Sequence[str], meta: Mapping[str, Any]) -> float | str:
        return 1.0 if completions[-1] == meta["answer"] else "No. Again?"

    def call(self, name: str, arguments: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
        return str(arguments["a"] + arguments["b"])


class Sums:
    """One prompt with a tool."""

    held_out_count = 1

    def train(self, number: int) -> Problem:
        return Problem(said("2+3?", system="Add."), "5", {"answer": "5"}, (TOOL,))

    held_out = train


@pytest.fixture
def chats(request: pytest.FixtureRequest) -> Iterator[PolicyChats]:
    template, ends = request.param
    found = PolicyChats(template, NAMES, ends)
    yield found
    found.close()


def rollouts(tokenizer: JsonTokenizer, chats: PolicyChats) -> Rollouts:
    (end,) = tokenizer.encode(b"<|im_end|>").tolist()
    limits = RolloutLimits(window=2000, most=100, vocabulary=tokenizer.vocab_size, ends=(end,))
    return Rollouts(Sums(), tokenizer, limits, 0, 1, chats=chats)


def draw(found: Rollouts, tokenizer: JsonTokenizer, text: str) -> None:
    """Take a completion of the only dialogue."""
    tokens = tokenizer.encode(text.encode()).astype(np.int32)
    lengths = np.array([len(tokens)], np.int32)
    found.take(
        False, (1,), 7, {"tokens": tokens, "logprobs": np.full(len(tokens), -1.0, np.float32), "lengths": lengths}
    )


def judged(task: Task, found: Rollouts) -> Judged:
    """Settle the only dialogue as the task's process does."""
    (one,) = found.group(False, 1)
    verdict = verdict_of(task.follow(one.problem.prompt, one.completions, one.problem.meta, one.chat))
    found.settle([one], [verdict])
    return verdict


@pytest.mark.parametrize("chats", [(QWEN, ("<|im_end|>",))], indirect=True)
def test_tool_answers_follow_and_only_samples_are_trained(tmp_path: Path, chats: PolicyChats) -> None:
    """The policy calls a tool, then answers wrongly, then rightly; between its own tokens stand the template's."""
    tokenizer = load_tokenizer(str(tokenizer_folder(tmp_path)))
    assert isinstance(tokenizer, JsonTokenizer)
    found, task = rollouts(tokenizer, chats), Adding()
    turns = [f"{CALL}<|im_end|>", "4<|im_end|>", "5<|im_end|>"]
    for turn in turns:
        draw(found, tokenizer, turn)
        verdict = judged(task, found)
    assert verdict.reward == 1.0
    (one,) = found.group(False, 1)
    assert [message["role"] for message in one.chat] == [
        *("system", "user", "assistant", "tool", "assistant", "user", "assistant")
    ]
    assert one.chat[3]["content"] == "5"
    own = np.array(one.own)
    parts = np.split(np.array(one.tokens), np.flatnonzero(np.diff(own)) + 1)
    texts = [tokenizer.decode(part.tolist()).decode() for part in parts]
    assert texts[1::2] == turns
    assert texts[2] == "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert texts[4] == "\n<|im_start|>user\nNo. Again?<|im_end|>\n<|im_start|>assistant\n"
    (rollout,) = found.trained((1,))[0]
    assert sum(rollout.own) == sum(len(tokenizer.encode(turn.encode())) for turn in turns)


@pytest.mark.parametrize("chats", [(QWEN, ("<|im_end|>",))], indirect=True)
def test_a_turn_that_was_cut_is_closed_before_the_reply(tmp_path: Path, chats: PolicyChats) -> None:
    """Beyond the limit of calls a call is judged as it is."""
    tokenizer = load_tokenizer(str(tokenizer_folder(tmp_path)))
    assert isinstance(tokenizer, JsonTokenizer)
    found, task = rollouts(tokenizer, chats), Adding()
    text = CALL + " " * (100 - len(tokenizer.encode(CALL.encode())))
    for calls in (1, 2, 3):
        tokens = tokenizer.encode(text.encode())[:100]
        draw(found, tokenizer, tokenizer.decode(tokens.tolist()).decode())
        verdict = judged(task, found)
        assert (verdict.messages is not None) == (calls <= task.most_calls)
    (one,) = found.group(False, 1)
    whole = tokenizer.decode(one.tokens).decode()
    assert whole.count("<|im_end|>\n<|im_start|>user\n<tool_response>") == 2
    assert whole.endswith("<|im_end|>\n<|im_start|>user\nNo. Again?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("chats", [(PLAIN["llama-3"], ("</s>", "<|eot_id|>"))], indirect=True)
def test_an_imitated_answer_ends_as_the_template_ends_it(chats: PolicyChats) -> None:
    assert chats.ending(said("a"), "b") == "<|eot_id|>"


@pytest.mark.parametrize("chats", [("{{ messages|length }} of tools", ("</s>",))], indirect=True)
def test_a_template_without_earlier_turns_is_named(chats: PolicyChats) -> None:
    with pytest.raises(UserError, match="leaves out an assistant's turn"):
        chats.following(said("a", "b"), said("c"))


@pytest.mark.doors("transformers")
@pytest.mark.parametrize(
    "name", [*PLAIN, "qwen-2_5-with-tools", "llama-3_1-with-tools", "qwen-3-with-reasoning", "zephyr"]
)
def test_a_dialogue_is_the_text_that_transformers_renders(tmp_path: Path, name: str) -> None:
    """Prompt, turn and reply are the rendering of the whole chat, with the assistant's turn as it writes it."""
    from transformers import PreTrainedTokenizerFast

    template = PLAIN.get(name) or (FOLDER / f"{name}.jinja").read_text()
    path = tokenizer_folder(tmp_path, template)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), **NAMES)
    theirs.chat_template = template
    chats = PolicyChats(template, NAMES, ("</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>"))
    try:
        for tools in (None, [TOOL]) if "tools" in name else (None,):
            asked, answer, reply = said("What?"), said("", "So.")[1:], said("And?")
            rendered = [
                theirs.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)
                for chat in (asked, [*asked, *answer, *reply])
            ]
            prompt, following = chats.prompt(asked, tools or ()), chats.following([*asked, *answer], reply, tools or ())
            assert prompt == rendered[0]
            assert rendered[1].endswith(following)
            assert rendered[1].removesuffix(following).strip().endswith("So.")
    finally:
        chats.close()


def test_records_with_messages_are_prompts(tmp_path: Path) -> None:
    """The assistant's last message is the answer, unless the record has one; a prompt may be messages, too."""
    path = tmp_path / "prompts.jsonl"
    chat = said("2+3?", "5", system="Add.")
    rows: list[dict[str, Any]] = [
        {"messages": chat, "level": 1},
        {"messages": chat, "answer": 6, "tools": json.dumps([TOOL])},
        {"prompt": chat[:2], "answer": "7"},
        {"conversations": [{"from": "human", "value": "2+3?"}], "system": "Add."},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    problems = problems_of("mine.py:Reward", str(path), 0, 0)
    found = {one.answer: one for one in map(problems.train, range(1, 5))}
    assert all(list(one.prompt) == chat[:2] for one in found.values())
    assert found["5"].meta == {"level": 1, "answer": "5"}
    assert found["6"].meta == {"answer": "6"}
    assert list(found["6"].tools) == [TOOL]
    assert found[""].meta == {"system": "Add."}
    assert found.keys() == {"5", "6", "7", ""}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": [*said("a"), {"role": "wizard", "content": "x"}]}, "the role 'wizard'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing is asked"),
        (
            {
                "messages": said("a"),
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}],
            },
            "f",
        ),
        ({"prompt": "text"}, "texts and prompts that are messages"),
    ],
)
def test_a_chat_that_is_no_prompt_is_refused(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{json.dumps({'messages': said('a')})}\n{json.dumps(row)}")
    with pytest.raises(UserError, match=why):
        problems_of("mine.py:Reward", str(path), 0, 0)


def test_tools_with_an_invalid_schema_are_refused() -> None:
    with pytest.raises(UserError, match=r"task Own: .*there is no type 'number_'"):
        check_tools(
            [{"type": "function", "function": {"name": "f", "parameters": {"items": {"type": "number_"}}}}], "task Own"
        )
