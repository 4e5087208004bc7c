"""What can be served, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_run import SMALL, write_run

from planetary.core.config import config_from_tables
from planetary.core.errors import UserError
from planetary.run.model.pretrained_export import export_pretrained
from planetary.run.model.served import load_served
from planetary.serve.gateway.serving_gateway import shape_of
from planetary.serve.program.served_model import ServedModel
from planetary.serve.program.text_memory import NoMemory, RecurrentState

GPT2 = ("planetary.models.gpt2:build", {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 256})
LLAMA = (
    "planetary.models.llama:build",
    {"n_layer": 1, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_hidden": 48, "vocab_size": 256},
)


def served(path: Path, **options: Any) -> ServedModel:
    return load_served(config_from_tables({"serve": {"model": str(path), **options}}))


@pytest.mark.parametrize(("source", "options"), [GPT2, LLAMA])
def test_an_exported_folder_is_the_model_that_the_run_is(tmp_path: Path, source: str, options: dict[str, Any]) -> None:
    write_run(tmp_path / "run", 3, seed=1, source=source, options=options)
    export_pretrained(tmp_path / "run", tmp_path / "folder")
    run, folder = served(tmp_path / "run"), served(tmp_path / "folder")
    assert (run.name, run.version, folder.name, folder.version) == ("run", 3, "folder", 0)
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
    assert model.begins == (97,)
    assert model.ends == {5, 7}
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
        return shape_of(model, config_from_tables({"serve": {"model": "x", **options}}))

    assert shaped().window == 256
    assert shaped(context=100).window == 96
    assert shaped(batch=5).batches == (1, 4, 5)
    with pytest.raises(UserError, match="the model has 256 positions"):
        shaped(context=512)
    with pytest.raises(UserError, match="16 tokens at least"):
        shaped(context=5)
    with pytest.raises(UserError, match=r"serve\.cache_mb"):
        shaped(cache_mb=0.01)


OWN = """
import jax.numpy as jnp, numpy as np

def logits(params, tokens, **options):
    return params["table"][tokens] * jnp.cumsum(jnp.ones(tokens.shape), axis=1)[..., None]

def build(**options):
    return None, {"table": np.ones((256, 256), np.float32)}, ()
"""


def test_a_model_without_decode_is_served_by_whole_texts_and_a_recurrent_one_by_its_state(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    write_run(tmp_path / "own", 1, seed=1, source=f"{tmp_path}/own.py:build", options={})
    model = served(tmp_path / "own")
    assert "does not say what it keeps" in model.warning
    shape = shape_of(model, config_from_tables({"serve": {"model": "x"}}))
    assert isinstance(shape.memory, NoMemory)
    assert shape.chunks == (64, 256)
    assert all(size.tokens > 1 for size in shape.calls)
    options = {"n_layer": 1, "n_embd": 32, "head_size": 8, "n_state": 4, "vocab_size": 256}
    write_run(tmp_path / "mamba", 1, seed=1, source="planetary.models.mamba2:build", options=options)
    model = served(tmp_path / "mamba")
    assert model.warning == ""
    shape = shape_of(model, config_from_tables({"serve": {"model": "x"}}))
    assert isinstance(shape.memory, RecurrentState)
    assert shape.page_shape == (3 * (64 + 8) + 8 * 8 * 4,)
    with pytest.raises(UserError, match="states of 8 texts"):
        shape_of(model, config_from_tables({"serve": {"model": "x", "cache_mb": 0.001}}))
