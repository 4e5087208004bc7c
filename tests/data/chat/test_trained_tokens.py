"""Which tokens of a chat are trained: those that transformers marks, with and without marks in the template."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_support import CHATS, MARKED, PLAIN, said, tokenizer_folder

from planetary.core.errors import UserError
from planetary.data.chat.documents import chat_documents
from planetary.data.chat.records import chat_of
from planetary.data.chat.template import ChatTemplate
from planetary.data.tokenizer import JsonTokenizer, load_tokenizer

FOLDER = Path(__file__).with_name("chat_templates")
QWEN_3 = (FOLDER / "qwen-3-with-reasoning.jinja").read_text()


def tokens_of(path: Path, *records: Any) -> list[np.ndarray]:
    tokenizer = load_tokenizer(str(path))
    assert isinstance(tokenizer, JsonTokenizer)
    chats = [(f"chat {i}", chat_of(record, f"chat {i}")) for i, record in enumerate(records)]
    return [tokenizer.encode_marked(document) for document in chat_documents(str(path))(chats)]


def trained(template: str, messages: list[dict[str, Any]], turns: tuple[int, ...] | None = None) -> list[list[str]]:
    """Return the trained parts of each text that a chat makes."""
    wanted = turns or tuple(i for i, one in enumerate(messages) if one["role"] == "assistant")
    samples = ChatTemplate(template).samples({"messages": messages}, wanted)
    return [[sample.text[begin:end] for begin, end in sample.spans] for sample in samples]


@pytest.mark.doors("transformers")
@pytest.mark.parametrize("family", MARKED)
def test_trained_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    from transformers import PreTrainedTokenizerFast

    path = tokenizer_folder(tmp_path, MARKED[family])
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<s>", eos_token="</s>")
    theirs.chat_template = MARKED[family]
    complete = [chat if chat[-1]["role"] == "assistant" else chat[:-1] for chat in CHATS]
    marked = tokens_of(path, *({"messages": chat} for chat in complete))
    tokenizer_folder(tmp_path, PLAIN[family])
    by_difference = tokens_of(path, *({"messages": chat} for chat in complete))
    for chat, one, other in zip(complete, marked, by_difference, strict=True):
        known = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        expected = [i if mask else ~i for i, mask in zip(known["input_ids"], known["assistant_masks"], strict=True)]
        assert one.tolist() == expected
        assert other.tolist() == expected
        assert any(i < 0 for i in expected)
        assert any(i >= 0 for i in expected)


def test_spaces_of_a_tokenizer_that_trims_are_trained(tmp_path: Path) -> None:
    path = tokenizer_folder(tmp_path, PLAIN["mistral"], trims_offsets=True)
    tokenizer = load_tokenizer(str(path))
    (tokens,) = tokens_of(path, {"messages": said("a", "b c")})
    assert tokenizer.decode(tokens[tokens >= 0].tolist()) == b" b c</s>"
    assert tokenizer.decode(np.where(tokens < 0, ~tokens, tokens).tolist()) == b"<s>[INST] a [/INST] b c</s>"


def test_a_template_that_rewrites_history_makes_more_texts() -> None:
    """Each turn is trained as a model is asked for it: with the thoughts that later turns do not see."""
    chat = said("a", "b", "c", "d")
    assert trained(QWEN_3, chat) == [[f"<think>\n\n</think>\n\n{text}<|im_end|>\n"] for text in "bd"]
    chat[1]["reasoning_content"], chat[3]["reasoning_content"] = "x", "y"  # this template keeps those
    assert trained(QWEN_3, chat) == [
        [f"<think>\n{x}\n</think>\n\n{text}<|im_end|>\n" for x, text in (("x", "b"), ("y", "d"))]
    ]


def test_a_prompt_for_a_thought_need_not_be_in_the_turn() -> None:
    template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    )
    assert trained(template, said("a", "b", "c", "d")) == [["b", "d"]]


def test_end_of_a_whole_chat_is_not_trained() -> None:
    """Phi-3's template closes a chat that nothing is asked of; that is one text still, with its closing token."""
    template = (FOLDER / "phi-3.jinja").read_text()
    (sample,) = ChatTemplate(template).samples({"messages": said("a", "b", "c", "d"), "eos_token": "</s>"}, (1, 3))
    assert [sample.text[begin:end] for begin, end in sample.spans] == ["b<|end|>\n", "d<|end|>\n"]
    assert sample.text.endswith("d<|end|>\n</s>")


def test_only_chosen_turns_are_trained() -> None:
    chat = said("a", "b", "c", "d")
    for templates in (MARKED, PLAIN):
        assert trained(templates["chatml"], chat, (3,)) == [["d<|im_end|>\n"]]
    pair = chat_of({"prompt": chat[:3], "completion": chat[3:]}, "x")
    weighted = chat_of({"messages": [chat[0], {**chat[1], "weight": 0}, *chat[2:]]}, "x")
    assert pair == weighted == chat_of({"messages": chat}, "x").__class__(chat, (3,))


@pytest.mark.parametrize(
    ("template", "said_why"),
    [
        ("{{ messages | length }}{{ messages[-1].content }}", "changes the text before it"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves out"),
        ("{% generation %}{% endgeneration %}x", "marks nothing"),
        ("{% set x %}yy{% generation %}a{% endgeneration %}{% endset %}z{{ x }}", "its place is not known"),
        ("{{ raise_exception('no tools here') }}", "no tools here"),
    ],
)
def test_template_that_cannot_train_is_refused(template: str, said_why: str) -> None:
    with pytest.raises(UserError, match=re.escape(said_why)):
        trained(template, said("a", "b", "c", "d"))


def test_the_day_of_training_data_is_fixed() -> None:
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (sample,) = ChatTemplate(template).samples({"messages": said("a", "b")}, (1,))
    assert sample.text == "26 Jul 2024ab"


def test_endless_template_names_the_record(tmp_path: Path) -> None:
    path = tokenizer_folder(tmp_path, "{% for a in range(10**9) %}{{ a }}{% endfor %}")
    with pytest.raises(UserError, match=r"^chat 0: the chat template fails: it"):
        tokens_of(path, {"messages": said("a", "b")})
