"""What can be served, and what is said of the rest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from serving_run import SMALL, write_run

from planetary.artifacts.store import BlobStore
from planetary.cli.main import main
from planetary.compiler.frontend.export import export_model
from planetary.core.config import config_from_tables
from planetary.core.errors import TrustError, UserError
from planetary.models.context import CacheSizes, WholeText
from planetary.run.model import served as served_module
from planetary.run.model.pretrained_export import export_pretrained
from planetary.run.model.served import load_folder, load_served
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.program import kept_traces, traced_model
from planetary.runs.serve.program.cache_kinds import NoCache, RecurrentState
from planetary.runs.serve.program.exported_model import PROGRAM, WEIGHTS, ExportedModel, is_exported, write_exported
from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.program.shape import ServingShape
from planetary.runs.serve.program.traced_model import TracedModel
from planetary.runtime.device_program import Program

GPT2 = ("planetary.models.gpt2:build", {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 256})
LLAMA = (
    "planetary.models.llama:build",
    {"n_layer": 1, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_hidden": 48, "vocab_size": 256},
)


def served(path: Path, **options: Any) -> TracedModel:
    model = load_served(config_from_tables({"serve": {"model": str(path), **options}}))
    assert isinstance(model, TracedModel)
    return model


def shape_of(model: ServedModel, **options: Any) -> ServingShape:
    return model.shape(ServeConfig(model="x", **options))


@pytest.mark.parametrize(("source", "options"), [GPT2, LLAMA])
def test_an_exported_folder_is_the_model_that_the_run_is(tmp_path: Path, source: str, options: dict[str, Any]) -> None:
    write_run(tmp_path / "run", 3, seed=1, source=source, options=options)
    export_pretrained(tmp_path / "run", tmp_path / "folder")
    run, folder = served(tmp_path / "run"), served(tmp_path / "folder")
    assert (run.name, run.version, folder.name, folder.version) == ("run", 3, "folder", 0)
    assert isinstance(run.sizes, CacheSizes)
    assert isinstance(folder.sizes, CacheSizes)
    assert run.sizes.layers == folder.sizes.layers == 1
    assert run.window == folder.window == 256
    mine, others = run.arrays(), folder.arrays()
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        np.testing.assert_array_equal(value, others[name])
    assert run.tokenizer.encode(b"abc").tolist() == folder.tokenizer.encode(b"abc").tolist()


def test_a_folder_says_how_chats_begin_and_how_texts_end(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 1, seed=1, source=LLAMA[0], options=LLAMA[1])
    folder = tmp_path / "folder"
    export_pretrained(tmp_path / "run", folder)
    settings = {"chat_template": "{{ bos_token }}x", "bos_token": {"content": "a"}, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    model = served(folder)
    assert model.chat_template == "{{ bos_token }}x"
    assert dict(model.special_tokens) == {"bos_token": "a"}
    assert (model.begins, model.ends) == ((), {5, 7})
    assert "the post-processor of tokenizer.json decides" in model.warning
    published = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**published, "eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "b"}))
    assert served(folder).ends == {98}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    made = json.loads((folder / "tokenizer.json").read_text())
    single = [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"a": {"id": "a", "ids": [97], "tokens": ["a"]}}
    made["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}
    (folder / "tokenizer.json").write_text(json.dumps(made))
    model = served(folder)
    assert (model.begins, model.warning) == ((97,), "")
    named = {"bos_token": "c", "pad_token": {"content": "d"}}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    assert dict(served(folder).special_tokens) == {"bos_token": "c", "pad_token": "d"}
    newer = {**settings, "added_tokens_decoder": {}, "extra_special_tokens": {"image_token": "e"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(newer))
    assert dict(served(folder).special_tokens) == {"bos_token": "a", "image_token": "e"}
    (tmp_path / "mine.jinja").write_text("mine")
    assert served(folder, chat_template=str(tmp_path / "mine.jinja"), name="other").chat_template == "mine"


def test_a_newer_checkpoint_is_found_once(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 1, seed=1)
    model = served(tmp_path / "run")
    assert model.refresh is not None
    assert model.refresh(1) is None
    write_run(tmp_path / "run", 4, seed=2)
    newer = model.refresh(1)
    assert newer is not None
    assert (newer.version, newer.specs) == (4, model.specs)
    assert not np.array_equal(next(iter(newer.arrays().values())), next(iter(model.arrays().values())))
    first = sorted((tmp_path / "run" / "checkpoints").iterdir())[0]
    assert served(first).version == 1
    with pytest.raises(UserError, match="nothing to follow"):
        served(first, follow=True)


def test_every_newer_version_is_served_as_the_first_one(tmp_path: Path) -> None:
    """Whatever was set at the start holds for each version: only parameters and their round are others."""
    write_run(tmp_path / "run", 1, seed=1)
    (tmp_path / "mine.jinja").write_text("mine")
    model = served(
        tmp_path / "run", name="other", chat_template=str(tmp_path / "mine.jinja"), weights="int8", follow=True
    )
    assert (model.name, model.chat_template) == ("other", "mine")
    for version in (4, 6):
        write_run(tmp_path / "run", version, seed=version)
        assert model.refresh is not None
        newer = model.refresh(model.version)
        assert isinstance(newer, TracedModel)
        assert newer.version == version
        for field in dataclasses.fields(model):
            if field.name not in ("params", "version", "refresh", "tokenizer", "decode"):
                assert getattr(newer, field.name) == getattr(model, field.name), field.name
        model = newer


def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no model in"):
        served(tmp_path / "nothing")
    (tmp_path / "mute.py").write_text(OWN.replace("def logits", "def other"))
    write_run(tmp_path / "mute", 1, seed=1, source=f"{tmp_path}/mute.py:build", options={})
    with pytest.raises(UserError, match=r"no function 'logits'.*Add `logits"):
        served(tmp_path / "mute")
    write_run(tmp_path / "run", 1, seed=1)
    with pytest.raises(UserError, match="has no composers and no surrogates"):
        served(tmp_path / "run", experts="surrogates")
    write_run(tmp_path / "small", 1, seed=1, options={**SMALL, "vocab_size": 200})
    with pytest.raises(UserError, match="256 tokens, and the model knows 200"):
        served(tmp_path / "small")


def test_sizes_that_cannot_be_are_refused_with_what_can(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 1, seed=1, source=GPT2[0], options=GPT2[1])
    model = served(tmp_path / "run")

    def shaped(**options: Any) -> Any:
        return shape_of(model, **options)

    assert shaped().window == 256
    assert shaped(context=100).window == 96
    assert shaped(batch=5).batches == (1, 4, 5)
    with pytest.raises(UserError, match="the model has 256 positions"):
        shaped(context=512)
    with pytest.raises(UserError, match="16 tokens at least"):
        shaped(context=5)
    with pytest.raises(UserError, match=r"serve\.cache_mb"):
        shaped(cache_mb=0.01)


def test_usual_context_is_bounded_and_fits_the_cache(tmp_path: Path) -> None:
    options = {**LLAMA[1], "sequence_length": 64}
    write_run(tmp_path / "run", 1, seed=1, source=LLAMA[0], options=options)
    model = dataclasses.replace(served(tmp_path / "run"), window=131_072)
    page = 4 * 2 * 1 * 2 * 16 * 8  # bytes: keys and values of one layer, 2 heads of 8, 16 tokens
    assert shape_of(model).window == 8192
    assert shape_of(model, context=10_000).window == 10_000 // 16 * 16
    small = shape_of(model, cache_mb=101 * page / 2**20)
    assert (small.window, small.pages) == (1600, 101)
    with pytest.raises(UserError, match=r"serve\.cache_mb"):
        shape_of(model, cache_mb=101 * page / 2**20, context=8192)


OWN = """
import jax.numpy as jnp, numpy as np

def logits(params, tokens, **options):
    return params["table"][tokens] * jnp.cumsum(jnp.ones(tokens.shape), axis=1)[..., None]

def build(**options):
    return None, {"table": np.ones((256, 256), np.float32)}, ()
"""


def test_model_without_decode_is_served_by_whole_texts(tmp_path: Path) -> None:
    """A model without decode is served by whole texts and a recurrent one by its state."""
    (tmp_path / "own.py").write_text(OWN)
    write_run(tmp_path / "own", 1, seed=1, source=f"{tmp_path}/own.py:build", options={})
    model = served(tmp_path / "own")
    assert "does not say what it keeps" in model.warning
    shape = shape_of(model)
    assert isinstance(shape.cache_kind, NoCache)
    assert shape.chunks == (64, 256)
    assert all(size.tokens > 1 for size in shape.calls)
    options = {"n_layer": 1, "n_embd": 32, "head_size": 8, "n_state": 4, "vocab_size": 256}
    write_run(tmp_path / "mamba", 1, seed=1, source="planetary.models.mamba2:build", options=options)
    model = served(tmp_path / "mamba")
    assert model.warning == ""
    shape = shape_of(model)
    assert isinstance(shape.cache_kind, RecurrentState)
    assert shape.page_shape == (3 * (64 + 8) + 8 * 8 * 4,)
    with pytest.raises(UserError, match="states of 8 texts"):
        shape_of(model, cache_mb=0.001)


GRAPH = """
import jax, jax.numpy as jnp, numpy as np

def build():
    def loss(params, x, y):
        scores = params["scale"] * params["table"][x]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), y[..., None], -1))
    tokens = np.zeros((2, 40), np.int32)
    table = np.random.default_rng(1).standard_normal((256, 256), np.float32)
    return loss, {"scale": np.ones((), np.float32), "table": table}, (tokens, tokens)
"""


def test_compiled_graph_is_served_by_texts_of_its_length(tmp_path: Path) -> None:
    (tmp_path / "scored.py").write_text(GRAPH)
    graph = export_model(f"{tmp_path / 'scored.py'}:build", {})
    graph.save(tmp_path / "graph")
    model = served(tmp_path / "graph")
    assert "a forward pass of its whole batch, 2 x 40 tokens" in model.warning
    shape = shape_of(model)
    assert (shape.window, shape.chunks, shape.hidden) == (32, (32,), 0)
    table, tokens = graph.initial("param")["table"], np.arange(20, dtype=np.int32)
    text = jax.numpy.asarray(tokens[None])
    found = jax.jit(lambda params: model.decode(params, text, WholeText(text)))(model.params)
    np.testing.assert_allclose(jax.nn.log_softmax(found[0]), jax.nn.log_softmax(table[tokens]), atol=1e-5)
    options = {"source": f"{tmp_path / 'scored.py'}:build", "options": {}}
    write_run(tmp_path / "run", 1, seed=1, **options)
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace(options["source"], str(tmp_path / "graph")))
    run = served(tmp_path / "run")
    assert run.refresh is not None
    assert run.refresh(1) is None
    write_run(tmp_path / "run", 2, seed=2, **options)
    newer = run.refresh(1)
    assert newer is not None
    assert newer.version == 2
    assert not np.array_equal(newer.arrays()["table"], run.arrays()["table"])


def test_a_graph_without_logits_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    source = """
import numpy as np
def build():
    batch = (np.zeros((2, 5), np.int32), np.zeros((2, 5), np.int32))
    return lambda params, x, y: (params["a"] * x * y).mean(), {"a": np.ones((), np.float32)}, batch
"""
    (tmp_path / "mute.py").write_text(source)
    export_model(f"{tmp_path / 'mute.py'}:build", {}).save(tmp_path / "mute")
    with pytest.raises(UserError, match="its graph shows no logits"):
        served(tmp_path / "mute")


@pytest.mark.slow
def test_an_exported_model_is_the_one_it_was_written_from(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 3, seed=1, options={**SMALL, "n_layer": 1})
    config = ServeConfig(context=32, batch=1, weights="int8")
    model, folder = served(tmp_path / "run", weights="int8"), tmp_path / "served"
    folder.mkdir()
    write_exported(model, config, folder)
    found = load_served(config_from_tables({"serve": {"model": str(folder)}}))
    assert (found.name, found.version, found.ends, found.specs) == ("run", 3, model.ends, model.specs)
    for name, value in model.arrays().items():
        np.testing.assert_array_equal(found.arrays()[name], value)
    shape = model.shape(config)
    assert found.shape(ServeConfig()) == found.shape(config) == shape
    assert found.trial(shape) == model.trial(shape)
    assert found.program(shape).digest == model.program(shape).digest
    assert found.tokenizer.decode([200, 65]) == b"\xc8A"
    with pytest.raises(UserError, match=r"serve\.context = 64: .* were exported with 32"):
        found.shape(ServeConfig(context=64))
    with pytest.raises(UserError, match="no code to train it with"):
        load_folder(folder)
    for name in (PROGRAM, WEIGHTS):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(good[:-1] + b"x")
        with pytest.raises(TrustError, match=f"{name} is not the file"):
            load_served(config_from_tables({"serve": {"model": str(folder)}}))
        (folder / name).write_bytes(good)


@pytest.mark.compiles
def test_export_is_compared_with_the_whole_pass_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", 1, seed=1, options={**SMALL, "n_layer": 1})
    folder = tmp_path / "out" / "served"
    command = ["export", "--serving", str(tmp_path / "run"), f"--output={folder}", "--context=32", "--batch=1"]
    assert main(command) == 0
    assert "verified on" in capsys.readouterr().out
    assert is_exported(folder)
    assert main(command) == 2
    assert "already holds a served model" in capsys.readouterr().err
    monkeypatch.setattr(ExportedModel, "trial", lambda self, shape: served(tmp_path / "other").trial(shape))
    write_run(tmp_path / "other", 1, seed=2, options={**SMALL, "n_layer": 1})
    assert main([*command, "--force"]) != 0
    assert "with these parameters" in capsys.readouterr().err
    assert is_exported(folder)  # the earlier one
    assert not list(folder.glob(".export-*"))


@pytest.mark.slow
def test_the_same_code_is_traced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever decides a trace makes another: options, precision, shape, calls and this package's own code."""
    store, count = BlobStore(tmp_path / "cache"), 0
    traced, widths = traced_model.serving_program, served_module.decoded_widths

    def counted(made: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **others: Any) -> Any:
            nonlocal count
            count += 1
            return made(*arguments, **others)

        return call

    monkeypatch.setattr(traced_model, "serving_program", counted(traced))
    monkeypatch.setattr(served_module, "decoded_widths", counted(widths))
    write_run(tmp_path / "run", 1, seed=1, source=LLAMA[0], options=LLAMA[1])
    export_pretrained(tmp_path / "run", tmp_path / "folder")

    def program_of(path: Path, *, batch: int = 2, **options: Any) -> tuple[Program, int]:
        """Return the program, and how often anything was traced for it."""
        nonlocal count
        count = 0
        model = load_served(config_from_tables({"serve": {"model": str(path), **options}}), store)
        assert isinstance(model, TracedModel)
        shape = shape_of(model, context=32, batch=batch, cache_mb=1.0)
        return model.program(shape, shape.first_calls), count

    for path in (tmp_path / "run", tmp_path / "folder"):
        first, again = program_of(path), program_of(path)
        assert (first[1], again[1]) == (2, 0)
        assert first[0] == again[0]
        alone = served(path)
        shape = shape_of(alone, context=32, batch=2, cache_mb=1.0)
        assert alone.program(shape, shape.first_calls) == first[0]
    folder = tmp_path / "folder"
    assert program_of(folder, batch=3)[1] == 1
    assert program_of(folder, weights="bf16")[1] == 1
    published = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**published, "rms_norm_eps": 0.5}))
    assert program_of(folder)[1] == 2
    monkeypatch.setattr(kept_traces, "_own_code", lambda: "other")
    assert program_of(folder)[1] == 2
    own = tmp_path / "own.py"  # may read whatever it likes
    own.write_text("from planetary.models.llama import build, cache_sizes, decode\n")
    write_run(tmp_path / "mine", 1, seed=1, source=f"{own}:build", options=LLAMA[1])
    assert [program_of(tmp_path / "mine")[1] for _ in range(2)] == [2, 2]
