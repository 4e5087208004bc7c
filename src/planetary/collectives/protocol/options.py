"""The choices a caller of a collective has, and the description of one operation that all peers must share."""

from __future__ import annotations

import enum

import msgspec


class ReduceOp(enum.StrEnum):
    """How elements of different peers are combined."""

    SUM = "sum"
    AVG = "avg"  # the sum divided by the world size; integers are truncated toward zero
    PROD = "prod"
    MIN = "min"
    MAX = "max"


class QuantizationAlgorithm(enum.StrEnum):
    """How a block of numbers is mapped to small integers; see `quantise`."""

    MIN_MAX = "min_max"
    ZERO_POINT_SCALE = "zero_point_scale"


class Quantization(msgspec.Struct, frozen=True):
    """Travel with fewer bits: `bits` of 4, 8 or 16 per element and two float32 per block."""

    bits: int = 8
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.MIN_MAX


class SyncStrategy(enum.StrEnum):
    """Which part a peer takes in the synchronisation of shared state."""

    ENFORCE_POPULAR = "enforce_popular"  # votes for the content it has; takes the winner's
    SEND_ONLY = "send_only"  # votes for the content it has; is removed when another content wins
    RECEIVE_ONLY = "receive_only"  # has no vote; takes the winner's


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one operation. It must be equal on all peers; the master compares."""

    kind: str  # "all_reduce", "reduce_scatter", "all_gather", "broadcast" or "barrier"
    dtype: str = ""  # element type in the project's spelling, e.g. "f32"
    count: int = 0  # elements of the whole tensor that goes round the ring
    shape: tuple[int, ...] = ()  # shape of each peer's contribution
    piece: int = 1  # most elements that travel in one frame
    op: str = ""
    bits: int = 0  # quantisation width; 0: none
    algorithm: str = ""
    root: str = ""  # broadcast: id of the peer that sends
    verify: bool = False  # compare the digests of the results before success is declared
