"""Integers of the data beyond a model's tables: refused with the record, where JAX clamps and PyTorch raises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planetary.core.config import apply_overrides
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.runs.rounds.preparation.preparation import prepare_run

ROWS, CLASSES, COUNT = 9, 3, 60

MODELS = f"""
import jax, jax.numpy as jnp, numpy as np

def classify(batch_size, marked=False):
    params = {{"table": jax.random.normal(jax.random.key(0), ({ROWS}, {CLASSES}))}}
    def loss(params, words, label):
        scores = jax.nn.log_softmax(params["table"][words].mean(1))
        losses = -jnp.take_along_axis(scores, label[:, None], 1, mode="clip")[:, 0]
        return jnp.sum(jnp.where(label != 255, losses, 0)) / batch_size if marked else losses.mean()
    return loss, params, (np.zeros((batch_size, 5), np.int32), np.zeros(batch_size, np.int32))

class Rows:
    def __len__(self):
        return {COUNT}
    def __getitem__(self, index):
        label = {CLASSES} if index == 7 else index % {CLASSES}
        return {{"words": np.full(5, index % {ROWS}, np.int64), "label": label}}
"""

TORCH = f"""
import numpy as np, torch
from planetary.torch import from_torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = torch.nn.Embedding({ROWS}, 12), torch.nn.Linear(12, {CLASSES})
    def forward(self, words):
        return self.out(torch.tanh(self.table(words).mean(1)))

def loss(scores, label):
    return torch.nn.functional.cross_entropy(scores, label.long())

def build(batch_size):
    torch.manual_seed(0)
    words, label = np.zeros((batch_size, 5), np.int32), np.zeros(batch_size, np.int32)
    return from_torch(Net(), (words, label), loss)
"""


def columns(words: tuple[int, int] = (0, 0), label: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """Return legal examples but for one value of each column, given with its example."""
    rng = np.random.default_rng(0)
    found = {"words": rng.integers(0, ROWS, (COUNT, 5)), "label": rng.integers(0, CLASSES, COUNT)}
    found["words"][words[0], 2], found["label"][label[0]] = words[1], label[1]
    return found


def prepare(here: Path, source: Path | str, model: str, *overrides: str) -> None:
    shape = ["train.batch_size=4", "train.inner_steps=2", "train.rounds=2", "eval.batches=1"]
    given = [f"model.source={here / model}", f"data.source={source}", 'data.columns=["words","label"]', *overrides]
    prepare_run(apply_overrides(Config(), [*shape, *given]), here / "cache", lambda _: None)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("form", ["npz", "parquet"])
def test_label_beyond_the_classes_is_refused(here: Path, form: str) -> None:
    source = here / f"data.{form}"
    if form == "npz":
        np.savez(source, **columns(label=(41, CLASSES)))
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = {name: column.tolist() for name, column in columns(label=(41, CLASSES)).items()}
        parquet.write_table(pyarrow.table(table), source)
    place = rf"{re.escape(str(source))}, example 41: 'label' holds 3, .* of 3 by it \(.*models\.py, line 8\)"
    with pytest.raises(UserError, match=rf"{place}: expected 0 to 2\. .*"):
        prepare(here, source, "models.py:classify")


@pytest.mark.slow
def test_own_data_set_names_the_example(here: Path) -> None:
    with pytest.raises(UserError, match=r"models\.py:Rows, example 7: 'label' holds 3, .* expected 0 to 2"):
        prepare(here, f"{here / 'models.py'}:Rows", "models.py:classify")


@pytest.mark.slow
def test_marks_that_the_loss_leaves_out_are_legal(here: Path) -> None:
    np.savez(here / "void.npz", **columns(label=(5, 255)))
    prepare(here, here / "void.npz", "models.py:classify", "model.options.marked=true")
    np.savez(here / "other.npz", **columns(label=(5, 254)))
    for _ in range(2):  # the step is made, then read back
        with pytest.raises(UserError, match=r"example 5: 'label' holds 254, .* expected 0 to 2 or 255\. "):
            prepare(here, here / "other.npz", "models.py:classify", "model.options.marked=true")


@pytest.mark.doors("torch", "torchax")
@pytest.mark.parametrize(
    ("values", "found", "expected"),
    [
        ({"words": (3, ROWS)}, "'words' holds 9", "0 to 8"),
        ({"words": (3, -1)}, "'words' holds -1", "0 to 8"),
        ({"label": (3, CLASSES)}, "'label' holds 3", "-100 or 0 to 2"),
        ({"label": (3, -1)}, "'label' holds -1", "-100 or 0 to 2"),
        ({"label": (3, -100)}, "", ""),
    ],
)
def test_what_torch_refuses_is_refused(
    here: Path, values: dict[str, tuple[int, int]], found: str, expected: str
) -> None:
    """PyTorch's own word on the same batch decides."""
    import runpy

    import torch

    (here / "net.py").write_text(TORCH)
    data = columns(**values)
    np.savez(here / "data.npz", **data)
    code = runpy.run_path(str(here / "net.py"))
    words, label = (torch.from_numpy(data[name]) for name in ("words", "label"))
    if not found:
        assert torch.isfinite(code["loss"](code["Net"]()(words), label))
        prepare(here, here / "data.npz", "net.py:build")
        return
    with pytest.raises(IndexError):
        code["loss"](code["Net"]()(words), label)
    with pytest.raises(UserError, match=rf"data\.npz, example 3: {found}, .*: expected {expected}\. "):
        prepare(here, here / "data.npz", "net.py:build")
