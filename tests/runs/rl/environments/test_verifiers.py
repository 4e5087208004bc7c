"""Environments of the library verifiers: dialogues, tools and rewards are those of its own rollouts."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_support import PLAIN, tokenizer_folder

import planetary
from planetary.core.errors import UserError
from planetary.core.extension_points import TASKS
from planetary.core.registry import Chosen
from planetary.runs.rl.environments.judge_process import Case
from planetary.runs.rl.environments.judges import JudgeLimits, JudgeProcesses, check_environment
from planetary.runs.rl.environments.judging import task_of
from planetary.runs.rl.environments.problems import problems_of
from planetary.runs.rl.environments.tasks import Task

needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None,
    reason="pip install 'verifiers>=0.1.14,<0.2'; it brings a hundred packages that nothing else here needs",
)
PACKAGE = '''
import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: a number
        b: another
    """
    return a + b


async def right(completion, answer) -> float:
    return 1.0 if completion[-1].content == answer else 0.1 * len(completion)


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"not {messages[-1].content}"}]

    @vf.stop
    async def is_right(self, state) -> bool:
        said = state["trajectory"][-1]["completion"][-1].content if state["trajectory"] else None
        return said == state["answer"]


def load_environment():
    rows = [{"question": f"{i}+2?", "answer": str(i + 2)} for i in range(8)]
    given = {"dataset": Dataset.from_list(rows), "rubric": vf.Rubric(funcs=[right]), "system_prompt": "Add."}
    return MADE
'''
KINDS = {
    "single": "vf.SingleTurnEnv(**given)",
    "tools": "vf.ToolEnv(tools=[add], max_turns=3, **given)",
    "several": "Guess(max_turns=3, **given)",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes an environment's package, and returns the name of the task."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def make(kind: str) -> str:
        (tmp_path / f"made_{kind}.py").write_text(PACKAGE.replace("MADE", KINDS[kind]))
        return f"verifiers:made-{kind}"

    return make


def replayed(task: Task, chat: list[dict[str, Any]], row: int, turns: Sequence[Mapping[str, Any]]) -> float:
    """Follow the policy's turns to the reward; `chat` has the whole dialogue then."""
    for turn in turns:
        chat.append(dict(turn))
        found = task.follow(chat, (), {"row": row}, chat)
        if isinstance(found, float):
            return found
        assert isinstance(found, list)
        chat += found
    raise AssertionError("the dialogue goes on")


def own(kind: str, row: int, turns: Sequence[Mapping[str, Any]]) -> tuple[list[str], float]:
    """Return the contents of the environment's own rollout with a client that answers with these turns; the reward."""
    import importlib

    import httpx
    import verifiers as vf
    from openai import AsyncOpenAI

    left = list(turns)

    def answer(request: httpx.Request) -> httpx.Response:
        message = dict(left.pop(0))
        if "tool_calls" in message:
            message["tool_calls"] = [
                {**one, "function": {**one["function"], "arguments": json.dumps(one["function"]["arguments"])}}
                for one in message["tool_calls"]
            ]
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        found = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        return httpx.Response(200, json=found)

    environment = importlib.import_module(f"made_{kind}").load_environment()
    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    client = vf.OpenAIChatCompletionsClient(AsyncOpenAI(base_url="http://m/v1", api_key="k", http_client=http))

    async def run() -> Any:
        state = await environment.rollout(environment.get_dataset()[row], client, "m", {})
        await environment.rubric.score_rollout(state)
        return state

    state = asyncio.run(run())
    return [str(one.content or "") for one in [*state["prompt"], *state["completion"]]], state["reward"]


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(**arguments: Any) -> dict[str, Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@needs_verifiers
@pytest.mark.parametrize(
    ("kind", "turns"),
    [
        ("single", [says("5")]),
        ("single", [says("6")]),
        ("tools", [calls(a=3, b=2), says("5")]),
        ("tools", [calls(a=3), calls(a=3, b=2), calls(a=1, b=1)]),
        ("several", [says("4"), says("5")]),
        ("several", [says("1"), says("2"), says("3")]),
    ],
)
def test_dialogue_and_reward_are_the_environments_own(
    package: Callable[[str], str], kind: str, turns: list[dict[str, Any]]
) -> None:
    task = TASKS.make(Chosen(package(kind)))
    problem = task.problems()[3]
    chat = [dict(one) for one in problem.prompt]
    assert chat == [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+2?"}]
    assert problem.answer == "5"
    reward = replayed(task, chat, problem.meta["row"], turns)
    contents, expected = own(kind, 3, turns)
    assert reward == expected
    said = [str(one["content"] or "") for one in chat]
    assert contents[: len(said)] == said


@needs_verifiers
def test_an_environment_runs_in_the_judges_process(package: Callable[[str], str]) -> None:
    """Its data set has the prompts, its tools are offered, and a dialogue whose context is full is scored as it is."""
    task, limits = package("tools"), JudgeLimits(1, 20.0, 2 << 30)
    (tool,), listed = check_environment(task, limits)
    assert tool["function"]["name"] == "add"
    problems = problems_of(task, "", 0, 3, tools=[tool], listed=listed)
    assert {problems.train(number).answer for number in range(1, 6)}.isdisjoint(
        problems.held_out(number).answer for number in range(3)
    )
    assert problems.train(1).tools == [tool]
    chat = [*map(dict, problems.train(1).prompt), calls(a=1, b=1)]

    async def ask() -> list[Any]:
        judges = JudgeProcesses(task, limits)
        case = Case(chat[:2], ("",), dict(problems.train(1).meta), tuple(chat))
        try:
            return await judges.judge([case, Case(case.prompt, case.completions, case.meta, case.chat, is_over=True)])
        finally:
            await judges.close()

    follows, over = asyncio.run(ask())
    assert [(one["role"], one["content"]) for one in follows.messages] == [("tool", "2")]
    assert over.reward == pytest.approx(0.1)  # a completion of one message: the answer was too long to be seen


@needs_verifiers
@pytest.mark.processes
def test_a_policy_learns_in_an_environment(package: Callable[[str], str], tmp_path: Path, shared_cache: Path) -> None:
    tokenizer = tokenizer_folder(tmp_path / "tokenizer", PLAIN["chatml"])
    settings = json.loads((tokenizer.parent / "tokenizer_config.json").read_text())
    (tokenizer.parent / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|im_end|>"}))
    rl = {"task": package("several"), "groups": 2, "completions": 4, "max_tokens": 4, "held_out": 2, "judges": 1}
    tables = {
        "rl": {**rl, "imitated_rounds": 1, "equal": "keep", "judge_seconds": 20.0},
        "model": {
            "source": "planetary.models.gpt2:build",
            "options": {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 512, "n_position": 128},
        },
        "data": {"tokenizer": str(tokenizer)},
        "train": {"rounds": 3, "inner_steps": 1, "batch_size": 8, "sequence_length": 127},
        "fabric": {"workers": 1},
    }
    run = planetary.train(tables, run_dir=tmp_path / "run", cache=shared_cache, plain_loopback=True)
    rewards = [reward for event in run.events if event["event"] == "group_sampled" for reward in event["rewards"]]
    assert len(rewards) >= 16
    # Three wrong guesses, with the two answers to them, make a completion of five messages.
    assert set(rewards) <= {0.5, 1.0}


def test_a_missing_environment_is_named() -> None:
    with pytest.raises(UserError, match=r'"verifiers:no-such": the environment\'s package|needs the library verifiers'):
        task_of("verifiers:no-such")
    with pytest.raises(UserError, match=r"expected .verifiers:ENV"):
        task_of("verifiers:")
    with pytest.raises(UserError, match=r"There are .*verifiers:NAME"):
        task_of("verifier:x")
