"""A small model and a way to run its training step with XLA, for tests of what a step does over many steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend.export import Model, export_loss
from planetary.compiler.step.train_step import TrainStep
from planetary.core.schedules import Schedule

Tree = dict[str, Any]


def mlp_loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["embed"] @ params["up"] * params["gain"])
    mixed = jnp.einsum("bi,ijk,bj->bk", hidden, params["cube"], hidden)
    return jnp.mean((mixed @ params["down"] - y) ** 2)


def mlp_params() -> Tree:
    rng = np.random.default_rng(3)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5)

    return {"cube": draw(7, 7, 4), "down": draw(4, 6), "embed": draw(5, 5), "gain": 1 + draw(7), "up": draw(5, 7)}


def mlp_batch(index: int, rows: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(100 + index)
    return [rng.standard_normal((rows, 5), np.float32), rng.standard_normal((rows, 6), np.float32)]


def mlp_model(rows: int = 8, dtype: str = "float32") -> Model:
    params = {name: value.astype(jnp.dtype(dtype)) for name, value in mlp_params().items()}

    def loss(p: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        return mlp_loss(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), p), x, y)

    return export_loss(mlp_loss if dtype == "float32" else loss, params, tuple(mlp_batch(0, rows)))


CONSTANT = Schedule(kind="constant", peak=3e-3)


def scalars(index: int, schedule: Schedule = CONSTANT) -> list[np.ndarray]:
    """What a step takes between the optimizer's state and the batch."""
    return [np.array(index, np.int32), np.array(schedule.rate(index), np.float32)]


class Run:
    """Runs `train_step` of a module with XLA, feeding its results back."""

    def __init__(self, step: TrainStep, params: Tree, schedule: Schedule = CONSTANT) -> None:
        assert [spec.name for spec in step.spec.params] == list(params)
        self.step, self.schedule = step, schedule
        self.params = [np.asarray(value) for value in params.values()]
        self.state = [spec.zeros() for spec in step.spec.opt_state]

    def __call__(self, index: int, batch: list[np.ndarray]) -> tuple[float, float]:
        spec = self.step.spec
        dtypes = [tensor.dtype for tensor in (*spec.params, *spec.opt_state)] + ["f32", "f32"]
        arguments = [*self.params, *self.state, *scalars(index, self.schedule), *batch]
        results = run_reference(self.step.portable, "train_step", arguments, dtypes)
        count = len(self.params)
        self.params, self.state = results[:count], results[count:-2]
        return float(results[-2]), float(results[-1])

    def named(self) -> dict[str, np.ndarray]:
        """Parameters and state by name."""
        spec = self.step.spec
        values = [*self.params, *self.state]
        return {tensor.name: value for tensor, value in zip((*spec.params, *spec.opt_state), values, strict=True)}


def close(found: np.ndarray, expected: Any, tolerance: float) -> None:
    """Largest difference relative to the largest expected element."""
    wanted = np.asarray(expected)
    error = np.max(np.abs(found - wanted)) / max(np.max(np.abs(wanted)), 1e-30)
    assert error <= tolerance, error
