"""The interface of codecs, and their error feedback: in numpy, or in `codec_kernels` once these are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import ModuleType
from typing import ClassVar, NamedTuple

import numpy as np

from planetary.core.compiled_loops import CompiledLoops
from planetary.core.configuration.needs import Need
from planetary.core.errors import ProtocolError
from planetary.core.tensors import TensorSpec


class CodecInput(NamedTuple):
    """A tensor to encode: e = values − base + β residual, in this order; float32 of the tensor's shape, None: zeros.

    All of them stay as they are.
    """

    values: np.ndarray
    base: np.ndarray | None = None
    residual: np.ndarray | None = None

    def sum(self, decay: float) -> np.ndarray:
        """Return e. It may be NaN or infinite."""
        with np.errstate(invalid="ignore", over="ignore"):
            out = np.empty(self.values.shape, np.float32)
            change = self.values if self.base is None else np.subtract(self.values, self.base, out=out)
            if self.residual is None:
                return change
            if self.base is None:
                return np.add(change, np.multiply(np.float32(decay), self.residual, out=out), out=out)
            return np.add(change, np.float32(decay) * self.residual, out=out)

    def flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the three as the loops take them: one dimension, contiguous, read-only; those that are None empty."""
        return flat_of(self.values), flat_of(self.base), flat_of(self.residual)

    def first(self, count: int) -> CodecInput:
        """Return the first `count` numbers."""
        return CodecInput(*(None if part is None else flat_of(part)[:count] for part in self))  # type: ignore[arg-type]


class Codec(ABC):
    """Encodes one tensor at a time. Equal values give equal bytes on every machine.

    A class is made without arguments. `nbytes`, `encode` and `decode` are all that a codec needs.

    Attributes:
        lossy: whether the sender keeps the dropped part and adds it to the next update (error feedback).
        decay: β of the error feedback e ← β e + Δ; 1 keeps the dropped part until it is sent.
        sparse: whether most numbers of an update arrive as 0.
        starts_runs: whether one encoding is near enough to begin a run from.
        needs: of the configuration.
    """

    lossy: ClassVar[bool] = True
    decay: ClassVar[float] = 1.0
    sparse: ClassVar[bool] = False
    starts_runs: ClassVar[bool] = False
    needs: ClassVar[tuple[Need, ...]] = ()

    @abstractmethod
    def nbytes(self, spec: TensorSpec) -> int:
        """Return the bytes of an encoded tensor of this shape."""

    @abstractmethod
    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        """Encode finite float32 values, of the tensor's shape, into `out`, uint8 [nbytes]."""

    @abstractmethod
    def decode(self, spec: TensorSpec, data: np.ndarray) -> np.ndarray:
        """Return the float32 tensor that uint8 [nbytes] stands for, a new array.

        Raises:
            ProtocolError: no tensor has these bytes, or they stand for NaN or infinite numbers.
        """

    def compress(self, spec: TensorSpec, update: CodecInput, out: np.ndarray) -> np.ndarray | None:
        """Encode e of the update into `out`, and return e less the decoded values.

        Here in numpy, by encoding and decoding; built-in codecs with compiled loops give the same bits.

        Args:
            spec: of the tensor.
            update: to encode.
            out: uint8 [nbytes].

        Returns:
            Float32 of the tensor's shape, a new array, or nothing where the codec is not lossy; None where e or this
            has NaN or infinite numbers.
        """
        wanted = update.sum(self.decay)
        if not np.isfinite(wanted).all():
            return None
        self.encode(wanted, out)
        try:
            left = self.decode(spec, out)
        except ProtocolError:  # rounded to infinity
            return None
        with np.errstate(over="ignore"):
            np.subtract(wanted, left, out=left)
        return left if np.isfinite(left).all() else None


LOOPS = CompiledLoops("planetary.sync.codecs.kernels")


def compiled() -> ModuleType | None:
    """Return `codec_kernels` once they have been loaded, or None."""
    return LOOPS.loaded


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
