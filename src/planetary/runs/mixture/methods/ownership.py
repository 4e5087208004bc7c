"""Who owns which routed expert (PARALLAX, section 4.1), and ownership as an argument of a compiled step.

An ownership map is an i32 array `owners` [layers, experts] whose elements are composers. C need not divide the number
of experts: shards then differ by one expert, and the smaller ones have an empty slot. The compiled step never sees
the map but the matrix of `slot_matrix`, an ordinary argument, so one artifact serves every composer.
"""

from __future__ import annotations

import hashlib

import numpy as np

from planetary.core.errors import UserError

EMPTY = -1  # a slot without an expert


def round_robin(layers: int, experts: int, composers: int) -> np.ndarray:
    """Return the map of the report: composer `c` owns the experts `e` with `e mod C = c`, in every layer."""
    _check_counts(layers, experts, composers)
    return np.tile(np.arange(experts, dtype=np.int32) % np.int32(composers), (layers, 1))


def hashed(layers: int, experts: int, composers: int, seed: int = 0) -> np.ndarray:
    """Return a map that depends on the hash of (seed, layer, expert) and whose shards differ by at most one.

    The experts of a layer are dealt out in the order of their hashes: a plain hash modulo C would give shards of
    binomial sizes, and a compiled step has as many slots as the largest of them.
    """
    _check_counts(layers, experts, composers)
    owners = np.empty((layers, experts), np.int32)
    for layer in range(layers):
        order = sorted(range(experts), key=lambda e: hashlib.sha256(f"{seed}/{layer}/{e}".encode()).digest())
        for place, expert in enumerate(order):
            owners[layer, expert] = place % composers
    return owners


def load_aware(loads: np.ndarray, composers: int) -> np.ndarray:
    """Return a map that gives every composer about the same load, and no more than ceil(experts / C) experts.

    Longest first: each expert goes to the composer with the least load that still has a free slot. Ties go to the
    lower number, so the map depends on `loads` alone.

    Args:
        loads: tokens (or any measure that adds up) per expert, [layers, experts], none negative.
        composers: C.
    """
    loads = np.asarray(loads, np.float64)
    if loads.ndim != 2 or not np.isfinite(loads).all() or (loads < 0).any():
        raise UserError(
            f"a load-aware ownership needs finite loads [layers, experts], none below 0; found {loads.shape}"
        )
    layers, experts = loads.shape
    _check_counts(layers, experts, composers)
    room = -(-experts // composers)
    owners = np.empty((layers, experts), np.int32)
    for layer in range(layers):
        carried, count = np.zeros(composers), np.zeros(composers, np.int64)
        left = experts
        for expert in np.argsort(-loads[layer], kind="stable"):
            # No composer may end without an expert while another has two: the last ones go to those who have fewest.
            empty = int((count == 0).sum())
            free = count == 0 if left <= empty else count < room
            choice = int(np.argmin(np.where(free, carried, np.inf)))
            owners[layer, expert] = choice
            carried[choice] += loads[layer, expert]
            count[choice] += 1
            left -= 1
    return owners


def shard_size(owners: np.ndarray) -> int:
    """Return the largest number of experts that one composer owns in one layer: the slots of the compiled step."""
    return max(int(np.bincount(row).max()) for row in owners)


def owned_slots(owners: np.ndarray, composer: int, slots: int | None = None) -> np.ndarray:
    """Return which expert is in each slot of a composer, i32 [layers, slots]; `EMPTY` where there is none.

    Args:
        owners: the map.
        composer: whose slots.
        slots: how many; default `shard_size(owners)`.
    """
    width = shard_size(owners) if slots is None else slots
    held = np.full((owners.shape[0], width), EMPTY, np.int32)
    for layer, row in enumerate(owners):
        mine = np.flatnonzero(row == composer)
        if len(mine) > width:
            raise UserError(f"composer {composer} owns {len(mine)} experts of layer {layer}, there are {width} slots")
        held[layer, : len(mine)] = mine
    return held


def slot_matrix(slots: np.ndarray, experts: int) -> np.ndarray:
    """Return f32 [layers, experts, slots]: 1 for the expert in the slot. Gates times it are the slots' gates."""
    layers, width = slots.shape
    matrix = np.zeros((layers, experts, width), np.float32)
    for layer in range(layers):
        for slot, expert in enumerate(slots[layer]):
            if expert != EMPTY:
                matrix[layer, expert, slot] = 1.0
    return matrix


def take_slots(everything: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return the rows of `everything` [layers, experts, ...] that are in `slots`; zeros in empty ones."""
    layers = np.arange(slots.shape[0])[:, None]
    found = everything[layers, np.maximum(slots, 0)]
    found[slots == EMPTY] = 0
    return found


def put_slots(everything: np.ndarray, slots: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return a copy of `everything` [layers, experts, ...] whose experts of `slots` are `values`."""
    result = everything.copy()
    layer, slot = np.nonzero(slots != EMPTY)
    result[layer, slots[layer, slot]] = values[layer, slot]
    return result


def _check_counts(layers: int, experts: int, composers: int) -> None:
    if min(layers, experts, composers) < 1:
        raise UserError(
            f"an ownership map needs at least 1 layer, expert and composer: {layers}, {experts}, {composers}"
        )
    if composers > experts:
        raise UserError(
            f"{composers} composers cannot share {experts} experts: some would own none; use at most {experts}"
        )
