"""Models and data that cannot be trained: found before any worker hears of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from planetary.core.config import apply_overrides, load_config
from planetary.core.errors import CompileError, PlanetaryError, UnsupportedOpError, UserError
from planetary.runs.rounds.preparation.preparation import prepare_run

BATCH = "%x: tensor<2x16xi32>, %y: tensor<2x16xi32>"
MODELS = {
    "junk.mlir": "this is no StableHLO",
    "cut.mlir": "module { func.func @main(%w: tensor<f32>",
    "vector.mlir": f"""
        func.func @main(%w: tensor<4xf32>, {BATCH}) -> tensor<4xf32> {{ return %w : tensor<4xf32> }}
    """,
    "nothing.mlir": f"func.func @main(%w: tensor<f32>, {BATCH}) {{ return }}",
    "integer.mlir": f"""
        func.func @main(%w: tensor<f32>, {BATCH}) -> tensor<i32> {{
            %0 = stablehlo.constant dense<1> : tensor<i32>
            return %0 : tensor<i32>
        }}
    """,
    "norule.mlir": f"""
        func.func @main(%w: tensor<f32>, {BATCH}) -> tensor<f32> {{
            %0 = stablehlo.custom_call @mystery(%w) : (tensor<f32>) -> tensor<f32>
            return %0 : tensor<f32>
        }}
    """,
    "alone.mlir": "func.func @main(%w: tensor<f32>) -> tensor<f32> { return %w : tensor<f32> }",
    "batch.mlir": """
        func.func @main(%w: tensor<f32>, %x: tensor<3x16xi32>, %y: tensor<3x16xi32>) -> tensor<f32> {
            %0 = stablehlo.multiply %w, %w : tensor<f32>
            return %0 : tensor<f32>
        }
    """,
    "raises.py": "raise RuntimeError('not today')",
    "returns.py": "def build():\n    return 3",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name, text in MODELS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "data.txt").write_text("x = 1\n" * 4000)
    (tmp_path / "short.txt").write_text("x = 1\n" * 20)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "odd.u16").write_bytes(b"\x00" * 4001)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    (tmp_path / "config.toml").write_text(
        """
        [data]
        source = "data.txt"
        [train]
        inner_steps = 30
        batch_size = 2
        sequence_length = 16
        [eval]
        batches = 1
        """
    )
    return tmp_path


def prepare(folder: Path, *overrides: str) -> None:
    config = apply_overrides(load_config(folder / "config.toml"), [o.replace("HERE", str(folder)) for o in overrides])
    prepare_run(config, folder / "cache", lambda _: None)


@pytest.mark.parametrize(
    ("model", "cls", "words"),
    [
        ("junk.mlir", CompileError, ["junk.mlir: cannot parse the model", "custom op 'this' is unknown"]),
        ("cut.mlir", CompileError, ["cut.mlir: cannot parse the model"]),
        ("vector.mlir", CompileError, ["vector.mlir: main must return one floating-point scalar", "tensor<4xf32>"]),
        ("nothing.mlir", CompileError, ["nothing.mlir: main must return", "it returns nothing"]),
        ("integer.mlir", CompileError, ["integer.mlir: main must return", "tensor<i32>"]),
        ("norule.mlir", UnsupportedOpError, ["cannot differentiate stablehlo.custom_call", "mystery", "no differ"]),
        ("alone.mlir", UserError, ["model alone has no parameter to train", "an input and a target", "found 1"]),
        ("batch.mlir", UserError, ["of shape [2, 16]", "train.batch_size", "it takes", "i32[3, 16]"]),
        ("nowhere.mlir", UserError, ["cannot read the model file", "nowhere.mlir: No such file"]),
        ("nowhere.py:build", UserError, ["there is no file", "nowhere.py"]),
        ("raises.py:build", UserError, ["raises.py failed while it was loaded: RuntimeError: not today", "raises.py:"]),
        ("returns.py:build", UserError, ["must return (loss_fn, params, example_batch), found int"]),
    ],
)
def test_a_model_that_cannot_be_trained(here: Path, model: str, cls: type[PlanetaryError], words: list[str]) -> None:
    with pytest.raises(cls) as caught:
        prepare(here, f"model.source={here / model}")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.source=planetary.nowhere:build", ["cannot load the model", "there is no module planetary.nowhere"]),
        ("model.source=planetary.models.nanochat:biuld", ["has no function 'biuld'", "build"]),
        ("model.options.n_layers=2", ["unknown field `n_layers`", "options are: n_layer"]),
        ("model.options.n_head=3", ["n_embd must be a multiple of 2 * n_head", "n_head=3"]),
        ("data.tokenizer=HERE/nowhere.json", ["cannot read the tokenizer", "nowhere.json"]),
        ("data.source=HERE/nowhere.txt", ["cannot read the training data", "nowhere.txt: No such file"]),
        ("data.source=HERE", ["has files of several kinds side by side", "odd.u16", "by a pattern"]),
        ("data.source=nothing://x/y", ["cannot read the training data nothing://x/y", "nothing"]),
        ("data.source=HERE/empty.txt", ["empty.txt is empty: expected text or tokens"]),
        ("data.source=HERE/odd.u16", ["odd.u16 has 4001 bytes, which is no whole number of 2-byte tokens"]),
        ("data.source=HERE/bad.jsonl", ["bad.jsonl, line 2: expected an object with a string under 'text'"]),
    ],
)
def test_options_and_data_that_cannot_be_used(here: Path, override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        prepare(here, override)
    for word in words:
        assert word in str(caught.value)


def test_data_shorter_than_one_batch(here: Path) -> None:
    with pytest.raises(UserError, match=r"the held-out data has 51 tokens, and one batch .* takes 68: give more data"):
        prepare(here, "data.source=HERE/short.txt", "train.batch_size=4")
