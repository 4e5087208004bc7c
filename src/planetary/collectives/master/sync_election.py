"""Which shared state wins, who lacks what, and who breaks a rule: one pure decision of the master."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from planetary.collectives.protocol.collective_messages import ArrayEntry, Fetch, Sync
from planetary.collectives.protocol.options import SyncStrategy


@dataclass(frozen=True)
class Election:
    """The result.

    Attributes:
        revision: of the elected state; None when there is none, see `failure`.
        removed: peer -> the rule it broke.
        fetch: peer -> what it lacks; peers that lack nothing have an empty tuple.
        failure: why nothing could be elected; empty otherwise.
        content: digest of the elected state.
    """

    revision: int | None = None
    removed: Mapping[str, str] = field(default_factory=dict)
    fetch: Mapping[str, tuple[Fetch, ...]] = field(default_factory=dict)
    failure: str = ""
    content: str = ""


def elect_again(offers: Mapping[str, Sync], last: int, content: str, algorithm: str) -> Election:
    """Decide for a group that lost all peers that agreed last, on revision `last` with digest `content`.

    The state that the new members go on from must be that one, or one more revision trained from it; or every peer
    that sends one asks for a restart. PCCL's report (section 8) promises the same. `algorithm` names the digests; a
    content that was digested by another one is known by its revision only.
    """
    senders = [offer for offer in offers.values() if offer.strategy is not SyncStrategy.RECEIVE_ONLY]
    if senders and all(offer.restart for offer in senders):
        return elect(offers, None, algorithm)
    election = elect(offers, last, algorithm)
    if election.failure or election.revision is None:
        return election
    same_kind = content.partition(":")[0] == algorithm
    if election.revision == last + 1 or (election.revision == last and (not same_kind or election.content == content)):
        return election
    found = "another content" if election.revision == last else f"revision {election.revision}"
    return Election(
        failure=f"the group agreed on revision {last}, all peers that did have left, and {found} is on offer. Restore "
        f"a checkpoint of revision {last}, or call sync_shared_state(restart=True) on every peer that offers a state "
        "to begin anew"
    )


def content_digest(entries: Sequence[ArrayEntry], algorithm: str) -> str:
    """Return a digest of a whole state, after the name of the algorithm that made those of its entries."""
    ordered = sorted(entries, key=lambda entry: entry.name)
    return f"{algorithm}:{hashlib.sha256(msgspec.json.encode(ordered)).hexdigest()}"


def elect(offers: Mapping[str, Sync], current: int | None, algorithm: str = "") -> Election:
    """Decide. `offers` is peer -> its state, in ring order; `current` the group's last revision, None for the first.

    1. A revision may be one more than the current one at most; the first one is free.
    2. Among the peers that send (all but RECEIVE_ONLY) the highest revision wins over lower ones, and among those the
       content that most peers have; at a tie the one whose first holder comes first in the ring.
       It is older than the current one only if no peer offers that one.
    3. Everybody's names, types and shapes must be the winner's. Contents marked as free to differ are not compared.
    4. SEND_ONLY peers must have the winning content.

    `algorithm` names the digests of the entries; it is part of the elected content's digest.
    """
    removed: dict[str, str] = {}
    if current is not None:
        for peer, offer in offers.items():
            if offer.revision > current + 1 and offer.strategy is not SyncStrategy.RECEIVE_ONLY:
                removed[peer] = (
                    f"shared state: expected revision {current + 1} at most (the last one was {current}), found "
                    f"{offer.revision}; raise it by one before each synchronisation"
                )
    senders = {
        peer: offer
        for peer, offer in offers.items()
        if peer not in removed and offer.strategy is not SyncStrategy.RECEIVE_ONLY
    }
    if not senders:
        return Election(removed=removed, failure="nobody offers a state: every peer is RECEIVE_ONLY or was removed")
    revision = max(offer.revision for offer in senders.values())
    if current is not None and revision < current <= max(offer.revision for offer in offers.values()):
        text = f"the newest state on offer has revision {revision}, the group is at {current} already"
        return Election(removed=removed, failure=text)
    newest = {peer: offer for peer, offer in senders.items() if offer.revision == revision}
    contents = {peer: _content(offer) for peer, offer in newest.items()}
    votes = Counter(contents.values())
    most = max(votes.values())
    winner = next(offer for peer, offer in newest.items() if votes[contents[peer]] == most)
    shapes, shape = {peer: _shape(offer) for peer, offer in offers.items()}, _shape(winner)
    entries = {peer: {entry.name: entry for entry in offer.entries} for peer, offer in offers.items()}
    fetch: dict[str, tuple[Fetch, ...]] = {}
    holders = [peer for peer in newest if shapes[peer] == shape]
    donors: dict[str, list[str]] = {
        entry.name: [peer for peer in holders if entries[peer][entry.name] == entry] for entry in winner.entries
    }
    for peer, offer in offers.items():
        if peer in removed:
            continue
        if shapes[peer] != shape:
            removed[peer] = f"shared state: {_difference(winner, offer)}"
            continue
        own = entries[peer]
        lacks = tuple(
            Fetch(entry.name, entry.digest, tuple(donors[entry.name]))
            for entry in winner.entries
            if entry.digest and own[entry.name].digest != entry.digest
        )
        if lacks and offer.strategy is SyncStrategy.SEND_ONLY:
            names = ", ".join(item.name for item in lacks[:5])
            removed[peer] = f"shared state: this peer is SEND_ONLY, but another content was elected for {names}"
            continue
        fetch[peer] = lacks
    # A donor that broke a rule cannot be asked.
    fetch = {
        peer: tuple(Fetch(f.name, f.digest, tuple(d for d in f.donors if d not in removed)) for f in items)
        for peer, items in fetch.items()
    }
    return Election(revision, removed, fetch, content=content_digest(winner.entries, algorithm))


def _shape(offer: Sync) -> tuple[tuple[str, str, tuple[int, ...], bool], ...]:
    return tuple(sorted((e.name, e.dtype, e.shape, bool(e.digest)) for e in offer.entries))


def _content(offer: Sync) -> tuple[ArrayEntry, ...]:
    return tuple(sorted(offer.entries, key=lambda entry: entry.name))


def _difference(winner: Sync, offer: Sync) -> str:
    expected, found = ({e.name: _description(e) for e in entries} for entries in (winner.entries, offer.entries))
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            return f"{name!r}: expected {expected.get(name, 'no such entry')}, found {found.get(name, 'no such entry')}"
    return "two entries have one name"


def _description(entry: ArrayEntry) -> str:
    return f"{entry.dtype}{list(entry.shape)}{'' if entry.digest else ' (may differ)'}"
