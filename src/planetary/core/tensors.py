"""Names, shapes and element types of tensors, in StableHLO's spelling, and the layout of a CPU's weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.core.quantisers import to_bfloat16

# Element type -> the numpy type that holds it on the host. A bfloat16 is held as 16 raw bits: numpy has no such type,
# and a worker must not need ml_dtypes.
HOST_DTYPES: Mapping[str, np.dtype] = {
    "f64": np.dtype("<f8"),
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
    "i64": np.dtype("<i8"),
    "i32": np.dtype("<i4"),
    "i16": np.dtype("<i2"),
    "i8": np.dtype("i1"),
    "ui64": np.dtype("<u8"),
    "ui32": np.dtype("<u4"),
    "ui16": np.dtype("<u2"),
    "ui8": np.dtype("u1"),
    "i1": np.dtype("?"),
    "complex<f32>": np.dtype("<c8"),
    "complex<f64>": np.dtype("<c16"),
}

DTYPE_NAMES: Mapping[np.dtype, str] = {dtype: name for name, dtype in HOST_DTYPES.items() if name != "bf16"}
"""numpy type -> element type. The bits of a bfloat16 have a type of their own, `ui16`."""

_SPELLINGS = {
    "boolean": "i1",
    "bool": "i1",
    **{f"{letter}{bits}": f"i{bits}" for letter in ("s", "si", "int") for bits in (8, 16, 32, 64)},
    **{f"{letter}{bits}": f"ui{bits}" for letter in ("u", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    "bfloat16": "bf16",
    "complex64": "complex<f32>",
    "complex128": "complex<f64>",
}


def digest_of(array: np.ndarray) -> str:
    """Return the sha256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def stablehlo_dtype(spelling: str) -> str:
    """Return StableHLO's name of an element type that may be spelled as XLA, Rust or numpy do: `u16`, `uint16`."""
    return _SPELLINGS.get(spelling, spelling)


def host_dtype(dtype: str) -> np.dtype:
    """Return the numpy type that holds `dtype` on the host, or raise `UserError` naming the known ones."""
    try:
        return HOST_DTYPES[dtype]
    except KeyError:
        raise UserError(f"unknown element type {dtype!r}; known: {', '.join(HOST_DTYPES)}") from None


def to_host_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 `values` in the host representation of `dtype`; bfloat16 is rounded to nearest even."""
    return to_bfloat16(values) if dtype == "bf16" else values.astype(host_dtype(dtype))


class TensorSpec(msgspec.Struct, frozen=True):
    """Name, element type (StableHLO spelling, e.g. `"f32"`) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes on the host and on the wire."""
        return self.size * host_dtype(self.dtype).itemsize

    def empty(self) -> np.ndarray:
        """Return an uninitialised C-contiguous host array of this shape and type."""
        return np.empty(self.shape, host_dtype(self.dtype))

    def zeros(self) -> np.ndarray:
        """Return a host array of zeros of this shape and type."""
        return np.zeros(self.shape, host_dtype(self.dtype))


# A named tensor tree, flattened: the order of the names is the order of the graph's arguments.
Tensors = Mapping[str, np.ndarray]


class WeightBlocks(msgspec.Struct, frozen=True):
    """The layout of a weight on a CPU: blocks [⌈N / width⌉, K, width] of neighbouring outputs, input by input.

    N are the weight's outputs, K the inputs; zeros fill the last block. A product of any number of rows with such a
    weight reads memory in order, in whole vector registers. With [outputs, inputs] or [inputs, outputs], IREE 3.13
    computes products of one row, of eight and of a hundred at a third to two thirds of that rate.

    Attributes:
        name: of the tensor, as an argument of functions.
        outputs: dimensions kept by a product, in order.
        inputs: dimensions summed over by a product, in order.
        width: outputs that are neighbours in memory.
    """

    name: str
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    width: int = 32

    def counts(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return N and K of a tensor of a shape."""
        return math.prod(shape[d] for d in self.outputs), math.prod(shape[d] for d in self.inputs)

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return the stored form's shape."""
        outputs, inputs = self.counts(shape)
        return -(-outputs // self.width), inputs, self.width

    def store(self, array: np.ndarray) -> np.ndarray:
        """Return the stored form of an array, of the same dtype, contiguous."""
        outputs, inputs = self.counts(array.shape)
        rows = array.transpose(*self.outputs, *self.inputs).reshape(outputs, inputs)
        blocks, _, _ = self.stored_shape(array.shape)
        if blocks * self.width != outputs:
            rows = np.concatenate([rows, np.zeros((blocks * self.width - outputs, inputs), array.dtype)])
        return np.ascontiguousarray(rows.reshape(blocks, self.width, inputs).transpose(0, 2, 1))

    def restore(self, stored: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Reverse `store` for a tensor of a shape."""
        outputs, inputs = self.counts(shape)
        rows = stored.transpose(0, 2, 1).reshape(-1, inputs)[:outputs]
        order = (*self.outputs, *self.inputs)
        return np.ascontiguousarray(rows.reshape([shape[d] for d in order]).transpose(np.argsort(order)))
