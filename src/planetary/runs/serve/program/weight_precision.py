"""Parameters of a served model in fewer bits. They are widened in the graph, where they are used.

`int8` and `int4` have a float32 scale for every `BLOCK` neighbours of a row, as llama.cpp's Q8_0 and Q4_0 do: the
largest magnitude of a block becomes 127, or 7. All computing stays in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from planetary.core.adapters import trained_by
from planetary.core.configuration.ranges import WeightPrecision
from planetary.core.quantisers import absmax_codes, pack
from planetary.core.tensors import DTYPE_NAMES, TensorSpec
from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.program.traced_model import TracedModel

Precision = WeightPrecision
BLOCK = 32
LEAST = 1024  # scalars of a tensor, below which nothing is gained
_LEVELS = {"int8": 127, "int4": 7}


@jax.tree_util.register_pytree_with_keys_class
class Narrow:
    """A matrix, or several, in fewer bits. It stands for the wide one in a model's code.

    Attributes:
        values: bf16 [..., n], i8 [..., n], or i8 [..., n / 2] with two numbers of 4 bits each, the earlier one low.
        scales: f32 [..., n / BLOCK]; None for bf16.
        precision: which of them it is.
    """

    def __init__(self, values: Any, scales: Any, precision: Precision) -> None:
        self.values, self.scales = values, scales
        self.precision: Precision = precision

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Precision]:
        """Return the parts by name, for JAX."""
        key = jax.tree_util.GetAttrKey
        return ((key("values"), self.values), (key("scales"), self.scales)), self.precision

    @classmethod
    def tree_unflatten(cls, precision: Precision, parts: tuple[Any, Any]) -> Narrow:
        """Reverse `tree_flatten_with_keys`."""
        return cls(*parts, precision)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the wide one."""
        *rows, width = self.values.shape
        return (*rows, 2 * width if self.precision == "int4" else width)

    @property
    def ndim(self) -> int:
        """Of the wide one."""
        return self.values.ndim

    @property
    def T(self) -> jax.Array:
        """The wide one, transposed."""
        return self.__jax_array__().T

    def astype(self, dtype: Any) -> jax.Array:
        """Return the wide one in another type."""
        return self.__jax_array__().astype(dtype)

    def __jax_array__(self) -> jax.Array:
        """Return the wide one, f32."""
        if self.precision == "bf16":
            return self.values.astype(jnp.float32)
        whole = self.values
        if self.precision == "int4":
            four = jnp.full_like(whole, 4)
            low = jax.lax.shift_right_arithmetic(jax.lax.shift_left(whole, four), four)  # with its sign
            high = jax.lax.shift_right_arithmetic(whole, four)
            whole = jnp.stack([low, high], axis=-1)
        blocks = whole.reshape(*self.scales.shape, BLOCK).astype(jnp.float32) * self.scales[..., None]
        return blocks.reshape(self.shape)

    def __getitem__(self, index: Any) -> jax.Array:
        """Return rows, of which alone the bits are widened, or any other part."""
        if isinstance(index, tuple | slice | int):
            return self.__jax_array__()[index]
        scales = None if self.scales is None else self.scales[index]
        return Narrow(self.values[index], scales, self.precision).__jax_array__()

    def __rmatmul__(self, other: jax.Array) -> jax.Array:
        """Return `other @ wide`."""
        return other @ self.__jax_array__()


def narrowed(model: TracedModel, precision: Precision) -> TracedModel:
    """Return the model with parameters in fewer bits, and later versions, too. `f32`: as it is."""
    if precision == "f32":
        return model
    params = jax.tree.map(partial(_narrow, precision=precision), model.params)
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    specs = tuple(
        TensorSpec(
            jax.tree_util.keystr(path, simple=True, separator="."),
            DTYPE_NAMES.get(leaf.dtype, "bf16"),
            tuple(leaf.shape),
        )
        for path, leaf in leaves
    )
    refresh = None if model.refresh is None else partial(_refreshed, model.refresh, precision)
    return replace(model, params=params, specs=(*specs, *trained_by(model.adapted)), refresh=refresh)


def _refreshed(refresh: Callable[[int], ServedModel | None], precision: Precision, version: int) -> ServedModel | None:
    newer = refresh(version)
    return narrowed(newer, precision) if isinstance(newer, TracedModel) else newer


def _narrow(leaf: np.ndarray, precision: Precision) -> Any:
    """Return a leaf in fewer bits, or as it is where it is a vector, small, or of integers."""
    if leaf.ndim < 2 or leaf.size < LEAST or leaf.dtype.kind != "f":
        return leaf
    if precision == "bf16" or leaf.shape[-1] % BLOCK:
        return Narrow(jnp.asarray(leaf).astype(jnp.bfloat16), None, "bf16")
    whole, scales = absmax_codes(leaf, BLOCK, _LEVELS[precision])
    if precision == "int4":
        whole = pack(whole.view(np.uint8) & np.uint8(15), 4).view(np.int8)
    return Narrow(whole, scales, precision)
