"""The author's side of a model: loss and gradients as the source framework computes them.

At the import the framework is still there, so a compiled graph is compared with it. A loss function without a separate
author is JAX's; a loss from another framework carries one in the attribute `planetary_author`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from planetary.core.errors import UserError

ATTRIBUTE = "planetary_author"
_QUICKLY: Any = {"xla_backend_optimization_level": 0}  # it runs twice


class Author(Protocol):
    """Loss and gradients of a model in the framework it was written in, in the mode that is trained."""

    def loss_and_gradients(
        self, params: Mapping[str, np.ndarray], batch: Sequence[np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray | None]]:
        """Return the loss and the gradient of every floating-point leaf by name.

        A call changes nothing: neither parameters, buffers nor gradients of the author's own model.

        Args:
            params: every parameter and buffer by name in the manifest. Floats are float32, or float64 where the author
                should compute in double precision; a bfloat16 or float16 leaf has a float32 value.
            batch: the arrays of the example batch, in order, then the random key (two words) and the step, for a loss
                with these arguments; integers of the loss's types, floats like those of `params`.

        Returns:
            The loss, and one array of the parameter's shape per name; None if the framework gives that parameter no
            gradient (frozen, detached, unused). Names left out count as None.
        """
        ...


def author_of(loss_fn: Any) -> Author | None:
    """Return the author a loss function carries, or None. Raises `UserError` if it is none."""
    author = getattr(loss_fn, ATTRIBUTE, None)
    if author is not None and not callable(getattr(author, "loss_and_gradients", None)):
        raise UserError(
            f"{ATTRIBUTE} of a loss function must have loss_and_gradients(params, batch), found "
            f"{type(author).__name__} (docs/meaning.md)"
        )
    return author


class JaxAuthor:
    """JAX's own gradient of a loss, on the CPU."""

    def __init__(self, loss: Callable[..., Any], params: Any, names: Sequence[str]) -> None:
        """Start with a loss as it is called by a training step.

        Args:
            loss: takes the pytree of parameters, then the arrays of a batch.
            params: the pytree.
            names: of the leaves, in order.
        """
        leaves, self._structure = jax.tree.flatten(params)
        self._loss, self._names = loss, list(names)
        self._types = [jnp.result_type(leaf) for leaf in leaves]
        self._compiled: dict[bool, Any] = {}

    def loss_and_gradients(
        self, params: Mapping[str, np.ndarray], batch: Sequence[np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray | None]]:
        wide = self._is_wide(params)
        with jax.enable_x64(wide), jax.default_device(jax.devices("cpu")[0]):
            leaves = self._leaves(params, wide)
            trained = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

            def loss(values: Sequence[Any], others: Sequence[Any], batch: Sequence[Any]) -> Any:
                full = list(others)
                for position, value in zip(trained, values, strict=True):
                    full[position] = value
                return self._loss(jax.tree.unflatten(self._structure, full), *batch)

            given = ([leaves[i] for i in trained], leaves, [jnp.asarray(part) for part in batch])
            if wide not in self._compiled:
                lowered = jax.jit(jax.value_and_grad(loss)).lower(*given)
                self._compiled[wide] = lowered.compile(_QUICKLY)
            value, gradients = self._compiled[wide](*given)
            kind = np.float64 if wide else np.float32
            found = {self._names[i]: np.asarray(g).astype(kind) for i, g in zip(trained, gradients, strict=True)}
            return float(value), {name: found.get(name) for name in self._names}

    def _is_wide(self, params: Mapping[str, np.ndarray]) -> bool:
        return any(params[name].dtype == np.float64 for name in self._names)

    def _leaves(self, params: Mapping[str, np.ndarray], wide: bool) -> list[Any]:
        """Return the values in the author's own types, or all floats in double precision."""
        return [
            jnp.asarray(params[name], np.float64 if wide and jnp.issubdtype(kind, jnp.floating) else kind)
            for name, kind in zip(self._names, self._types, strict=True)
        ]
