"""A recognised cross-entropy has the value and the gradient of its ordinary form, without whole logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vjp_oracle import run_stablehlo

from planetary.artifacts.store import BlobStore
from planetary.compiler import ir
from planetary.compiler.autodiff import losses
from planetary.compiler.autodiff.differentiate import load_for_differentiation, value_and_gradients
from planetary.compiler.backends.artifact_manifest import read_manifest
from planetary.compiler.backends.iree import compile_artifact
from planetary.compiler.backends.targets import Target
from planetary.compiler.check.verify import verify_artifact
from planetary.compiler.frontend.export import export_model
from planetary.compiler.frontend.lowering import lower_with_rules
from planetary.compiler.rewrites import normalise
from planetary.compiler.step.train_step import build_train_step
from planetary.models.layers import capped, cross_entropy, mean_of_counted
from planetary.models.zoo import ZOO
from planetary.runtime.executor import open_executor
from planetary.runtime.host import host_features

TOKENS, WIDTH, WORDS = (3, 7), 8, 37


def _zoo(logits: Any, labels: Any) -> Any:
    return cross_entropy(capped(logits, 3.0), labels)


def _picked(rows: Any, labels: Any) -> Any:
    return jnp.take_along_axis(rows, jnp.where(labels < 0, 0, labels)[..., None], axis=-1)[..., 0]


def _log_softmax(logits: Any, labels: Any) -> Any:
    return mean_of_counted(-_picked(jax.nn.log_softmax(logits), labels), labels)


def _log_sum(logits: Any, labels: Any) -> Any:
    total = jax.nn.logsumexp(logits, axis=-1)
    return mean_of_counted(total - _picked(logits, labels) + 1e-4 * total**2, labels)


def _one_hot(logits: Any, labels: Any) -> Any:
    return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, WORDS) * jax.nn.log_softmax(logits), axis=-1))


def _without_maximum(logits: Any, labels: Any) -> Any:
    logits = 2.0 * jnp.tanh(logits / 2.0)
    return mean_of_counted(jnp.log(jnp.sum(jnp.exp(logits), axis=-1)) - _picked(logits, labels), labels)


def _optax(logits: Any, labels: Any) -> Any:
    optax = pytest.importorskip("optax")
    found = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(labels < 0, 0, labels))
    return mean_of_counted(found, labels)


FORMS: list[Callable[..., Any]] = [_zoo, _log_softmax, _log_sum, _one_hot, _without_maximum, _optax]


def _arrays() -> tuple[Any, Any, Any]:
    """Return hidden states, a table, and labels, some of which do not count."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, WORDS, TOKENS).astype(np.int32)
    labels[0, :3] = -100
    hidden = 2 * rng.standard_normal((*TOKENS, WIDTH), np.float32)
    return hidden, rng.standard_normal((WORDS, WIDTH), np.float32), labels


def _tiled(text: str | bytes) -> tuple[str, list[str]]:
    with ir.new_context():
        module = load_for_differentiation(text)
        normalise.before_differentiation(module)
        notes = losses.tile_large_losses(module)
        ir.verify(module)
        return ir.to_text(module), notes


def _has_logits(text: str) -> bool:
    return any(f"tensor<{rows}x{WORDS}xf32>" in text for rows in ("3x7", "21"))


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiles be smaller than the arrays of these tests."""
    monkeypatch.setattr(losses, "LARGE", 1)
    monkeypatch.setattr(losses, "tile_of", lambda tokens, words: (4, 16))


@pytest.mark.slow
@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize(("form", "words_last"), [(form, False) for form in FORMS] + [(_zoo, True)])
def test_recognised_loss_equals_that_of_jax(form: Callable[..., Any], words_last: bool) -> None:
    hidden, table, labels = _arrays()

    def loss(hidden: Any, table: Any, labels: Any) -> Any:
        return form(hidden @ table if words_last else jnp.einsum("btc,vc->btv", hidden, table), labels)

    table = np.ascontiguousarray(table.T) if words_last else table
    text, notes = _tiled(lower_with_rules(loss, hidden, table, labels).as_text())
    assert notes == ["logits of 21 tokens and 37 words exist in tiles of 4 x 16"]
    step = value_and_gradients(text, (0, 1))
    assert not _has_logits(step)
    value, gradients = jax.value_and_grad(loss, (0, 1))(hidden, table, labels)
    for found, wanted in zip(run_stablehlo(step, [hidden, table, labels]), (value, *gradients), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6 * max(1.0, float(np.max(np.abs(wanted)))), rtol=0)


@pytest.mark.usefixtures("all_are_large")
def test_plain_export_without_marks_is_recognised() -> None:
    """JAX's own lowering says nothing of the stopped gradient; the largest logit of a log-softmax cancels."""
    hidden, table, labels = _arrays()

    def loss(hidden: Any, table: Any, labels: Any) -> Any:
        return _log_softmax(hidden @ table.T, labels)

    text, notes = _tiled(jax.jit(loss).lower(hidden, table, labels).as_text())
    assert notes
    step = value_and_gradients(text, (0, 1))
    value, gradients = jax.value_and_grad(loss, (0, 1))(hidden, table, labels)
    for found, wanted in zip(run_stablehlo(step, [hidden, table, labels]), (value, *gradients), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6, rtol=0)


def _also_mean(logits: Any, labels: Any) -> Any:
    return cross_entropy(logits, labels) + jnp.mean(logits)


def _from_maximum(logits: Any, labels: Any) -> Any:
    top = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(logits - top), axis=-1))
    return mean_of_counted(total - _picked(logits, labels), labels)


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("form", [_also_mean, _from_maximum])
def test_loss_with_another_use_of_logits_stays(form: Callable[..., Any]) -> None:
    """Also one whose value depends on the largest logit."""
    hidden, table, labels = _arrays()
    text, notes = _tiled(lower_with_rules(lambda h, t, i: form(h @ t.T, i), hidden, table, labels).as_text())
    assert not notes
    assert _has_logits(text)


def test_small_loss_stays_whole() -> None:
    hidden, table, labels = _arrays()
    text, notes = _tiled(lower_with_rules(lambda h, t, i: cross_entropy(h @ t.T, i), hidden, table, labels).as_text())
    assert not notes
    assert _has_logits(text)


@pytest.mark.compiles
@pytest.mark.usefixtures("all_are_large")
def test_compiled_step_with_tiles_is_the_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By IREE, with a tied table whose lookups are gathers; the manifest has a note of the tiles."""
    monkeypatch.setattr(normalise, "ONE_HOT_ROWS", 0)
    model = export_model(ZOO["gpt2"].source, ZOO["gpt2"].options("tiny"))
    step, store = build_train_step(model), BlobStore(tmp_path)
    host = Target("cpu", "host", host_features())
    artifact = compile_artifact(step, host, store)
    report = verify_artifact(
        step,
        artifact,
        lambda artifact, spec: open_executor(store.path(artifact.digest), spec, backend="cpu"),
        params=model.initial("param"),
        buffers={},
        local=host,
    )
    assert report.worst_error < 1
    manifest = read_manifest(store, artifact.digest)
    assert manifest is not None
    assert manifest.notes == ("logits of 16 tokens and 32 words exist in tiles of 4 x 16",)


NET = """
import torch
from torch.nn import functional

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(37, 8)

    def forward(self, tokens):
        return torch.tanh(self.table(tokens)) @ self.table.weight.T

def loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten().long(), ignore_index=-100)
"""


@pytest.mark.doors("torch")
@pytest.mark.usefixtures("all_are_large")
def test_pytorch_cross_entropy_is_recognised(tmp_path: Path) -> None:
    """With a tied table and labels that do not count."""
    import torch

    (tmp_path / "net.py").write_text(NET)
    model = export_model(f"{tmp_path}/net.py:Net", {"batch_size": 3, "sequence_length": 7})
    text, notes = _tiled(model.stablehlo)
    assert notes
    _, table, labels = _arrays()
    tokens = np.abs(labels) % WORDS
    found = run_stablehlo(value_and_gradients(text, (0,)), [table, tokens, labels])

    weight = torch.tensor(table, requires_grad=True)
    logits = torch.tanh(weight[torch.tensor(tokens)]) @ weight.T
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(labels).flatten().long())
    wanted.backward()
    assert weight.grad is not None
    np.testing.assert_allclose(found[0], wanted.detach().numpy(), rtol=1e-6)
    np.testing.assert_allclose(found[1], weight.grad.numpy(), atol=2e-6)
