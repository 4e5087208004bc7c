"""A model is compared at its import with the framework that it was written in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from planetary.compiler.check import meaning as checks
from planetary.compiler.check.meaning import check_meaning, with_checked_meaning
from planetary.compiler.frontend.author import ATTRIBUTE
from planetary.compiler.frontend.export import Model, export_loss, load_model
from planetary.core.errors import CompileError, UserError

RNG = np.random.default_rng(0)
PARAMS = {"a": RNG.normal(size=(3, 3)).astype(np.float32), "b": RNG.normal(size=(3,)).astype(np.float32)}
BATCH = (RNG.normal(size=(4, 3)).astype(np.float32), RNG.integers(0, 3, 4).astype(np.int32))


def loss(p: Any, x: Any, y: Any) -> Any:
    scores = jax.nn.log_softmax(jnp.tanh(x @ p["a"]) + p["b"])
    return -jnp.take_along_axis(scores, y[:, None], 1).mean()


def exported(function: Any = loss) -> Model:
    return export_loss(function, PARAMS, BATCH, name="net")


def test_an_equal_gradient_is_recorded_in_the_manifest(tmp_path: Path) -> None:
    model = with_checked_meaning(exported())
    found = model.manifest.meaning
    assert found is not None
    assert (found.author, found.batches, found.digest) == ("framework", 2, model.digest)
    assert found.worst < 1e-5
    model.save(tmp_path / "net")
    assert check_meaning(load_model(tmp_path / "net")) == found


class Shifted:
    """An author whose gradient of one parameter is another."""

    def __init__(self, name: str, by: float | None) -> None:
        self.name, self.by = name, by

    def loss_and_gradients(self, params: Mapping[str, np.ndarray], batch: Sequence[np.ndarray]) -> Any:
        value, gradients = jax.value_and_grad(loss)(dict(params), *batch)
        found = {name: np.asarray(gradient) for name, gradient in gradients.items()}
        return float(value), {**found, self.name: None if self.by is None else found[self.name] * self.by}


def by_author(author: Any) -> Any:
    function = lambda p, x, y: loss(p, x, y)  # noqa: E731
    setattr(function, ATTRIBUTE, author)
    return function


@pytest.mark.slow
@pytest.mark.parametrize("by", [1.001, 0.0, None, np.nan])
def test_another_gradient_is_refused_with_parameter_and_line(by: float | None) -> None:
    says = r"on batch 1 .*the gradient of 'a' differs .*first used at .*test_meaning\.py, line \d+ in .*dot_general"
    with pytest.raises(CompileError, match=says):
        check_meaning(exported(by_author(Shifted("a", by))))


def test_an_author_without_the_method_is_refused() -> None:
    with pytest.raises(UserError, match="must have loss_and_gradients"):
        exported(by_author(object()))


def test_a_rounding_of_the_parameters_explains_a_difference() -> None:
    """A gradient that the author's own rounding changes is accepted: the tolerance comes from the conditioning."""
    steep = lambda p, x, y: jnp.sum(jnp.sin(3e4 * p["a"]) * x[:3])  # noqa: E731
    author = exported(steep).author
    assert author is not None

    class Rounded:
        def loss_and_gradients(self, params: Mapping[str, np.ndarray], batch: Sequence[np.ndarray]) -> Any:
            if params["a"].dtype == np.float64:
                raise TypeError("single precision only")
            return author.loss_and_gradients({**params, "a": np.nextafter(params["a"], np.float32(9))}, batch)

    model = dataclasses.replace(exported(steep), author=Rounded())
    assert check_meaning(model).precision == "conditioning"


def test_a_model_without_its_author_is_compared_with_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lambda p, x, y: jnp.mean((jnp.tanh(x @ p["a"]) * p["b"]) ** 2)  # noqa: E731
    bare = dataclasses.replace(exported(plain), author=None, located=b"")
    assert check_meaning(dataclasses.replace(exported(), author=None)).author == "finite differences"
    assert check_meaning(bare).author == "finite differences"
    doubled = export_loss(lambda p, x, y: plain(p, x, y) * 2, PARAMS, BATCH)
    real = checks.value_and_gradients
    monkeypatch.setattr(
        checks, "value_and_gradients", lambda s, wrt, result=0: real(doubled.stablehlo if wrt else s, wrt, result)
    )
    with pytest.raises(CompileError, match=r"along a random direction the loss changes by .*but the gradient says"):
        check_meaning(bare)


def test_a_comparison_that_is_not_possible_is_said(caplog: pytest.LogCaptureFixture) -> None:
    marked = exported(lambda p, x, y: loss({"a": jax.lax.stop_gradient(p["a"]), "b": p["b"]}, x, y))
    found = check_meaning(dataclasses.replace(marked, author=None))
    assert found.author == "none"
    assert "not compared" in found.summary
    assert "not compared" in caplog.text
    old = msgspec.structs.replace(found, author="framework", digest="0" * 64)
    again = dataclasses.replace(marked, manifest=msgspec.structs.replace(marked.manifest, meaning=old))
    assert check_meaning(again).digest == marked.digest
