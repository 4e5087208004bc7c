"""The compiled loops of quantisation give the bits that numpy gives."""

from __future__ import annotations

import numpy as np
import pytest

from planetary.collectives.protocol.options import Quantization, QuantizationAlgorithm, ReduceOp
from planetary.collectives.reduction import quantise
from planetary.collectives.reduction.quantise import BLOCK, add_encode, decode, decode_add, encode, encoded_bytes

pytest.importorskip("numba")


def hard_values(count: int) -> np.ndarray:
    """Blocks of ordinary numbers, zeros of both signs, tiny, huge, constant, NaN, infinite, of too wide a span."""
    source = np.random.default_rng(count)
    values = source.normal(0.1, 3, count).astype(np.float32)
    kinds: list[np.ndarray] = [
        np.where(source.random(BLOCK) < 0.5, np.float32(0), np.float32(-0.0)).astype(np.float32),
        (source.random(BLOCK).astype(np.float32) * np.float32(1e-42)),
        source.normal(0, 1e37, BLOCK).astype(np.float32),
        np.full(BLOCK, -7.25, np.float32),
        np.where(np.arange(BLOCK) == 9, np.float32("nan"), np.float32(1)).astype(np.float32),
        np.where(np.arange(BLOCK) == 9, -np.float32("nan"), np.float32(1)).astype(np.float32),
        np.where(np.arange(BLOCK) == 2047, np.float32("inf"), np.float32(1)).astype(np.float32),
        np.where(np.arange(BLOCK) == 0, np.float32("-inf"), np.float32(1)).astype(np.float32),
        np.where(np.arange(BLOCK) % 2 == 0, np.float32(3e38), np.float32(-3e38)).astype(np.float32),
        np.arange(BLOCK, dtype=np.float32) - np.float32(0.5),
    ]
    for number, kind in enumerate(kinds):
        part = values[number * BLOCK : (number + 1) * BLOCK]
        part[...] = kind[: len(part)]
    return values


def run(
    values: np.ndarray, bits: int, algorithm: QuantizationAlgorithm, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> tuple[bytes, ...]:
    with monkeypatch.context() as patch:
        if not compiled:
            patch.setattr(quantise, "compiled", lambda: None)
        data = memoryview(bytearray(encoded_bytes(len(values), bits)))
        encode(values, bits, algorithm, data)
        out, added = np.empty_like(values), np.empty_like(values)
        decode(data, bits, out)
        decode_add(data, bits, np.arange(len(values), dtype=np.float32) / np.float32(3), added)
        passed_on, finished, more = np.empty_like(values), np.empty_like(values), []
        for target, divisor in ((passed_on, None), (finished, 3)):
            more.append(memoryview(bytearray(len(data))))
            add_encode(data, bits, algorithm, values, target, encoded=more[-1], divisor=divisor)
    # A NaN has many bit patterns, and which one an addition gives is the processor's business.
    for array in (out, added, passed_on, finished):
        array[np.isnan(array)] = np.float32("nan")
    return *(bytes(part) for part in (data, *more)), *(part.tobytes() for part in (out, added, passed_on, finished))


@pytest.mark.parametrize("algorithm", list(QuantizationAlgorithm))
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("count", [0, 1, 5, BLOCK, 14 * BLOCK + 301])
def test_compiled_loops_give_numpys_bits(
    count: int, bits: int, algorithm: QuantizationAlgorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert quantise.LOOPS.load() is not None
    values = hard_values(count)
    found = run(values, bits, algorithm, monkeypatch, compiled=True)
    expected = run(values, bits, algorithm, monkeypatch, compiled=False)
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert found[2] == expected[2]


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_nothing_is_compiled_in_an_operation(bits: int) -> None:
    """It would take longer than the other peers wait for a piece."""
    kernels = quantise.LOOPS.load()
    assert kernels is not None
    loops = [loop for loop in vars(kernels).values() if hasattr(loop, "signatures")]
    quantise.check(Quantization(bits), "f32", ReduceOp.AVG)
    known = {loop: list(loop.signatures) for loop in loops}
    count = 3 * BLOCK + 5
    own, data = hard_values(count), memoryview(bytearray(encoded_bytes(count, bits)))
    encode(own, bits, QuantizationAlgorithm.MIN_MAX, data)
    for received in (data, data.toreadonly()):  # from a socket, from memory that a neighbour shares
        out, encoded = np.empty_like(own), memoryview(bytearray(len(data)))
        decode(received, bits, out)
        decode_add(received, bits, own, out)
        add_encode(received, bits, QuantizationAlgorithm.MIN_MAX, own, out, encoded=encoded, divisor=2)
    assert {loop: list(loop.signatures) for loop in loops} == known
