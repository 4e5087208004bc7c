"""Collectives against numpy, for every type, operation and shape of the ring, without sockets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_driver import drive, operations

from planetary.collectives.protocol.options import ReduceOp, Spec
from planetary.collectives.reduction.elements import TYPES
from planetary.collectives.reduction.ring_plan import split
from planetary.collectives.reduction.small_operations import combine, is_small
from planetary.collectives.transport.links import next_lane
from planetary.core.errors import RemoteProtocolError
from planetary.core.quantisers import from_bfloat16, to_bfloat16


def draw(dtype: str, count: int, rank: int) -> np.ndarray:
    rng = np.random.default_rng(rank + 1)
    held = TYPES[dtype]
    if dtype == "bf16":
        bits = np.empty(count, np.uint16)
        to_bfloat16(rng.normal(size=count).astype(np.float32), bits)
        return bits
    if held.kind == "f":
        return rng.normal(size=count).astype(held)
    info = np.iinfo(held)
    return rng.integers(info.min, info.max, count, dtype=held, endpoint=True)


def oracle(op: ReduceOp, dtype: str, arrays: list[np.ndarray]) -> np.ndarray:
    """The result up to the order of additions: in float64, or exactly modulo 2^n for integers."""
    held = TYPES[dtype]
    if held.kind != "f" and dtype != "bf16":
        stack = np.stack(arrays)
        with np.errstate(over="ignore"):
            match op:
                case ReduceOp.SUM:
                    return np.add.reduce(stack, dtype=held)
                case ReduceOp.AVG:
                    total = np.add.reduce(stack, dtype=held)
                    return np.array([int(abs(int(v)) // len(arrays)) * (1 if v >= 0 else -1) for v in total], held)
                case ReduceOp.PROD:
                    return np.multiply.reduce(stack, dtype=held)
    wide = np.stack([from_bfloat16(a) if dtype == "bf16" else a for a in arrays])
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return getattr(np, op)(wide, axis=0)
    wide = wide.astype(np.float64)
    return {ReduceOp.SUM: wide.sum(0), ReduceOp.AVG: wide.mean(0), ReduceOp.PROD: wide.prod(0)}[op]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op", list(ReduceOp))
def test_every_type_and_operation(dtype: str, op: ReduceOp) -> None:
    for world, count in ((2, 5), (3, 4097), (5, 3), (4, 0)):
        arrays = [draw(dtype, count, rank) for rank in range(world)]
        expected = oracle(op, dtype, arrays)
        ring = operations(Spec(kind="all_reduce", dtype=dtype, count=count, op=op), arrays)
        drive(ring)
        assert all(operation.complete for operation in ring)
        assert len({operation.work.tobytes() for operation in ring}) == 1
        found = ring[0].work
        if dtype == "bf16":
            np.testing.assert_allclose(from_bfloat16(found), expected, rtol=0.03, atol=0.03)
        elif found.dtype.kind == "f":
            tolerance = {2: 5e-3, 4: 1e-5, 8: 1e-13}[found.itemsize]
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(found, expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.integers(0, 9000), st.booleans(), st.integers(0, 99), st.sampled_from([0, 4, 8, 16]))
def test_any_order_of_arrival_gives_the_same_bits(world: int, count: int, in_place: bool, seed: int, bits: int) -> None:
    spec = Spec(kind="all_reduce", dtype="f32", count=count, op="avg", bits=bits, algorithm="min_max" if bits else "")
    results = []
    for order in (seed, seed + 1):
        ring = operations(spec, [draw("f32", count, rank) for rank in range(world)], in_place=in_place)
        if world == 1:
            ring[0].work[...] = ring[0].source
        drive(ring, order)
        assert all(operation.complete and operation.announce() for operation in ring)
        assert not any(operation.announce() for operation in ring)
        results += [operation.work.tobytes() for operation in ring]
    assert len(set(results)) == 1
    if not in_place:
        for rank, operation in enumerate(ring):
            np.testing.assert_array_equal(operation.source, draw("f32", count, rank))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(0, 30000), st.integers(0, 200), st.sampled_from([0, 8]))
def test_an_operation_that_ends_anywhere_is_restored(world: int, count: int, most: int, bits: int) -> None:
    spec = Spec(kind="all_reduce", dtype="f32", count=count, op="sum", bits=bits, algorithm="min_max" if bits else "")
    ring = operations(spec, [draw("f32", count, rank) for rank in range(world)])
    drive(ring, most, most)
    for rank, operation in enumerate(ring):
        operation.close()
        assert not operation.enter()
        operation.restore()
        np.testing.assert_array_equal(operation.work, draw("f32", count, rank))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
@pytest.mark.parametrize("op", list(ReduceOp))
def test_a_small_operation_has_the_bits_of_the_ring(dtype: str, op: ReduceOp) -> None:
    for world, count in ((1, 3), (2, 5), (5, 3), (4, 900), (3, 0)):
        arrays = [draw(dtype, count, rank) for rank in range(world)]
        spec = Spec(kind="all_reduce", dtype=dtype, count=count, op=op)
        found = np.empty_like(arrays[0])
        combine(spec, [array.tobytes() for array in arrays], found)
        ring = operations(spec, arrays)
        drive(ring)
        assert found.tobytes() == ring[0].work.tobytes()


def test_what_is_small_depends_on_how_many_bring_it() -> None:
    spec = Spec(kind="all_reduce", dtype="f32", count=1024, op="sum")
    assert is_small(spec, 16)
    assert not is_small(spec, 17)
    assert not is_small(Spec(kind="all_reduce", dtype="f32", count=1025, op="sum"), 2)
    assert not is_small(Spec(kind="all_reduce", dtype="f32", count=4, op="sum", verify=True), 2)
    assert not is_small(Spec(kind="broadcast", dtype="f32", count=4), 2)


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 10_007])
def test_reduce_scatter_all_gather_and_broadcast(world: int, count: int) -> None:
    arrays = [draw("f64", count, rank) for rank in range(world)]
    ring = operations(
        Spec(kind="reduce_scatter", dtype="f64", count=count, op="sum"), [a.copy() for a in arrays], in_place=False
    )
    drive(ring)
    for rank, (start, stop) in enumerate(split(count, world)):
        assert ring[rank].complete
        np.testing.assert_allclose(ring[rank].work[start:stop], sum(arrays)[start:stop])

    whole = [np.full(count * world, np.nan) for _ in range(world)]
    for rank in range(world):
        whole[rank][rank * count : (rank + 1) * count] = arrays[rank]
    gathered = operations(Spec(kind="all_gather", dtype="f64", count=count * world), whole)
    drive(gathered)
    for operation in gathered:
        np.testing.assert_array_equal(operation.work, np.concatenate(arrays))

    for root in range(world):
        copies = [a.copy() for a in arrays]
        drive(operations(Spec(kind="broadcast", dtype="f64", count=count), copies, root=root))
        for copy in copies:
            np.testing.assert_array_equal(copy, arrays[root])


def test_a_piece_that_is_not_due_is_refused() -> None:
    ring = operations(Spec(kind="all_reduce", dtype="f32", count=10, op="sum"), [np.zeros(10, np.float32)] * 2)
    for stage, index in ((2, 0), (0, 1), (0, -1), (2**31, 0)):
        with pytest.raises(RemoteProtocolError, match="expected stages 0 to 1"):
            ring[0].wire_bytes(stage, index)
    drive(ring)
    with pytest.raises(RemoteProtocolError, match="came twice"):
        ring[0].wire_bytes(0, 0)


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, np.inf, -np.inf, np.nan, 3.4e38, -0.0], np.float32)
    bits = np.empty(len(values), np.uint16)
    to_bfloat16(values, bits)
    back = from_bfloat16(bits)
    np.testing.assert_array_equal(back[:5], np.array([1.0, 1.0, 1.015625, np.inf, -np.inf], np.float32))
    assert np.isnan(back[5])
    assert np.isinf(back[6])
    assert np.signbit(back[7])


def test_integer_average_truncates_in_any_world_size() -> None:
    """An average of integers truncates even when the world is larger than the type."""
    from planetary.collectives.reduction.kernels import finish

    values = np.array([-128, -7, -1, 0, 5, 127], np.int8)
    finish(ReduceOp.AVG, "i8", values, 2)
    np.testing.assert_array_equal(values, [-64, -3, 0, 0, 2, 63])
    values = np.array([-128, 127], np.int8)
    finish(ReduceOp.AVG, "i8", values, 128)
    np.testing.assert_array_equal(values, [-1, 0])


def test_pieces_are_dealt_in_turn_and_fewer_to_slow_links() -> None:
    turns, turn = [], 0
    for _ in range(6):
        lane = next_lane([0, 0, 0], turn)
        turns.append(lane)
        turn = lane + 1
    assert turns == [0, 1, 2, 0, 1, 2]
    assert next_lane([4, 2, 2], 2) == 2
    assert next_lane([4, 2, 2], 3) == 1
    assert next_lane([7], 5) == 0
