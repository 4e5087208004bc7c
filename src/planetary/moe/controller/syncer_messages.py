"""Events and instructions of the syncer's machine. Tensors never pass through it, only their digests."""

from __future__ import annotations

import msgspec

from planetary.core.errors import UserError
from planetary.machine.events import Event, Instruction
from planetary.moe.methods.tiers import Tier


class SyncPolicy(msgspec.Struct, frozen=True):
    """The limits.

    Attributes:
        shards: of the experts; one composer owns each.
        fragments: how many parts each tier is merged in.
        quorum: publications that suffice to merge once the grace time has passed.
        grace_s: seconds from a fragment's first publication until a quorum is enough, and for which a lost composer's
            shard is kept for it.
        max_shards: that one composer may own; above 1 it also adopts those of lost ones.
        replicas: owners of every expert; a shard's experts are then a fragment, which its holders publish.
        return_s: for which shards are kept for their owners after the syncer was restarted: these have to notice that
            it is there again.
    """

    shards: int
    fragments: dict[Tier, int]
    quorum: int = 1
    grace_s: float = 30.0
    max_shards: int = 1
    return_s: float = 30.0
    replicas: int = 1

    def __post_init__(self) -> None:
        """Raise `UserError` for limits that cannot be."""
        counts = (self.shards, self.quorum, self.max_shards, self.replicas, *self.fragments.values())
        if min(counts) < 1 or min(self.grace_s, self.return_s) < 0:
            raise UserError(f"a syncer needs counts of at least 1 and grace times of at least 0 s, found {self}")
        if self.replicas > 1 and self.max_shards > 1:
            raise UserError(
                f"the {self.replicas} owners of an expert are different composers, so none adopts another's shard: "
                f"max_shards is 1, found {self.max_shards}"
            )

    def quorum_of(self, tier: Tier) -> int:
        """Return how many publications suffice: not more than there are owners of an expert."""
        return min(self.quorum, self.replicas) if tier is Tier.EXPERTS else self.quorum


class Joined(Event, frozen=True):
    """A composer connected, for the first time or again. `claims` is the shard it holds the state of, if any."""

    composer: str
    claims: int | None = None


class Returning(Event, frozen=True):
    """A composer is connected and not ready yet: its shards are kept for it as long as it is."""

    composer: str


class Lost(Event, frozen=True):
    """A composer's connection ended."""

    composer: str


class Publication(Event, frozen=True):
    """A composer's parameters of one fragment, trained from version `base` of it.

    Attributes:
        payload: name of the tensors in the payload store.
        tokens, steps: since it took version `base`.
    """

    composer: str
    tier: Tier
    fragment: int
    base: int
    payload: str
    tokens: int
    steps: int


class Merged(Event, frozen=True):
    """A merge that was asked for is in the payload store; `failed` says why it is not."""

    tier: Tier
    fragment: int
    version: int
    failed: str = ""


class CaughtUp(Event, frozen=True):
    """The composer of a shard has taken more steps than the shard's surrogates are from."""

    shard: int


class Grant(Instruction, frozen=True):
    """A composer owns a shard. `epoch` grows with every grant of it: updates under an older one do not count."""

    composer: str
    shard: int
    epoch: int
    why: str


class Standby(Instruction, frozen=True):
    """A composer takes part in the tiers but owns nothing for now."""

    composer: str
    why: str


class Speak(Instruction, frozen=True):
    """A shard's surrogates come from the owner of the shard `by` from now on, which holds a copy of its experts."""

    shard: int
    by: int
    why: str


class Merge(Instruction, frozen=True):
    """Merge these publications into `version`, in this order; the first of them arrived at `first_at`."""

    tier: Tier
    fragment: int
    version: int
    publications: tuple[Publication, ...]
    first_at: float
    why: str


class Announce(Instruction, frozen=True):
    """Tell a composer that a version can be pulled."""

    composer: str
    tier: Tier
    fragment: int
    version: int


class Reject(Instruction, frozen=True):
    """A publication does not count."""

    publication: Publication
    why: str


class Note(Instruction, frozen=True):
    """Something for the journal and the display."""

    what: str
    why: str
