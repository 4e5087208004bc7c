"""Strangers, connections that have not authenticated yet: how many of them a server accepts, and their log lines.

A stranger costs memory before it has shown anything: a TLS handshake alone takes 256 KiB. So places for strangers are
counted apart from those of peers, before anything is made for a connection.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from dataclasses import dataclass

from planetary.net.addresses import is_loopback


@dataclass(frozen=True, kw_only=True)
class StrangerLimits:
    """The limits for strangers.

    Attributes:
        at_once: places, of all addresses. The next stranger gets the oldest stranger's place after `settled_s` seconds:
            an honest peer is no stranger for long. Else it is turned away, so of many who come at once, as after a
            restart, some get through.
        of_address: places of one address, unless it is this machine's own. A site behind one address lets its nodes
            come in turn: a refused node tries again.
        introduction_s: seconds from connecting, the TLS handshake included, to the first whole message.
        log_every_s: seconds from one line about those that were turned away to the next.
    """

    at_once: int = 128
    settled_s: float = 1.0
    of_address: int = 64
    introduction_s: float = 10.0
    log_every_s: float = 60.0


def _nothing() -> None: ...


class Place:
    """A stranger's place at a `Door`.

    Attributes:
        host: address of the stranger.
        since: when it came (seconds of the door's clock).
        end: ends its connection; set by the owner.
    """

    def __init__(self, host: str = "", since: float = 0.0, left: Callable[[Place], None] = lambda _: None) -> None:
        self.host, self.since = host, since
        self.end: Callable[[], object] = _nothing
        self._left = left

    def leave(self) -> None:
        """The stranger has shown who it is, or is gone. May be called again."""
        self._left(self)


class Door:
    """Lets strangers in as far as there are places. May be used from several threads."""

    def __init__(self, limits: StrangerLimits) -> None:
        """Start without strangers."""
        self.limits = limits
        self._lock = threading.Lock()
        self._places: dict[Place, None] = {}  # places in the order of arrival
        self._by_host: collections.Counter[str] = collections.Counter()
        self._turned_away: collections.Counter[str] = collections.Counter()  # refusals by reason, since the last line
        self._logged_at: float | None = None

    @property
    def strangers(self) -> int:
        """How many there are."""
        return len(self._places)

    def enter(self, host: str, now: float) -> Place | None:
        """Return a place for a connection from `host` at `now` (seconds of any clock that does not go back), or None.

        Where all places are taken, the stranger that has been there longest may be ended for it.
        """
        longest: Place | None = None
        with self._lock:
            if self._by_host[host] >= self.limits.of_address and not is_loopback(host):
                self._turned_away[f"from {host}, which had {self.limits.of_address} others waiting"] += 1
                return None
            if len(self._places) >= self.limits.at_once:
                longest = next(iter(self._places))
                if now < longest.since + self.limits.settled_s:
                    self._turned_away[f"when {self.limits.at_once} others had just come"] += 1
                    return None
                self._forget(longest)
                self._turned_away["that had not introduced itself when all places were taken"] += 1
            place = Place(host, now, self._leave)
            self._places[place] = None
            self._by_host[host] += 1
        if longest is not None:
            longest.end()
        return place

    def turned_away(self, why: str) -> None:
        """Take note of a stranger that was turned away; `why` goes on after "connections"."""
        with self._lock:
            self._turned_away[why] += 1

    def news(self, now: float) -> str:
        """Return a line about who was turned away, if one is due at `now`; else "".

        The first is due at once, each later one `log_every_s` after the one before.
        """
        with self._lock:
            due = self._logged_at is None or now >= self._logged_at + self.limits.log_every_s
            if not due or not self._turned_away:
                return ""
            counts, self._turned_away = self._turned_away, collections.Counter()
            self._logged_at = now
        said = [f"{count} {why}" for why, count in counts.most_common(3)]
        rest = counts.total() - sum(count for _, count in counts.most_common(3))
        return f"connections turned away: {', '.join([*said, *([f'{rest} others'] if rest else [])])}"

    def _leave(self, place: Place) -> None:
        with self._lock:
            self._forget(place)

    def _forget(self, place: Place) -> None:
        if place in self._places:
            del self._places[place]
            self._by_host[place.host] -= 1
            if not self._by_host[place.host]:
                del self._by_host[place.host]
