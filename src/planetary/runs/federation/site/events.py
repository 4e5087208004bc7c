"""Events and instructions of a site's controller about the hub."""

from __future__ import annotations

from planetary.fleet.protocol.records import EndKind
from planetary.machine.events import Event, Instruction
from planetary.runs.federation.site.points import Anchor, Offered
from planetary.runs.rounds.messages import TrainTask


class VersionArrived(Event, frozen=True):
    """A version of the hub is here, with `counted` of this site's tokens in it."""

    version: int
    counted: int
    is_anchor: bool  # the site trains from this version


class HubAsks(Event, frozen=True):
    """The hub wants a contribution after `task.steps` rounds."""

    task: TrainTask


class HubAsksNoMore(Event, frozen=True):
    """The hub has no use for the answer to a task any more, or the connection is lost."""

    task: int


class VersionTaken(Event, frozen=True):
    """The parameters of the newest round are those of `AdoptVersion`."""

    anchor: Anchor


class ContributionKept(Event, frozen=True):
    """The parameters of `OfferParameters` outlast this process, and are on their way."""


class SiteFileLost(Event, frozen=True):
    """A file that has to outlast the site could not be written."""

    reason: str


class FederationEnded(Event, frozen=True):
    """The hub has nothing more to do with this site."""

    kind: EndKind  # "done": the site's run is over
    reason: str


class AdoptVersion(Instruction, frozen=True):
    """Go on from a version of the hub; answer with `VersionTaken` or `SiteFileLost`."""

    version: int
    round: int  # newest round of the site
    tokens: int  # tokens of the site in the version
    base: Anchor | Offered | None  # where the tokens begin put on top; None: there are none


class OfferParameters(Instruction, frozen=True):
    """Send the parameters of the newest round to the hub; answer with `ContributionKept` or `SiteFileLost`."""

    task: TrainTask
    offered: Offered
    rounds: int  # rounds behind the contribution
    tokens: int  # tokens of these rounds
    loss: float  # mean over them
    seconds: float


class ShowProgress(Instruction, frozen=True):
    """Tell the hub the number of finished rounds of the task."""

    task: int
    rounds: int
    loss: float
