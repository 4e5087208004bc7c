"""The interface of codecs, and their error feedback: in numpy, or in `codec_kernels` where numba is installed."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Protocol

import numpy as np

from planetary.core.errors import ProtocolError
from planetary.core.tensors import TensorSpec


class Codec(Protocol):
    """Encodes one tensor at a time. Equal values give equal bytes on every machine.

    Attributes:
        lossy: whether the dropped part has to be fed back.
        decay: β of the error feedback e ← β e + Δ; 1 keeps the dropped part until it is sent.
    """

    lossy: bool
    decay: float

    def nbytes(self, spec: TensorSpec) -> int:
        """Return the bytes of an encoded tensor of this shape."""
        ...

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        """Encode finite float32 values, of the tensor's shape, into `out`, uint8 [nbytes]."""
        ...

    def decode(self, spec: TensorSpec, data: np.ndarray) -> np.ndarray:
        """Return the float32 tensor that uint8 [nbytes] stands for, a new array.

        Raises:
            ProtocolError: no tensor has these bytes, or they stand for NaN or infinite numbers.
        """
        ...

    def compress(
        self, spec: TensorSpec, update: np.ndarray, residual: np.ndarray | None, out: np.ndarray
    ) -> np.ndarray | None:
        """Encode e = update + β residual into `out`, and return e less the values of its bytes.

        Args:
            update, residual: float32 of the tensor's shape; None: nothing was dropped before. Both stay as they are.
            out: uint8 [nbytes].

        Returns:
            Float32 of the tensor's shape, a new array, or nothing where the codec is not lossy; None where e or this
            has NaN or infinite numbers.
        """
        ...


@functools.cache
def compiled() -> ModuleType | None:
    """Return `codec_kernels`, or None where numba is not installed."""
    try:
        from planetary.diloco.codecs import codec_kernels
    except ImportError:
        return None
    return codec_kernels


def compress_in_numpy(
    codec: Codec, spec: TensorSpec, update: np.ndarray, residual: np.ndarray | None, out: np.ndarray
) -> np.ndarray | None:
    """`Codec.compress` by encoding and decoding, with the bits of the kernels."""
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = update if residual is None else update + np.float32(codec.decay) * residual
        if not np.isfinite(wanted).all():
            return None
        codec.encode(wanted, out)
        try:
            left = wanted - codec.decode(spec, out)
        except ProtocolError:  # rounded to infinity
            return None
    return left if np.isfinite(left).all() else None


def flat_of(values: np.ndarray | None) -> np.ndarray:
    """Return float32 values, or none, as the loops take them: one dimension, contiguous, read-only."""
    return NOTHING if values is None else read_only(np.ascontiguousarray(values, np.float32).reshape(-1))


def read_only(data: np.ndarray) -> np.ndarray:
    """Return a view that cannot be written to: numba compiles a loop once for these, and once for others."""
    view = data.view()
    view.flags.writeable = False
    return view


def check_finite(spec: TensorSpec, finite: bool) -> None:
    """Raise `ProtocolError` where the numbers that bytes stand for are not `finite`."""
    if not finite:
        raise ProtocolError(f"reading an update: tensor {spec.name!r} contains NaN or infinite numbers")


NOTHING = read_only(np.empty(0, np.float32))
"""The residual of a first update, as loops take it."""
