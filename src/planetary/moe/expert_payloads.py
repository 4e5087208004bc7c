"""What travels between the syncer and expert workers: experts with their moments, work, and its result, as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import pack_arrays, unpack_arrays
from planetary.core.errors import RemoteProtocolError
from planetary.core.tensors import Tensors
from planetary.moe.expert_work import Improved
from planetary.moe.payloads import sketch_from
from planetary.moe.sketch import EncodedSketch


def experts_bytes(weights: Tensors, moments: Tensors) -> bytes:
    """Return one shard's experts of one layer as a payload of kind `experts`: weights [slots, ...] and moments."""
    return pack_arrays("experts", None, _named(weights, moments))


def experts_from(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return weights and moments, or raise `RemoteProtocolError`."""
    return _parted(unpack_arrays(data, "experts")[1])


def work_bytes(experts: bytes, sketches: Sequence[bytes]) -> bytes:
    """Return what an expert worker needs for one piece of work: the experts, and sketches in the composers' order."""
    arrays = {"experts": np.frombuffer(experts, np.uint8)}
    arrays |= {f"sketch/{i}": np.frombuffer(sketch, np.uint8) for i, sketch in enumerate(sketches)}
    return pack_arrays("work", len(sketches), arrays)


def work_from(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[EncodedSketch]]:
    """Return weights, moments and sketches, or raise `RemoteProtocolError`."""
    raw, arrays = unpack_arrays(data, "work")
    try:
        count = msgspec.json.decode(raw, type=int)
        sketches = [sketch_from(arrays[f"sketch/{i}"].tobytes()) for i in range(count)]
        weights, moments = experts_from(arrays["experts"].tobytes())
    except (msgspec.DecodeError, KeyError) as error:
        raise RemoteProtocolError(f"a payload that says it holds work lacks a part of it: {error}") from None
    return weights, moments, sketches


def improved_bytes(improved: Improved) -> bytes:
    """Return the result of a piece of work."""
    arrays = _named(improved.weights, improved.moments)
    arrays |= {"proxy_before": improved.proxy_before, "proxy_after": improved.proxy_after}
    return pack_arrays("improved", None, arrays)


def improved_from(data: bytes) -> Improved:
    """Return the result, or raise `RemoteProtocolError`."""
    arrays = unpack_arrays(data, "improved")[1]
    try:
        before, after = arrays.pop("proxy_before"), arrays.pop("proxy_after")
    except KeyError as error:
        raise RemoteProtocolError(f"a result of expert work lacks its {error}") from None
    return Improved(*_parted(arrays), before, after)


def _named(weights: Tensors, moments: Tensors) -> dict[str, np.ndarray]:
    return {f"weights/{n}": v for n, v in weights.items()} | {f"moments/{n}": v for n, v in moments.items()}


def _parted(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    found: dict[str, dict[str, np.ndarray]] = {"weights": {}, "moments": {}}
    for path, value in arrays.items():
        group, _, name = path.partition("/")
        if group not in found or not name:
            raise RemoteProtocolError(f"experts have weights and moments, found {path!r}")
        found[group][name] = value.copy()  # aligned, and without the rest of the payload in memory
    return found["weights"], found["moments"]
