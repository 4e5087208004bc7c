"""The arrays that all peers hold alike: their digests, serving them to others, fetching them from several donors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from planetary.collectives.protocol.messages import ArrayEntry, Fetch, PeerInfo
from planetary.collectives.reduction.buffer_guard import BufferGuard
from planetary.collectives.reduction.elements import Flat, raw
from planetary.collectives.transport.lanes import open_connection
from planetary.collectives.transport.piece_frames import Introduction, Request, StateAnswer
from planetary.collectives.transport.ports import Ports
from planetary.collectives.transport.sockets import DataConnection, SocketOptions
from planetary.core import decoding
from planetary.core.errors import PeerError, PlanetaryError, TrustError, UserError
from planetary.core.threads import Queue, Threads

try:
    import xxhash  # pyright: ignore[reportMissingImports] - optional
except ImportError:  # pragma: no cover - an install without it
    xxhash = None

PART_BYTES = 4 << 20
_ATTEMPTS_PER_DONOR = 2


def digest_algorithms() -> tuple[str, ...]:
    """Names of the algorithms this peer has, best first. A group uses the first one that all members have."""
    return ("xxh3-128", "blake2b") if xxhash is not None else ("blake2b",)


def digest(algorithm: str, flat: np.ndarray) -> str:
    """Return the hexadecimal digest of an array's bytes."""
    data = raw(flat)
    if algorithm == "xxh3-128" and xxhash is not None:
        return xxhash.xxh3_128_hexdigest(data)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class SyncInfo:
    """Result of a synchronisation on this peer.

    Attributes:
        revision: of the state now.
        received: names whose content was replaced.
        rx_bytes, tx_bytes: payload that was fetched, and served to others.
    """

    revision: int
    received: tuple[str, ...]
    rx_bytes: int
    tx_bytes: int


class SharedState:
    """Named arrays and their revision.

    Raise `revision` by one (`push_revision`) each time all peers have changed the state in the same way.
    """

    def __init__(
        self, arrays: Mapping[str, Any], *, revision: int = 0, allow_content_inequality: Sequence[str] = ()
    ) -> None:
        """`arrays`: name -> numpy array or torch tensor that can be written. They are kept alive, and copied only
        from another layout or from a device.

        Names in `allow_content_inequality` are not compared. Raises `UserError` for an array that cannot be used.
        """
        self.revision = revision
        self.free = frozenset(allow_content_inequality)
        unknown = self.free - arrays.keys()
        if unknown:
            raise UserError(f"allow_content_inequality names {sorted(unknown)}, which are not in the state")
        if not arrays:
            raise UserError("a shared state needs at least one array")
        self.flats = {name: Flat(array, writable=True, what=f"shared state {name!r}") for name, array in arrays.items()}

    def push_revision(self) -> None:
        """Count one step of the state."""
        self.revision += 1

    def refresh(self) -> None:
        """Look at arrays again whose memory cannot be used as it is (another layout, or on a device)."""
        for flat in self.flats.values():
            flat.read_again()

    def entries(self, algorithm: str) -> tuple[ArrayEntry, ...]:
        """Describe every array, with a digest."""
        return tuple(
            ArrayEntry(name, flat.dtype, flat.shape, "" if name in self.free else digest(algorithm, flat.flat))
            for name, flat in self.flats.items()
        )


class StateSession(BufferGuard):
    """A shared state during one synchronisation, with unchanging arrays."""

    def __init__(self, state: SharedState, threads: Threads) -> None:
        """Offer a state to others."""
        super().__init__(threads)
        self._state = state
        self.tx_bytes = 0
        self.fetched: dict[str, np.ndarray] = {}

    def part(self, name: str, offset: int, length: int) -> memoryview | None:
        """Return a part of an array's bytes; None when there is no such part."""
        flat = self._state.flats.get(name)
        if flat is None or offset < 0 or not 0 < length <= PART_BYTES or offset + length > flat.flat.nbytes:
            return None
        self.tx_bytes += length
        return raw(flat.flat)[offset : offset + length]

    def commit(self) -> tuple[str, ...]:
        """After `close`: take over the fetched arrays. Returns their names."""
        for name, content in self.fetched.items():
            flat = self._state.flats[name]
            flat.flat[...] = content
            flat.write_back()
        return tuple(self.fetched)


class Fetcher:
    """Fetches arrays part by part from their donors at once; a donor that fails is replaced by another."""

    def __init__(
        self,
        session: StateSession,
        wanted: Sequence[Fetch],
        state: SharedState,
        *,
        seq: int,
        algorithm: str,
        peers: Mapping[str, PeerInfo],
        introduction: Introduction,
        options: SocketOptions,
        tls: bool,
        stall_s: float,
        ports: Ports,
    ) -> None:
        self._session, self._wanted, self._seq, self._algorithm = session, wanted, seq, algorithm
        self._peers, self._introduction, self._options = peers, introduction, options
        self._tls, self._stall_s, self._ports = tls, stall_s, ports
        self._lock = ports.threads.lock()
        self._errors: list[str] = []
        self._buffers = {item.name: np.empty_like(state.flats[item.name].flat) for item in wanted}
        self.rx_bytes = 0

    def run(self) -> None:
        """Fetch all into the session. Raises `PeerError` when the donors do not suffice, `TrustError` when an array
        has another digest than the elected one.
        """
        donors = sorted({donor for item in self._wanted for donor in item.donors if donor in self._peers})
        parts = [
            (item, offset) for item in self._wanted for offset in range(0, self._buffers[item.name].nbytes, PART_BYTES)
        ]
        work: dict[str, Queue[tuple[Fetch, int]]] = {donor: self._ports.threads.queue() for donor in donors}
        left: dict[tuple[str, int], Fetch] = {(item.name, offset): item for item, offset in parts}
        for attempt in range(_ATTEMPTS_PER_DONOR * max(len(donors), 1)):
            if not left:
                break
            for number, ((_, offset), item) in enumerate(left.items()):
                able = [donor for donor in item.donors if donor in work]
                if not able:
                    raise PeerError(f"fetching {item.name!r}: no donor is left; {'; '.join(self._errors)}")
                work[able[(number + attempt) % len(able)]].put((item, offset))
            threads = [
                self._ports.threads.start("planetary state fetch", partial(self._from_donor, donor, mine, left))
                for donor, mine in work.items()
            ]
            for thread in threads:
                thread.join()  # every read in it has a deadline
            work = {donor: self._ports.threads.queue() for donor, mine in work.items() if mine.empty()}
        if left:
            raise PeerError(f"fetching the shared state: {'; '.join(self._errors)}")
        for item in self._wanted:
            found = digest(self._algorithm, self._buffers[item.name])
            if item.digest and found != item.digest:
                raise TrustError(f"fetching {item.name!r}: expected the digest {item.digest}, found {found}")
        self._session.fetched = self._buffers

    def _from_donor(self, donor: str, work: Queue[tuple[Fetch, int]], left: dict[tuple[str, int], Fetch]) -> None:
        """Fetch the parts in `work`; on an error the rest stays there, which marks the donor as failed."""
        connection: DataConnection | None = None
        item_offset: tuple[Fetch, int] | None = None
        try:
            while not work.empty():
                if connection is None:
                    connection = open_connection(
                        self._peers[donor], self._introduction, self._options, self._ports, tls=self._tls
                    )
                item_offset = work.get()
                item, offset = item_offset
                self._fetch(connection, item.name, offset)
                item_offset = None
                with self._lock:
                    del left[item.name, offset]
        except (PlanetaryError, OSError, msgspec.MsgspecError) as error:
            with self._lock:
                self._errors.append(f"{self._peers[donor].name}: {error}")
            if item_offset is not None:
                work.put(item_offset)
        finally:
            if connection is not None:
                connection.close()

    def _fetch(self, connection: DataConnection, name: str, offset: int) -> None:
        data = raw(self._buffers[name])[offset : offset + PART_BYTES]
        request = Request(self._seq, name, offset, len(data))
        connection.write_block(msgspec.json.encode(request), self._stall_s)
        answer = decoding.from_json(connection.read_block(4096, self._stall_s), StateAnswer)
        if not answer.ok or answer.length != len(data):
            raise PeerError(f"asked for {len(data)} bytes of {name!r}: {answer.reason or answer.length}")
        connection.read(data, self._stall_s)
        with self._lock:
            self.rx_bytes += len(data)
