"""What every store of payloads must do, whatever is behind its URL."""

from __future__ import annotations

import hashlib
import math

import pytest

from planetary.artifacts.payload_store import Collected, PayloadStore
from planetary.core.errors import TrustError, UserError

LIFETIMES = {"sketch": 100.0, "checkpoint": math.inf}


def check_payloads(store: PayloadStore) -> None:
    """Put, get, look for, list and remove."""
    store.check()
    assert list(store.payloads()) == []
    data = bytes(range(256)) * 40
    name = store.put("sketch", data)
    assert name == f"sketch/{hashlib.sha256(data).hexdigest()}"
    assert store.put("sketch", memoryview(data)) == name
    empty = store.put("checkpoint", b"")
    assert store.get(name) == data
    assert store.get(empty) == b""
    assert [(p.name, p.nbytes) for p in store.payloads()] == [(empty, 0), (name, len(data))]
    assert store.has(name)
    store.remove(name)
    store.remove(name)
    assert not store.has(name)
    with pytest.raises(UserError, match=r"sketch/[0-9a-f]{12}… is not in .*older than the 100 s"):
        store.get(name)


def check_lifetimes(store: PayloadStore) -> None:
    """Old payloads go, kept, lasting and unknown ones stay."""
    old, needed, lasting = store.put("sketch", b"old"), store.put("sketch", b"needed"), store.put("checkpoint", b"c")
    elsewhere = PayloadStore(store.url, {"other": 1.0}, options=store.options, patience_s=0)
    unknown = elsewhere.put("other", b"from another program")
    times = [payload.written for payload in store.payloads()]
    assert store.collect(now=min(times) + 99) == Collected(0, 0, 4)
    assert store.collect([needed], now=max(times) + 101) == Collected(1, 3, 3)
    assert not store.has(old)
    assert all(store.has(name) for name in (needed, lasting, unknown))
    assert store.collect() == Collected(0, 0, 3)  # by the store's own clock nothing is old


def check_damage(store: PayloadStore, path: str) -> None:
    """A payload whose bytes changed is not used; putting it again replaces it. `path` is the store's root in its file
    system.
    """
    name = store.put("sketch", b"right")
    digest = name.partition("/")[2]
    store.files.pipe_file(f"{path}/sketch/{digest[:2]}/{digest}", b"wrong")
    with pytest.raises(TrustError, match="is damaged: its 5 bytes have sha256"):
        store.get(name)
    assert store.put("sketch", b"right") == name
    assert store.get(name) == b"right"
