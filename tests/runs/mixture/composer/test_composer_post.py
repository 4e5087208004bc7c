"""A composer's outgoing messages: named by their payloads, packed elsewhere, and dropped with its connection."""

from __future__ import annotations

import hashlib
from concurrent.futures import Executor

import pytest
from moe_support import Later

from planetary.artifacts.packed_arrays import Packed
from planetary.fleet.protocol import messages as m
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.composer.role import ComposerPost

STATE = mm.SaveShard(shard=0, epoch=1, step=2, progress=2, payload="")
STEP = mm.StepTaken(shard=0, epoch=1, step=2, loss=1.0, seconds=1.0)


def post(packing: Executor | None) -> tuple[ComposerPost, list[tuple[m.Message, Packed | None]], list[Exception]]:
    sent: list[tuple[m.Message, Packed | None]] = []
    failed: list[Exception] = []
    return ComposerPost(lambda message, data: sent.append((message, data)), packing, failed.append), sent, failed


@pytest.mark.parametrize("packing", [None, Later()], ids=["at once", "beside"])
def test_a_payload_is_named_by_its_kind_and_digest(packing: Later | None) -> None:
    box, sent, _ = post(packing)
    box.put(STATE, "shard", lambda: b"state")
    box.put(STEP)
    if packing is not None:
        assert [message for message, _ in sent] == [STEP]  # which waits for nothing
        packing.run()
    name = f"shard/{hashlib.sha256(b'state').hexdigest()}"
    kept = mm.SaveShard(shard=0, epoch=1, step=2, progress=2, payload=name)
    assert sorted(sent, key=str) == sorted([(kept, b"state"), (STEP, None)], key=str)


def test_messages_for_a_lost_connection_are_dropped() -> None:
    packing = Later()
    box, sent, _ = post(packing)
    packed: list[int] = []

    def pack(number: int) -> bytes:
        packed.append(number)
        return b"state"

    box.put(STATE, "shard", lambda: pack(1))
    box.forget()
    box.put(STATE, "shard", lambda: pack(2))
    packing.run()
    assert packed == [2]
    assert len(sent) == 1


def test_a_payload_that_cannot_be_packed_is_an_error() -> None:
    packing = Later()
    box, sent, failed = post(packing)

    def pack() -> bytes:
        raise MemoryError("no room for 690 MB")

    box.put(STATE, "shard", pack)
    packing.run()
    assert (sent, [type(error) for error in failed]) == ([], [MemoryError])
