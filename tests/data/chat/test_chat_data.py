"""Chats as training data: records in their forms, packed tokens that say which are targets, and bad input."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_support import PLAIN, said, tokenizer_folder

from planetary.core.config import apply_overrides
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.data.bigram import bigram_baseline
from planetary.data.chat.records import chat_of
from planetary.data.kinds import rows_of
from planetary.data.prepare import prepare
from planetary.data.prepared_data import PreparedData
from planetary.data.reader import IGNORED, batches, counted, read_slice
from planetary.data.recipe import recipe_of
from planetary.data.sources import source_contents

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
MANY = [{"messages": said(f"What is {n} + 1?", f"It is {n + 1}.")} for n in range(60)]


def written(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def config_for(source: Path, tokenizer: Path, *overrides: str) -> Config:
    sizes = ["train.inner_steps=2", "train.batch_size=2", "train.sequence_length=15", "eval.batches=1"]
    given = [f"data.source={source}", f"data.tokenizer={tokenizer}", "optimizer.warmup_steps=1"]
    return apply_overrides(Config(), [*sizes, *given, *overrides])


def prepared(tmp_path: Path, records: list[Any], *overrides: str, template: str = PLAIN["chatml"]) -> PreparedData:
    tokenizer = tokenizer_folder(tmp_path / "model", template)
    config = config_for(written(tmp_path / "chats.jsonl", records), tokenizer, *overrides)
    return prepare(config, tmp_path / "cache")


def text_of(data: PreparedData, tokens: np.ndarray) -> str:
    assert data.tokenizer is not None
    return data.tokenizer.decode(np.where(tokens < 0, ~tokens, tokens).tolist()).decode()


def stream(data: PreparedData, which: str = "train") -> np.ndarray:
    file = getattr(data, which)
    return read_slice(file.slice(0, file.count))


# --- records ------------------------------------------------------------------------------------------------


def test_every_form_is_the_same_chat() -> None:
    messages = said("a", "b", "c", "d", system="s")
    spoken = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in messages[1:]]
    expected = chat_of({"messages": messages}, "x")
    assert expected.turns == (2, 4)
    for record in (
        {"conversations": [{"from": "system", "value": "s"}, *spoken]},
        {"conversations": spoken, "system": "s"},
        {"conversations": messages},
        {"messages": [{**one, "tool_calls": None, "name": None} for one in messages], "tools": None},
    ):
        assert chat_of(record, "x") == expected
    pair = chat_of({"prompt": "a", "completion": "b"}, "x")
    assert (pair.messages, pair.turns) == (said("a", "b"), (1,))


def test_calls_and_tools_reach_the_template_as_objects() -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    record = {"messages": [*said("a"), calling, {"role": "tool", "content": "2"}], "tools": json.dumps(TOOLS)}
    found = chat_of(record, "x")
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert (found.tools, found.turns) == (TOOLS, (1,))


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ([], "expected an object with messages, found list"),
        ({"text": "a"}, "expected a chat, which is messages .*, found 'text'"),
        ({"messages": []}, "expected messages under 'messages', found nothing"),
        ({"messages": "hi"}, "expected messages under 'messages', found str 'hi'"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "line 1, message 1 has the role 'wizard'; known: system"),
        ({"conversations": [{"from": "robot", "value": "a"}]}, "message 1 has the role 'robot'"),
        ({"messages": [{"role": "user"}]}, "message 1: expected a text under 'content', found nothing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of the kind 'image_url'"),
        ({"messages": said("a")}, "nothing here is trained: expected a message of the assistant$"),
        ({"prompt": said("a", "b"), "completion": said("c")}, "a message of the assistant in the completion$"),
        ({"messages": [*said("a"), {"role": "assistant", "content": "b", "weight": 0}]}, "whose weight is not 0"),
        ({"messages": [*said("a"), {"role": "assistant", "content": "b", "weight": 2}]}, "the weight 2"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "expected a call as"),
        ({"messages": said("a", "b"), "tools": "{"}, "its tools are no JSON"),
    ],
)
def test_malformed_record_is_refused_with_its_line(tmp_path: Path, record: Any, why: str) -> None:
    with pytest.raises(UserError, match=rf"chats\.jsonl, line 2.*{why}|chats\.jsonl, line 2.*{why[7:]}"):
        prepared(tmp_path, [MANY[0], record])


def _mutants(value: Any) -> Iterator[Any]:
    """Yield a record with each of its parts replaced."""
    yield from (None, True, 1.5, -1, "x", [], ["a"], [[]], {}, {"a": 1}, [{"a": [1]}])
    if isinstance(value, dict):
        yield from ({**value, key: other} for key, part in value.items() for other in _mutants(part))
        yield from ({name: part for name, part in value.items() if name != key} for key in value)
    if isinstance(value, list):
        yield from ([*value[:i], other, *value[i + 1 :]] for i, part in enumerate(value) for other in _mutants(part))


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [*said("a"), {"role": "assistant", "content": "b", "weight": 1, "tool_calls": [CALL]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, *said("a", "b")], "tools": [CALL]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
        {"prompt": said("a"), "completion": "b"},
    ],
)
def test_no_value_in_a_record_is_anything_but_refused(record: dict[str, Any]) -> None:
    chat_of(record, "line 1")
    for mutant in _mutants(record):
        with contextlib.suppress(UserError):
            chat_of(mutant, "line 1")


# --- recognition --------------------------------------------------------------------------------------------


def test_chats_are_recognised_where_records_have_no_text(tmp_path: Path) -> None:
    def kind(record: Any, name: str = "x.jsonl", text_key: str = "text") -> str:
        path = written(tmp_path / name, [record])
        return source_contents(str(path), "", text_key).kinds[0]

    for record in (MANY[0], {"conversations": [{"from": "human", "value": "a"}]}, {"prompt": "a", "completion": "b"}):
        assert kind(record) == "chat"
        assert kind({**record, "text": "a"}) == "jsonl"
        assert kind(record, text_key="prompt") == "jsonl"
    assert kind([MANY[0], MANY[1]], "x.json") == "chat"
    assert kind({"messages": "a"}) == kind({"prompt": "a"}) == "jsonl"
    assert next(rows_of(str(written(tmp_path / "y.jsonl", MANY))))["messages"]  # a reader of records is not concerned


@pytest.mark.slow
def test_every_notation_gives_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import Table  # pyright: ignore[reportMissingImports]
    from pyarrow.feather import write_feather  # pyright: ignore[reportMissingImports]
    from pyarrow.parquet import write_table  # pyright: ignore[reportMissingImports]

    lines = prepared(tmp_path, MANY)
    array = tmp_path / "chats.json"
    array.write_text(json.dumps(MANY))
    table, arrow = tmp_path / "chats.parquet", tmp_path / "chats.arrow"
    write_table(Table.from_pylist(MANY), table)
    write_feather(Table.from_pylist(MANY), arrow, compression="uncompressed")
    for source in (array, table, arrow):
        found = prepare(config_for(source, tmp_path / "model" / "tokenizer.json"), tmp_path / "cache")
        assert (found.train.digest, found.held_out.digest) == (lines.train.digest, lines.held_out.digest)
    assert "chats; the first begins '<|im_start|>user\\nWhat is 0 + 1?<|im_end|>\\n" in lines.notes[0]
    assert "of the training tokens" in lines.notes[1]


# --- tokens -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """`MANY`, in order."""
    return prepared(tmp_path_factory.mktemp("many"), MANY, "data.sampling=fifo")


def test_targets_are_what_the_assistant_said(many: PreparedData) -> None:
    data = many
    assert (data.train.dtype, data.train.is_marked) == ("i16", True)
    tokens = stream(data)
    assert "<|im_end|>\n<|im_start|>user\n" in text_of(data, tokens)
    answers = text_of(data, tokens[tokens >= 0]).split("<|im_end|>")
    assert len(answers) > 40
    assert {answer[:6] for answer in answers[1:-1]} == {"It is "}
    for (inputs, targets), block in zip(batches(tokens, 1, 15), tokens.reshape(-1, 16), strict=True):
        assert inputs.tolist() == [np.where(block < 0, ~block, block)[:-1].tolist()]
        assert targets.tolist() == [np.where(block < 0, IGNORED, block)[1:].tolist()]
        assert counted(targets) == np.count_nonzero(block[1:] >= 0) > 0


def test_packed_chats_are_whole_and_have_the_same_targets(tmp_path: Path) -> None:
    data = prepared(tmp_path, MANY, "data.packing=true", "train.sequence_length=127")
    assert data.layout is not None
    columns = {one.name: data.layout.column(stream(data), one.name) for one in data.layout.columns}
    for tokens, segments, targets in zip(columns["tokens"], columns["segment_ids"], columns["targets"], strict=True):
        for number in range(1, segments.max() + 1):
            here = segments == number
            assert text_of(data, tokens[here].astype(int)).startswith("<|im_start|>user\nWhat is ")
            counts = targets[here][targets[here] != IGNORED]
            assert text_of(data, counts.astype(int)).startswith("It is ")
            assert text_of(data, counts.astype(int)).endswith(".<|im_end|>")
    held_out = data.layout.column(stream(data, "held_out"), "segment_ids").max(axis=1).sum()
    assert columns["segment_ids"].max(axis=1).sum() + held_out == len(MANY) == data.documents
    assert "60 documents are packed into" in data.notes[1]


def test_sequences_without_a_target_are_left_out(tmp_path: Path) -> None:
    long = {"messages": said("so " * 200, "yes")}
    data = prepared(tmp_path, [long, *MANY, long], "data.sampling=fifo")
    blocks = stream(data).reshape(-1, 16)
    assert ((blocks[:, 1:] >= 0).any(axis=1)).all()
    assert sum("so so so so" in text_of(data, block) for block in blocks) <= 4


def test_bigram_baseline_is_of_targets(many: PreparedData) -> None:
    loss = bigram_baseline(many, [(many.held_out.slice(0, 16), 1)]).loss
    assert loss is not None
    assert 0 < loss < 2


def test_targets_need_a_signed_type(many: PreparedData) -> None:
    with pytest.raises(UserError, match="takes targets as ui16: take them as i32 or i64"):
        next(batches(stream(many), 1, 15, ("i32", "ui16")))


# --- bad input ----------------------------------------------------------------------------------------------


def test_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no chat template to render them with: put it beside the tokenizer"):
        prepared(tmp_path, MANY, template="")
    source = written(tmp_path / "x.jsonl", MANY)
    with pytest.raises(UserError, match="the tokenizer byte has no chat template"):
        prepare(apply_overrides(Config(), [f"data.source={source}"]), tmp_path / "cache")


def test_template_that_refuses_names_file_and_line(tmp_path: Path) -> None:
    records = [MANY[0], {"messages": said("a", "b", system="s")}]
    with pytest.raises(UserError, match=r"chats\.jsonl, line 2: the chat template fails: it refuses .*: no system"):
        prepared(tmp_path, records, template=PLAIN["gemma"])
    assert not list((tmp_path / "cache").glob("*/prepared.json"))


def test_half_a_character_is_replaced_as_in_texts(tmp_path: Path) -> None:
    data = prepared(tmp_path, [{"messages": said("a", "x\ud83dy")}, *MANY], "data.sampling=fifo")
    assert text_of(data, stream(data)).startswith("x?y<|im_end|>")  # without the sequence before it


def test_too_few_chats_are_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train part of .*chats\.jsonl has fewer than 16 tokens .*, of \d+ in all"):
        prepared(tmp_path, MANY[:1])


def test_another_template_is_other_data(tmp_path: Path) -> None:
    source, keys = written(tmp_path / "x.jsonl", MANY), set()
    for name in ("chatml", "gemma", "mistral"):
        keys.add(recipe_of(config_for(source, tokenizer_folder(tmp_path / "model", PLAIN[name])), tmp_path).key)
    assert len(keys) == 3


def test_declared_chats_in_no_known_notation_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("once upon a time")
    tokenizer = tokenizer_folder(tmp_path / "model", PLAIN["chatml"])
    with pytest.raises(UserError, match=r"is to hold chats .*: expected JSON lines, a JSON array, or a table of"):
        prepare(config_for(tmp_path / "x.txt", tokenizer, "data.format=chat"), tmp_path / "cache")
