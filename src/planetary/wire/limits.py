"""How much a peer may make this side hold or wait for."""

from __future__ import annotations

import msgspec

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

MAX_CHUNK_BYTES = 4 * MIB
"""Fixed cap of one tensor chunk's payload, for every connection."""

MAX_PAYLOAD_BYTES = 16 * GIB
"""Bytes of the tensors of one message: the largest is a whole shard's state."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Caps, in bytes unless a field names another unit. A frame over a cap costs the sender the connection."""

    message_bytes: int = MIB  # JSON of one control message
    declaration_bytes: int = MIB  # JSON of the list of tensors that follow a message
    header_bytes: int = 64 * KIB  # Cap'n Proto header of a tensor frame
    chunk_bytes: int = MAX_CHUNK_BYTES  # payload of one tensor frame
    tensor_bytes: int = MAX_PAYLOAD_BYTES  # all tensors of the messages under way on one connection, together
    tensors: int = 16_384  # number of tensors of one message
    messages_under_way: int = 64  # number of messages whose tensors are still arriving


STRANGER = Limits(message_bytes=64 * KIB, declaration_bytes=0, tensor_bytes=0, tensors=0, messages_under_way=0)
"""For a peer that has not shown its token yet: one small message and nothing else."""
