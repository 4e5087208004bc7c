"""Records of a site of a federation, beside those of rounds, and the state they fold to."""

from __future__ import annotations

from planetary.machine.journal import Record
from planetary.runs.rounds.records import RoundsRecord
from planetary.runs.rounds.state import ControllerState


class VersionAdopted(Record, frozen=True, kw_only=True, tag="version_adopted"):
    """A site goes on from a version of the hub, plus `carried` own tokens missing in that version."""

    round: int  # round of the site whose parameters these are from now on
    version: int  # version of the hub
    carried: int
    why: str = ""  # the reason for which the site's own training was given up for it; "": it was not

    @property
    def news(self) -> str:
        carried = f", with {self.carried} tokens of this site on top" if self.carried else ""
        return f"version {self.version} of the hub adopted{carried}" + (f": {self.why}" if self.why else "")


class ContributionOffered(Record, frozen=True, kw_only=True, tag="contribution_offered"):
    """A site sent the parameters after this round to the hub, with the tokens missing in every version."""

    round: int
    version: int  # version of the hub at the start of this training
    tokens: int

    @property
    def news(self) -> str:
        return f"{self.tokens} tokens offered to the hub, trained from its version {self.version}"


class WentAlone(Record, frozen=True, kw_only=True, tag="went_alone"):
    """A site goes on without the hub until the hub answers again."""

    round: int
    why: str

    @property
    def news(self) -> str:
        return f"this site goes on alone: {self.why}"


SiteRoundsRecord = RoundsRecord | VersionAdopted | ContributionOffered | WentAlone
"""The records of a site."""


class SiteState(ControllerState):
    """Everything the journal of a site determines."""

    def _apply_own(self, record: Record) -> None:
        super()._apply_own(record)
        if isinstance(record, VersionAdopted):  # deltas from other parameters may have any other length
            self.lengths = {}
