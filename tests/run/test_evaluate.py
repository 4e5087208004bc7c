"""`planetary evaluate`: values against a plain loop and transformers, chats, own metrics, and wrong input."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from chat_support import MARKED, said, tokenizer_folder
from serving_run import WINDOW, write_run

from planetary.cli.main import main
from planetary.core.configuration.schema import DataSource
from planetary.core.errors import UserError
from planetary.data.chat.documents import chat_documents
from planetary.data.chat.records import chat_of
from planetary.data.tokenizer import JsonTokenizer, load_tokenizer
from planetary.models.layers import cross_entropy
from planetary.run.handle import Run
from planetary.run.model.evaluation import ModelEvaluation, SetEvaluation, evaluate_folder
from planetary.run.model.pretrained_export import export_pretrained
from planetary.run.model.served import load_folder, load_trained

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
TEXT = "def f(x):\n    return 'naïve €'\n" * 40
GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 310, "n_position": 256}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    write_run(folder, 3, 1)
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained folder with random weights, and a tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("published")
    path = tokenizer_folder(folder, MARKED["chatml"])
    write_run(folder / "run", 3, 1, source="planetary.models.gpt2:build", options=GPT2, data={"tokenizer": str(path)})
    export_pretrained(folder / "run", folder / "model")
    assert (folder / "model" / "chat_template.jinja").is_file()
    return folder / "model"


def text_file(folder: Path, text: str = TEXT, name: str = "text.txt") -> DataSource:
    (folder / name).write_text(text)
    return DataSource(str(folder / name), text_key="text")


def evaluated(folder: Path, tmp_path: Path, *metrics: str, **sources: DataSource) -> ModelEvaluation:
    return next(evaluate_folder(folder, sources, metrics, cache=tmp_path / "cache"))


def only(found: ModelEvaluation) -> SetEvaluation:
    (one,) = found.sets
    return one


def test_values_are_those_of_a_plain_loop(tmp_path: Path, run: Path) -> None:
    """Rows of 257 bytes, the last one shorter, each predicted from its first byte on."""
    found = evaluated(run, tmp_path, text=text_file(tmp_path))
    model, data = load_trained(run), np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    nats, right, count, each = 0.0, 0, 0, []
    for start in range(0, len(data), WINDOW + 1):
        row = data[start : start + WINDOW + 1]
        logps = np.asarray(jax.nn.log_softmax(model.logits(model.params, row[None, :-1])), np.float64)[0]
        own = -logps[np.arange(len(row) - 1), row[1:]]
        nats, count, right = nats + own.sum(), count + own.size, right + int((logps.argmax(1) == row[1:]).sum())
        each.append(own)
    one = only(found)
    assert (one.targets, one.nbytes, one.rows) == (count, count, len(each))
    values = {name: value.value for name, value in one.values.items()}
    expected = {"loss": nats / count, "accuracy": right / count, "bits_per_byte": nats / count / math.log(2)}
    assert values == pytest.approx({**expected, "perplexity": math.exp(nats / count)}, rel=1e-6)
    without = [(nats - own.sum()) / (count - own.size) for own in each]
    spread = math.sqrt((len(each) - 1) * np.var(without))
    assert one.values["loss"].error == pytest.approx(spread, rel=1e-4)


def test_a_run_is_evaluated_from_python(tmp_path: Path, run: Path) -> None:
    source = text_file(tmp_path).source
    (run / "events.jsonl").touch()
    found = Run.open(run).evaluate({"text": source}, ["bits_per_byte"], round=3, cache=tmp_path)
    expected = only(evaluated(run, tmp_path, "bits_per_byte", text=text_file(tmp_path)))
    assert found == {"text": {name: value.value for name, value in expected.values.items()}}
    (tmp_path / "bad.py").write_text("def bad(rows):\n    1 / 0\n")
    with pytest.raises(UserError, match="set text: metric bad fails: ZeroDivisionError"):
        Run.open(run).evaluate({"text": source}, [f"{tmp_path}/bad.py:bad"], cache=tmp_path)


def test_own_held_out_part_has_the_loss_of_the_training_step(tmp_path: Path, run: Path) -> None:
    """Without a set: the batches of the run's own evaluation, and the model's own cross-entropy of them."""
    from planetary.core.config import load_config
    from planetary.data.prepare import prepare
    from planetary.data.reader import batches, read_slice

    found = only(evaluated(run, tmp_path, "loss"))
    config, model = load_config(run / "config.toml"), load_trained(run)
    pieces = prepare(config, tmp_path / "cache" / "data").eval_chunks(config, 1)
    losses = [
        float(cross_entropy(model.logits(model.params, inputs), targets))
        for piece, _ in pieces
        for inputs, targets in batches(read_slice(piece), 1, WINDOW)
    ]
    assert (found.name, found.rows) == ("held_out", config.eval.batches)
    assert found.values["loss"].value == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.slow
def test_packed_run_has_the_loss_of_each_document_by_itself(tmp_path: Path) -> None:
    """The run's own held-out part: every document of every sequence, read without the others."""
    from planetary.core.config import load_config
    from planetary.data.prepare import prepare
    from planetary.data.reader import read_slice

    texts = [f"the number {n} times {n * n % 17}" for n in range(400)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 16, "n_hidden": 24, "segments": True}
    data = {"source": str(tmp_path / "texts.jsonl"), "packing": True, "held_out_fraction": 0.2}
    folder = tmp_path / "packed"
    write_run(folder, 3, 1, source="planetary.models.llama:build", options=options, data=data)
    one = only(evaluated(folder, tmp_path, "loss"))
    config, model = load_config(folder / "config.toml"), load_trained(folder)
    made, nats, count = prepare(config, tmp_path / "cache" / "data"), 0.0, 0
    assert made.layout is not None
    raw = np.concatenate([read_slice(piece) for piece, _ in made.eval_chunks(config)])
    columns = {column.name: made.layout.column(raw, column.name) for column in made.layout.columns}
    for row in range(len(columns["tokens"])):
        tokens, segments, targets = (columns[name][row] for name in ("tokens", "segment_ids", "targets"))
        for segment in range(1, segments.max() + 1):
            own = segments == segment
            logps = np.asarray(jax.nn.log_softmax(model.logits(model.params, tokens[None, own].astype(np.int32))))[0]
            nats, count = nats - logps[np.arange(own.sum()), targets[own]].sum(), count + int(own.sum())
    assert one.targets == count
    assert one.values["loss"].value == pytest.approx(nats / count, rel=1e-5)
    with pytest.raises(UserError, match=r"--context 9: the held-out part of .* is examples, which have one length"):
        next(evaluate_folder(folder, {}, cache=tmp_path / "cache", length=9))


@pytest.mark.doors("torch", "transformers")
def test_loss_equals_that_of_transformers(tmp_path: Path, published: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = next(evaluate_folder(published, {"text": text_file(tmp_path)}, cache=tmp_path, length=32))
    ids = AutoTokenizer.from_pretrained(published)(TEXT, add_special_tokens=False)["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(published)
    nats, count = 0.0, 0
    for start in range(0, len(ids), 33):
        row = torch.tensor([ids[start : start + 33]])
        if row.shape[1] > 1:
            nats += float(model(row, labels=row).loss) * (row.shape[1] - 1)
            count += row.shape[1] - 1
    one = only(found)
    assert one.targets == count
    assert one.values["loss"].value == pytest.approx(nats / count, rel=1e-5)
    bytes_read = sum(len(load_tokenizer(str(published / "tokenizer.json")).decode([i])) for i in ids[::33])
    assert abs(one.nbytes - (len(TEXT.encode()) - bytes_read)) <= 4 * len(ids[::33])  # a half character decodes longer


def test_chats_count_what_the_assistant_says(tmp_path: Path, published: Path) -> None:
    chats = [said("What is 2 + 3?", "5"), said("Say it.", "naïve", "Again.", "déjà vu")]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    source = DataSource(str(path), text_key="text", format="chat")
    one = only(next(evaluate_folder(published, {"chats": source}, cache=tmp_path, length=64)))
    place = str(published / "tokenizer.json")
    tokenizer = load_tokenizer(place)
    assert isinstance(tokenizer, JsonTokenizer)
    documents = chat_documents(place)((f"chat {i}", chat_of({"messages": c}, "")) for i, c in enumerate(chats))
    ids = np.concatenate([tokenizer.encode_marked(document) for document in documents])
    starts = np.arange(ids.size) % 65 == 0
    assert one.targets == int(((ids >= 0) & ~starts).sum()) < ids.size / 2
    said_bytes = [tokenizer.token_bytes(i) for i in ids[(ids >= 0) & ~starts] if i not in tokenizer.special]
    assert one.nbytes == sum(map(len, said_bytes))


def test_own_metric_of_the_page_reads_logits(tmp_path: Path, run: Path) -> None:
    ((name, text),) = re.findall(r"```python\n(?=# (my_metric\.py))(.*?)```", PAGE, re.DOTALL)
    (tmp_path / name).write_text(text)
    one = only(evaluated(run, tmp_path, f"{tmp_path / name}:TopFive", text=text_file(tmp_path)))
    model, data = load_trained(run), np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    hits = []
    for start in range(0, len(data), WINDOW + 1):
        row = data[start : start + WINDOW + 1]
        scores = np.asarray(model.logits(model.params, row[None, :-1]))[0]
        hits += [t in np.argsort(-s)[:5] for s, t in zip(scores, row[1:], strict=True)]
    assert one.values["TopFive"].value == pytest.approx(np.mean(hits))


def test_a_failing_metric_leaves_the_others(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "bad.py"
    own.write_text("def bad(rows):\n    return rows.logits[:, :, 0][:, 1:]\n\n\ndef worse(rows):\n    1 / 0\n")
    source = text_file(tmp_path).source
    command = ["evaluate", str(run), "--data", f"a={source}", "--metric", f"{own}:bad", "--metric", f"{own}:worse"]
    assert main([*command, "--cache", str(tmp_path)]) == 2
    shown = capsys.readouterr().out
    assert "a    loss" in shown
    assert re.search(r"set a: metric bad fails: ValueError: it returned \[\d, 255\], expected", shown)
    assert re.search(r"set a: metric worse fails: ZeroDivisionError: division by zero \(<bad.py@.*>:6\)", shown)


def test_a_graph_gets_one_row_at_a_time(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = load_trained(run), []

    def decode(params: Any, tokens: jax.Array, context: Any) -> jax.Array:
        seen.append(tokens.shape)
        return model.decode(params, tokens, context)

    expected = evaluated(run, tmp_path, text=text_file(tmp_path))
    graph = replace(model, only_length=WINDOW, decode=decode)
    monkeypatch.setattr("planetary.run.model.evaluation.load_folder", lambda folder: graph)
    found = evaluated(run, tmp_path, text=text_file(tmp_path))
    assert seen == [(1, WINDOW)]
    assert only(found).values["loss"].value == pytest.approx(only(expected).values["loss"].value)


@pytest.mark.slow
def test_later_versions_are_followed(tmp_path: Path) -> None:
    """Each checkpoint is evaluated as it comes, with the compiled function of the first, until the run is over."""
    folder, looks = tmp_path / "followed", []
    write_run(folder, 1, 1)

    def is_over() -> bool:
        looks.append(1)
        if len(looks) in (2, 3):
            write_run(folder, len(looks), len(looks))
        return len(looks) > 3

    source = text_file(tmp_path)
    found = list(evaluate_folder(folder, {"text": source}, ["loss"], cache=tmp_path, is_over=is_over))
    assert [one.version for one in found] == [1, 2, 3]
    assert len(looks) == 4
    losses = [only(one).values["loss"].value for one in found]
    assert len(set(losses)) == 3
    for version, loss in enumerate(losses, 1):
        checkpoint = folder / "checkpoints" / f"round-{version:06d}"
        again = next(evaluate_folder(folder, {"text": source}, ["loss"], cache=tmp_path, checkpoint=checkpoint))
        assert only(again).values["loss"].value == loss


def test_json_has_every_set(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = text_file(tmp_path).source, text_file(tmp_path, "short", "short.txt").source
    command = ["evaluate", str(run), "--data", f"long={first}", "--data", f"short={second}", "--metric", "loss"]
    assert main([*command, "--json", "--cache", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["targets"], one["values"]["loss"]["error"] is None) for one in found["sets"]] == [
        ("long", len(TEXT.encode()) - math.ceil(len(TEXT.encode()) / (WINDOW + 1)), False),
        ("short", 4, True),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [("", r"text.txt.* has 0 tokens|is empty"), ("x", r"the set text \(.*\) has 1 tokens: expected two at least")],
)
def test_a_set_without_targets_is_refused(tmp_path: Path, run: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        evaluated(run, tmp_path, text=text_file(tmp_path, text))


def test_what_does_not_fit_the_model_is_refused(tmp_path: Path, run: Path, published: Path) -> None:
    np.array([1, 2, 700], "<u2").tofile(tmp_path / "data.u16")
    with pytest.raises(UserError, match=r"has token 700, and the model knows 256: it was made with another tokenizer"):
        evaluated(run, tmp_path, tokens=DataSource(str(tmp_path / "data.u16"), text_key="text"))
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": said("a", "b")}))
    with pytest.raises(UserError, match="the tokenizer byte has no chat template"):
        evaluated(run, tmp_path, chats=DataSource(str(chat), text_key="text", format="chat"))
    with pytest.raises(UserError, match="has pairs of answers, and a set is texts of which every one is wanted"):
        evaluated(run, tmp_path, pairs=DataSource(str(chat), text_key="text", format="preference"))
    with pytest.raises(UserError, match="--context 257: the model model takes 256 tokens at most"):
        next(evaluate_folder(published, {"a": text_file(tmp_path)}, cache=tmp_path, length=257))
    with pytest.raises(UserError, match=r"no held-out data in .*: it is no run. Give some, as --data NAME=PATH"):
        next(evaluate_folder(published, {}, cache=tmp_path))
    with pytest.raises(UserError, match=r"nothing to evaluate in .*nowhere: expected a run folder"):
        evaluated(tmp_path / "nowhere", tmp_path, text=text_file(tmp_path))
    assert main(["evaluate", str(published), "--data", "a=x.txt", "--follow"]) == 2
    with pytest.raises(UserError, match=r"unknown metric 'acuracy'; did you mean accuracy\?"):
        evaluated(run, tmp_path, "acuracy", text=text_file(tmp_path))
    (published.parent / "bare").mkdir()
    for path in published.iterdir():
        if not path.name.startswith("tokenizer"):
            (published.parent / "bare" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=r"has no tokenizer\.json, without which its tokens have no text"):
        load_folder(published.parent / "bare")


@pytest.mark.parametrize("given", [["a"], ["=x.txt"], ["a=x.txt", "a=y.txt"]])
def test_a_set_has_a_name_of_its_own(run: Path, given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), *(word for one in given for word in ("--data", one))]) == 2
    assert f"--data {given[-1]}: " in capsys.readouterr().err
