"""Numbers of a GGUF file's tensors: blocks of 32 or 256 with their own scales, as float32 and back.

The layouts are those of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). In a block, `d` is the
scale, `m` the smallest number, `q` the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from planetary.artifacts.gguf.header import GgufTensor
from planetary.core.errors import TrustError
from planetary.core.trials.deviations import from_bfloat16

_PIECE = 1 << 16  # blocks that are decoded at once; their numbers take 64 MiB


def read_tensor(path: Path, tensor: GgufTensor) -> np.ndarray:
    """Return a tensor's numbers, float32. Raises `TrustError` where the file was cut since its header was read."""
    raw = np.empty(tensor.nbytes, np.uint8)
    with path.open("rb") as file:
        file.seek(tensor.start)
        if file.readinto(raw.data) != raw.size:
            raise TrustError(f"{path} was cut while it was read, in tensor {tensor.name!r}")
    return decoded(tensor.kind.name, raw.reshape(-1, tensor.kind.nbytes)).reshape(tensor.shape)


def decoded(kind: str, blocks: np.ndarray) -> np.ndarray:
    """Return the numbers, float32 [n · size], of blocks uint8 [n, nbytes] of an element type."""
    if kind == "f32":
        return blocks.reshape(-1).view("<f4").astype(np.float32, copy=False)
    if kind == "f16":
        return blocks.reshape(-1).view("<f2").astype(np.float32)
    if kind == "bf16":
        return from_bfloat16(blocks.reshape(-1).view("<u2"))
    first = _DECODERS[kind](blocks[:_PIECE])
    if len(blocks) <= _PIECE:
        return first.reshape(-1)
    found = np.empty((len(blocks), first.size // _PIECE), np.float32)
    found[:_PIECE] = first.reshape(_PIECE, -1)
    for start in range(_PIECE, len(blocks), _PIECE):
        piece = _DECODERS[kind](blocks[start : start + _PIECE])
        found[start : start + _PIECE] = piece.reshape(len(piece), -1)
    return found.reshape(-1)


def encoded_q8_0(values: np.ndarray) -> np.ndarray:
    """Return q8_0 blocks uint8 [n, 34] of float32 values [n · 32]: `d` is the largest magnitude / 127."""
    blocks = values.astype(np.float32, copy=False).reshape(-1, 32)
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.where(d == 0, 0, 1 / np.where(d == 0, 1, d)).astype(np.float32)
    scaled = blocks * inverse
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)  # half away from zero, as in C
    return np.concatenate([d.astype("<f2").view(np.uint8), codes.view(np.uint8)], axis=1)


def _halves(raw: np.ndarray) -> np.ndarray:
    """Return float16 numbers of `raw` uint8 [n, 2 k] as float32 [n, k]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _bits(raw: np.ndarray, width: int, run: int) -> np.ndarray:
    """Return codes of `width` bits: of each `run` bytes the lowest bits of all, then the next of all; uint8 [n, …]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(1, 1, -1, 1)
    return (raw.reshape(len(raw), -1, 1, run) >> shifts & np.uint8((1 << width) - 1)).reshape(len(raw), -1)


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """Return the 32 bits of a little-endian word [n, 4], each as 16."""
    return np.unpackbits(raw, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(raw: np.ndarray) -> np.ndarray:
    return _halves(raw[:, :2]) * (_bits(raw[:, 2:], 4, 16).astype(np.int8) - np.int8(8)).astype(np.float32)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    return _halves(raw[:, :2]) * _bits(raw[:, 4:], 4, 16).astype(np.float32) + _halves(raw[:, 2:4])


def _q5_0(raw: np.ndarray) -> np.ndarray:
    codes = _bits(raw[:, 6:], 4, 16) | _fifth_bits(raw[:, 2:6])
    return _halves(raw[:, :2]) * (codes.astype(np.int8) - np.int8(16)).astype(np.float32)


def _q5_1(raw: np.ndarray) -> np.ndarray:
    codes = _bits(raw[:, 8:], 4, 16) | _fifth_bits(raw[:, 4:8])
    return _halves(raw[:, :2]) * codes.astype(np.float32) + _halves(raw[:, 2:4])


def _q8_0(raw: np.ndarray) -> np.ndarray:
    return _halves(raw[:, :2]) * raw[:, 2:].view(np.int8).astype(np.float32)


def _scaled(codes: np.ndarray, scales: np.ndarray, least: np.ndarray | None = None) -> np.ndarray:
    """Return codes [n, 256] by scales [n, parts], without `least` [n, parts]."""
    parts = codes.astype(np.float32).reshape(len(codes), scales.shape[1], -1)
    found = scales[:, :, None] * parts
    return (found if least is None else found - least[:, :, None]).reshape(len(codes), -1)


def _q2_k(raw: np.ndarray) -> np.ndarray:
    scales, codes, ends = raw[:, :16], raw[:, 16:80], _halves(raw[:, 80:])
    d, m = ends[:, :1] * (scales & 15).astype(np.float32), ends[:, 1:] * (scales >> 4).astype(np.float32)
    return _scaled(_bits(codes, 2, 32), d, m)


def _q3_k(raw: np.ndarray) -> np.ndarray:
    high, codes, packed = raw[:, :32], raw[:, 32:96], raw[:, 96:108]
    scales = _bits(packed[:, :8], 4, 8) | _bits(packed[:, 8:], 2, 4) << np.uint8(4)
    d = _halves(raw[:, 108:]) * (scales.astype(np.int8) - np.int8(32)).astype(np.float32)
    missing = (_bits(high, 1, 32) ^ np.uint8(1)) << np.uint8(2)  # a bit that is not set takes 4 away
    return _scaled(_bits(codes, 2, 32).astype(np.int8) - missing.astype(np.int8), d)


def _k_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eight scales and eight least numbers of 6 bits each, packed in 12 bytes."""
    low, middle, high = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    d = np.concatenate([low & 0x3F, high & 0x0F | low >> 2 & 0x30], axis=1)
    m = np.concatenate([middle & 0x3F, high >> 4 | middle >> 2 & 0x30], axis=1)
    return d.astype(np.float32), m.astype(np.float32)


def _q4_k(raw: np.ndarray) -> np.ndarray:
    d, m = _k_scales(raw[:, 4:16])
    return _scaled(_bits(raw[:, 16:], 4, 32), _halves(raw[:, :2]) * d, _halves(raw[:, 2:4]) * m)


def _q5_k(raw: np.ndarray) -> np.ndarray:
    d, m = _k_scales(raw[:, 4:16])
    codes = _bits(raw[:, 48:], 4, 32) | _bits(raw[:, 16:48], 1, 32) << np.uint8(4)
    return _scaled(codes, _halves(raw[:, :2]) * d, _halves(raw[:, 2:4]) * m)


def _q6_k(raw: np.ndarray) -> np.ndarray:
    codes = _bits(raw[:, :128], 4, 64) | _bits(raw[:, 128:192], 2, 32) << np.uint8(4)
    d = _halves(raw[:, 208:]) * raw[:, 192:208].view(np.int8).astype(np.float32)
    return _scaled(codes.astype(np.int8) - np.int8(32), d)


_DECODERS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    **{"q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0},
    **{"q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k},
}
