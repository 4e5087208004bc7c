"""Ternary matrices in two bits a weight: γ · {−1, 0, 1}, four codes a byte, and as tensors of a file or a payload.

Three tensors are there in place of a tensor `W`: `W.ternary.codes`, `W.ternary.scale` and `W.ternary.shape`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from planetary.artifacts.safetensors_file import read_safetensors
from planetary.core.errors import LocalProtocolError, TrustError
from planetary.core.quantisers import pack, unpack
from planetary.core.tensors import DTYPE_NAMES, Tensors, TensorSpec

_PARTS = {"codes": "ui8", "scale": "f32", "shape": "i64"}
_INFIX = ".ternary."


class TernaryMatrices(msgspec.Struct, frozen=True):
    """Matrices [..., m, n] in two bits a weight.

    Attributes:
        shape: of the matrices.
        codes: uint8 [..., ceil(m n / 4)], four weights a byte, the first in the lowest bits; weight + 1 is stored.
        scale: float32 [...], γ of each matrix.
    """

    shape: tuple[int, ...]
    codes: np.ndarray
    scale: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""
        return self.codes.nbytes + self.scale.nbytes


def pack_ternary(values: np.ndarray) -> TernaryMatrices:
    """Return the two-bit form of float32 matrices [..., m, n] that are ternary. Unpacking gives the same values.

    Raises:
        LocalProtocolError: a matrix has other values than −γ, 0 and γ.
    """
    if values.ndim < 2 or values.dtype != np.float32:
        raise LocalProtocolError(f"ternary weights are float32 matrices, found {values.dtype} {values.shape}")
    scale = np.max(np.abs(values), axis=(-2, -1))
    trits = np.sign(values)
    if not (trits * scale[..., None, None] == values).all():  # NaN is unequal, too
        raise LocalProtocolError("these weights are not ternary: a matrix has other values than −γ, 0 and γ")
    codes = (trits + 1).astype(np.uint8).reshape(*values.shape[:-2], -1)
    spare = -codes.shape[-1] % 4
    codes = np.concatenate([codes, np.ones((*codes.shape[:-1], spare), np.uint8)], axis=-1)
    return TernaryMatrices(values.shape, pack(codes, 2), scale)


def unpack_ternary(stored: TernaryMatrices) -> np.ndarray:
    """Return the float32 matrices.

    Raises:
        TrustError: a size is wrong, a code is none of the three, or a scale is no size.
    """
    if len(stored.shape) < 2 or min(stored.shape) < 1:
        raise TrustError(f"ternary weights of shape {list(stored.shape)} are no matrices")
    size = stored.shape[-2] * stored.shape[-1]
    expected = (*stored.shape[:-2], -(-size // 4))
    if stored.codes.shape != expected or stored.scale.shape != stored.shape[:-2]:
        raise TrustError(
            f"ternary weights of shape {list(stored.shape)} need codes {list(expected)} and a scale a matrix, found "
            f"{list(stored.codes.shape)} and scales {list(stored.scale.shape)}"
        )
    if not (np.isfinite(stored.scale).all() and (stored.scale >= 0).all()):
        raise TrustError("ternary weights have a scale that is negative or not finite: the bytes are damaged")
    codes = unpack(stored.codes, 2, 4 * stored.codes.shape[-1])
    if (codes == 3).any():
        raise TrustError("ternary weights contain the code 3, which means no weight: the bytes are damaged")
    trits = codes[..., :size].reshape(stored.shape).astype(np.float32) - np.float32(1)
    return trits * stored.scale[..., None, None]


def ternary_tensors(name: str, stored: TernaryMatrices) -> dict[str, np.ndarray]:
    """Return the tensors stored in place of the tensor `name`."""
    parts = {"codes": stored.codes, "scale": stored.scale, "shape": np.array(stored.shape, np.int64)}
    return {f"{name}{_INFIX}{part}": value for part, value in parts.items()}


def read_weights(path: Path) -> tuple[tuple[TensorSpec, ...], dict[str, np.ndarray], tuple[str, ...]]:
    """Return the specs and tensors of a safetensors file with ternary ones as float32, and the names of these.

    Raises:
        TrustError: the file is not well formed or was cut, or ternary weights in it are damaged.
        OSError: it cannot be read.
    """
    specs, tensors = read_safetensors(path)
    try:
        values, ternary = expanded(tensors)
    except TrustError as error:
        raise TrustError(f"{path}: {error}") from None
    kept = [spec for spec in specs if spec.name in values]
    kept += [TensorSpec(name, "f32", values[name].shape) for name in ternary]
    return tuple(kept), values, ternary


def expanded(tensors: Tensors) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Return tensors with those in two bits as float32 under their own names, and these names.

    Raises:
        TrustError: a part of ternary weights is missing, damaged or of another type.
    """
    values: dict[str, np.ndarray] = {}
    packed: dict[str, dict[str, np.ndarray]] = {}
    for full, tensor in tensors.items():
        name, infix, part = full.rpartition(_INFIX)
        if not infix:
            values[full] = tensor
        elif _PARTS.get(part) != DTYPE_NAMES[tensor.dtype]:
            raise TrustError(f"{full!r} is {DTYPE_NAMES[tensor.dtype]}: ternary weights have {_said(_PARTS)}")
        else:
            packed.setdefault(name, {})[part] = tensor
    for name, parts in packed.items():
        if name in values or parts.keys() != _PARTS.keys() or parts["shape"].ndim != 1:
            raise TrustError(f"{name!r}: ternary weights have {_said(_PARTS)}, each once and nothing else of this name")
        shape = tuple(map(int, parts["shape"]))
        # Before any allocation with this shape: it is untrusted.
        if math.prod(shape) > 4 * parts["codes"].size:
            raise TrustError(
                f"{name!r}: ternary weights of shape {list(shape)} need more than {parts['codes'].size} bytes"
            )
        try:
            values[name] = unpack_ternary(TernaryMatrices(shape, parts["codes"], parts["scale"]))
        except TrustError as error:
            raise TrustError(f"{name!r}: {error}") from None
    return values, tuple(packed)


def _said(parts: Mapping[str, str]) -> str:
    return ", ".join(f"{_INFIX[1:]}{part} ({dtype})" for part, dtype in parts.items())
