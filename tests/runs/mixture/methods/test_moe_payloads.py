"""Sketches, surrogates and fragments through the payload store."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from planetary.artifacts.packed_arrays import pack_arrays
from planetary.artifacts.payload_store import PayloadStore
from planetary.core.errors import RemoteProtocolError, TrustError
from planetary.runs.mixture.methods.sketch import Precision, Sketch, decode, encode
from planetary.runs.mixture.methods.surrogate import newer_surrogate, surrogate_message
from planetary.runs.mixture.payloads import payloads
from planetary.runs.mixture.payloads.surrogates import surrogates_bytes, surrogates_from

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def some_sketch() -> Sketch:
    ids = np.tile(np.array([[1, 5]], np.uint16), (7, 1))
    return Sketch(2, 30, 1, normal(7, 24), normal(7, 24) * 1e-5, ids, RNG.random((7, 2)).astype(np.float32))


@pytest.mark.parametrize("precision", ["f32", "4bit"])
def test_stored_sketch_keeps_its_bits(precision: Precision) -> None:
    store = PayloadStore(f"memory://moe-{precision}", {"sketch": 60.0})
    sent = encode(some_sketch(), precision)
    name = store.put("sketch", payloads.sketch_bytes(sent))
    found = payloads.sketch_from(store.get(name))
    expected, got = decode(sent), decode(found)
    for field in ("inputs", "output_gradients", "ids", "gates"):
        assert (getattr(got, field) == getattr(expected, field)).all()
    assert (got.layer, got.step, got.composer) == (2, 30, 1)
    assert next(store.payloads()).nbytes < sent.nbytes + 600
    with pytest.raises(TrustError, match="damaged"):
        decode(replace(found, step=31))


def test_surrogates_and_fragments_come_back() -> None:
    sent = [surrogate_message(0, e, owner=1, version=4, a=normal(8, 3), b=normal(3, 8)) for e in (1, 3)]
    found = surrogates_from(surrogates_bytes(sent))
    assert [(m.expert, m.version) for m in found] == [(1, 4), (3, 4)]
    assert all(newer_surrogate(3, message, owner=1) for message in found)  # checks the checksum
    assert surrogates_from(surrogates_bytes([])) == []
    fragment = {"w": normal(3, 5), "empty": normal(0, 4), "count": np.array(7, np.int32), "odd": normal(3)}
    back = payloads.fragment_from(payloads.fragment_bytes(fragment))
    assert list(back) == list(fragment)
    assert all(back[n].dtype == v.dtype and back[n].shape == v.shape for n, v in fragment.items())
    assert all((back[n] == v).all() for n, v in fragment.items())


def test_bytes_that_are_something_else_are_refused() -> None:
    good = bytes(payloads.sketch_bytes(encode(some_sketch(), "f32")))
    with pytest.raises(RemoteProtocolError, match="expected a fragment, found a 'sketch'"):
        payloads.fragment_from(good)
    for bad in (b"", b"\xff" * 40, good[:-8], good + bytes(8), good[:8] + b"[" + good[9:]):
        with pytest.raises(RemoteProtocolError):
            payloads.sketch_from(bad)
    with pytest.raises(RemoteProtocolError, match="other fields"):
        payloads.sketch_from(pack_arrays("sketch", {"layer": 1}, {}))
    fields = {"layer": 1, "step": 1, "composer": 1, "digest": "", "widths": [0, 0]}
    with pytest.raises(RemoteProtocolError, match="lacks its array 'inputs'"):
        payloads.sketch_from(pack_arrays("sketch", fields, {}))
    raw = [{"layer": 1, "expert": 0, "owner": 0, "version": 1, "checksum": ""}]
    with pytest.raises(RemoteProtocolError, match=r"lack their array '0\.a'"):
        surrogates_from(pack_arrays("surrogates", raw, {}))
