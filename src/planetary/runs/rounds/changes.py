"""The forms in which a new version reaches a worker: a pure choice of message and tensors.

A version is announced whole, or as a change since the version before. The gateway's `Broadcast` makes the tensors, a
worker's `Exchange` reads them; the controller chooses by this module alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from planetary.core.configuration.ranges import RELAY
from planetary.core.tensors import TensorSpec
from planetary.machine.events import Payload
from planetary.runs.rounds import messages as rm


class ParametersOf(Payload, frozen=True):
    """The global parameters of one version."""

    version: int


class ChangeOf(Payload, frozen=True):
    """The change from the version before to this one.

    Attributes:
        own: tasks whose payloads are left out of a relayed change, as the worker has them.
    """

    version: int
    own: tuple[int, ...] = ()


class Offer(msgspec.Struct, frozen=True):
    """One form of a version for one worker.

    Attributes:
        nbytes: size of the tensors; 0: not counted.
        why: the reason for this form, where there was a choice.
    """

    message: rm.Parameters
    payload: Payload
    nbytes: int = 0
    why: str = ""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The newest version as a change; this base: there is none, and it is sent whole.

    Attributes:
        whole_bytes: of whole parameters in a run whose broadcast has several forms; 0: it has one.
    """

    whole_bytes: int = 0

    def offer(self, version: int, since: int, own: Collection[int]) -> Offer:
        """Return the form for a worker with the version before.

        Args:
            version: the newest.
            since: the version before.
            own: tasks of the worker's present connection in the change.
        """
        return self.whole(version, since)

    def whole(self, version: int, since: int) -> Offer:
        """Return the form of any version for a worker that has another, `since`; -1: none."""
        return self._whole(version, "it has no parameters" if since < 0 else f"it has version {since}")

    @property
    def tasks(self) -> tuple[int, ...]:
        """Tasks whose payloads are in the change."""
        return ()

    def _whole(self, version: int, why: str) -> Offer:
        return Offer(
            rm.Parameters(version=version), ParametersOf(version), self.whole_bytes, why * bool(self.whole_bytes)
        )


WHOLE = Change()


def unchanged(compression: rm.Compression, specs: Sequence[TensorSpec]) -> Change:
    """Return the change to a version a run begins from, or goes on from."""
    return Change(whole_bytes=sum(4 * spec.size for spec in specs)) if compression.down == RELAY else WHOLE


class CodedChange(Change, frozen=True, kw_only=True):
    """A change in a codec, or the tensors of a fragment.

    Attributes:
        digest: digest of the bytes; "": it comes as tensors.
    """

    digest: str = ""

    def offer(self, version: int, since: int, own: Collection[int]) -> Offer:
        return Offer(rm.Parameters(version=version, since=since, digest=self.digest), ChangeOf(version))


class RelayedChange(Change, frozen=True, kw_only=True):
    """The payloads of the round's contributions, and the coefficients of the merge rule; see `sync.relay`.

    Attributes:
        relay: how the version is made of them.
        digest: of the version.
        payload_bytes: of one payload.
        more_bytes: of the coefficients.
    """

    relay: rm.Relay
    digest: str
    payload_bytes: int
    more_bytes: int

    @property
    def tasks(self) -> tuple[int, ...]:
        return self.relay.tasks

    def offer(self, version: int, since: int, own: Collection[int]) -> Offer:
        """Return the smaller of the relayed change and whole parameters; see `Change`."""
        kept = tuple(task for task in self.relay.tasks if task in own)
        others = len(self.relay.tasks) - len(kept)
        nbytes = others * self.payload_bytes + self.more_bytes
        if nbytes >= self.whole_bytes:
            return self._whole(version, f"{others} payloads of other workers have {nbytes} bytes")
        relay = msgspec.structs.replace(self.relay, own=kept)
        message = rm.Parameters(version=version, since=since, digest=self.digest, relay=relay)
        return Offer(message, ChangeOf(version, kept), nbytes, f"{others} payloads of other workers")
