"""Models other than the default one on their way into a run, and out of it as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from planetary.cli.main import main
from planetary.compiler.frontend.export import find_builder
from planetary.core.config import apply_overrides
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.models.initial import flat_names
from planetary.models.zoo import ZOO
from planetary.runs.rounds.preparation.preparation import prepare_run
from saved_parameters import save_parameters

SHAPES = ["train.batch_size=2", "train.sequence_length=16"]


def config(tmp_path: Path, *overrides: str) -> Config:
    text = tmp_path / "corpus.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log\n" * 400)
    small = ["train.inner_steps=2", "train.rounds=2", "optimizer.warmup_steps=1", "eval.batches=1"]
    return apply_overrides(Config(), [f"data.source={text}", *small, *SHAPES, *overrides])


def zoo_overrides(name: str) -> list[str]:
    options: dict[str, Any] = {**ZOO[name].options("tiny"), "vocab_size": 256}
    del options["batch_size"], options["sequence_length"]  # these come from the `train` section
    return [f"model.source={ZOO[name].source}", *(f"model.options.{k}={v}" for k, v in options.items())]


@pytest.mark.slow
def test_pretrained_weights_are_what_the_run_starts_with(tmp_path: Path) -> None:
    build, overrides = find_builder(ZOO["llama"].source), zoo_overrides("llama")
    options = {**ZOO["llama"].options("tiny"), "vocab_size": 256, "seed": 9}
    leaves = jax.tree_util.tree_flatten_with_path(build(**options)[1])[0]
    given = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    save_file(given, tmp_path / "pretrained.safetensors")
    overrides.append(f"model.weights={tmp_path / 'pretrained.safetensors'}")
    prepared = prepare_run(config(tmp_path, *overrides), tmp_path / "cache", lambda _: None)
    assert prepared.params.keys() == given.keys()
    for name, value in prepared.params.items():
        np.testing.assert_array_equal(value, given[name])


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot read model.weights .*No such file"), (b"no tensors", "cannot read model.weights")],
)
def test_a_weights_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "weights.safetensors"
    if content is not None:
        file.write_bytes(content)
    overrides = [*zoo_overrides("gpt2"), f"model.weights={file}"]
    with pytest.raises(UserError, match=says):
        prepare_run(config(tmp_path, *overrides), tmp_path / "cache", lambda _: None)


@pytest.mark.parametrize("name", ["vit", "convnet"])
def test_an_image_model_is_no_model_for_a_text(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{name} classifies images"):
        prepare_run(config(tmp_path, f"model.source={ZOO[name].source}"), tmp_path / "cache", lambda _: None)


BARE = """
module {
  func.func @main(%table: tensor<16xf32>, %w: tensor<16xf32>, %x: tensor<2x16xi32>, %y: tensor<2x16xi32>)
      -> tensor<f32> {
    %zero = arith.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.multiply %table, %w : tensor<16xf32>
    %1 = stablehlo.reduce(%0 init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<16xf32>, tensor<f32>) -> tensor<f32>
    return %1 : tensor<f32>
  }
}
"""


def test_buffer_gets_role_and_value_from_the_configuration(tmp_path: Path) -> None:
    """A bare file's buffer gets its role and value from the configuration."""
    (tmp_path / "model.mlir").write_text(BARE)
    table = np.arange(16, dtype=np.float32)
    save_file({"arg0": table}, tmp_path / "values.safetensors")
    overrides = [f"model.source={tmp_path / 'model.mlir'}", "model.roles={ arg0 = 'buffer' }"]
    with pytest.raises(UserError, match=r"'arg0' \(buffer\) has no stored value"):
        prepare_run(config(tmp_path, *overrides), tmp_path / "cache", lambda _: None)
    overrides += [f"model.weights={tmp_path / 'values.safetensors'}", 'model.weights_optional=["arg1"]']
    prepared = prepare_run(config(tmp_path, *overrides), tmp_path / "cache", lambda _: None)
    assert list(prepared.params) == ["arg1"]
    np.testing.assert_array_equal(prepared.buffer_values["arg0"], table)


@pytest.mark.parametrize(("inputs", "targets"), [("i64", "i64"), ("ui16", "i64"), ("ui32", "ui32")])
def test_a_model_may_take_its_tokens_in_any_integer_type(inputs: str, targets: str, tmp_path: Path) -> None:
    prepared = prepare_run(bare(tmp_path, inputs, targets), tmp_path / "cache", lambda _: None)
    fed = {"i64": "i32"}  # what no token needs is not handed in
    assert [spec.dtype for spec in prepared.step.spec.batch] == [fed.get(kind, kind) for kind in (inputs, targets)]


@pytest.mark.parametrize("dtype", ["i8", "f32"])
def test_other_token_types_are_refused_with_the_known_ones(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"of type i32, i64, ui16 or ui32; it takes .*: {dtype}\[2, 16\]"):
        prepare_run(bare(tmp_path, dtype, "i32"), tmp_path / "cache", lambda _: None)


def bare(tmp_path: Path, inputs: str, targets: str) -> Config:
    text = BARE.replace("%x: tensor<2x16xi32>", f"%x: tensor<2x16x{inputs}>")
    (tmp_path / "model.mlir").write_text(text.replace("%y: tensor<2x16xi32>", f"%y: tensor<2x16x{targets}>"))
    return config(tmp_path, f"model.source={tmp_path / 'model.mlir'}")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.slow
def test_a_zoo_model_generates_from_its_run_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {**ZOO[name].options("tiny"), "vocab_size": 256}
    del sizes["batch_size"], sizes["sequence_length"]  # these come from the `train` section
    lines = "\n".join(f"{key} = {value}" for key, value in sizes.items())
    (tmp_path / "config.toml").write_text(
        f'[train]\nsequence_length = 16\n[model]\nsource = "{ZOO[name].source}"\n[model.options]\n{lines}\n'.replace(
            "vocab_size = 32", "vocab_size = 256"
        )
    )
    save_parameters(tmp_path, flat_names(find_builder(ZOO[name].source)(**sizes, sequence_length=16)[1]))
    assert main(["generate", str(tmp_path), "--prompt", "def ", "--tokens", "20"]) == 0
    assert capsys.readouterr().out.startswith("def ")


NORMALISED = """
import jax, jax.numpy as jnp, numpy as np

def build(batch_size, sequence_length):
    params = {"embed": jax.random.normal(jax.random.key(0), (256, 4)), "mean": jnp.zeros(4)}

    def loss_fn(params, tokens, targets, *, train):
        x = params["embed"][tokens]
        mean = x.mean((0, 1)) if train else params["mean"]
        scores = jax.nn.log_softmax((x - mean) @ params["embed"].T)
        loss = -jnp.take_along_axis(scores, targets[..., None], -1).mean()
        return loss, {"mean": 0.9 * params["mean"] + 0.1 * mean}

    batch = np.zeros((batch_size, sequence_length), np.int32)
    return loss_fn, params, (batch, batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [["sync.compression=int8"], ["sync.topology=ring", "sync.ring_compression=int8"]])
def test_statistics_are_refused_where_rounds_do_not_average_them(tmp_path: Path, wrong: list[str]) -> None:
    (tmp_path / "normalised.py").write_text(NORMALISED)
    source = f"model.source={tmp_path / 'normalised.py'}:build"
    prepared = prepare_run(config(tmp_path, source, "model.options={}"), tmp_path / "cache", lambda _: None)
    assert prepared.step.spec.statistics == ("mean",)
    assert set(prepared.params) == {"embed", "mean"}
    with pytest.raises(UserError, match=f"{wrong[-1].partition('=')[0]} = .*running statistics"):
        prepare_run(config(tmp_path, source, "model.options={}", *wrong), tmp_path / "cache", lambda _: None)
