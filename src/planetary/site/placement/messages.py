"""Messages on the link of a site's gateway to the hub: the site's capabilities, offers of jobs and their states.

`job` and `attempt` identify one placement: a hub counts attempts up over the life of a job, and a site runs each
attempt at most once. A repeated offer is therefore a question for the attempt's state.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from planetary.core.configuration.ranges import Priority
from planetary.fleet.protocol.messages import FABRIC
from planetary.wire.message import Message
from planetary.wire.protocol import Protocol

AttemptState = Literal["declined", "absent", "queued", "running", "cancelling", "finished", "failed", "cancelled"]
"""declined: the site does not take it; absent: it has no such attempt; the others are those of the site's job."""
ENDED: frozenset[AttemptState] = frozenset({"finished", "failed", "cancelled"})


class ControllerRoom(msgspec.Struct, frozen=True, kw_only=True):
    """A controller that takes jobs at a site."""

    controller: str
    parallel: int  # jobs that run at once
    own: int  # jobs that run or wait there, without those of the hub


class WorkerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of a site that are alike."""

    backend: str
    target: str
    device: str  # device name from the driver; "": not known yet
    roles: tuple[str, ...]  # roles allowed by the operator; empty: all
    memory: int  # bytes that were free on the machine as the process started; 0: not known
    number: int
    idle: int  # idle workers among them


class SiteNews(Message, frozen=True, kw_only=True):
    """Capabilities of a site; sent first on every connection, and whenever they have changed."""

    controllers: tuple[ControllerRoom, ...] = ()
    workers: tuple[WorkerGroup, ...] = ()
    data_sets: tuple[str, ...] = ()  # data sets by the names in jobs: site://NAME


class OfferJob(Message, frozen=True, kw_only=True):
    """The hub places a job on this site. Answered with `JobReport`; once more is fine."""

    job: str
    attempt: int
    config: str  # configuration of the run, TOML
    priority: Priority | None = None  # priority for workers; None: the site's controller's


class CancelJob(Message, frozen=True, kw_only=True):
    """End an attempt at once. Answered with `JobReport`; once more is fine."""

    job: str
    attempt: int
    reason: str


class JobReport(Message, frozen=True, kw_only=True):
    """State of an attempt at a site: the answer to an offer, and later every change."""

    job: str
    attempt: int
    state: AttemptState
    reason: str = ""  # reason of the refusal, end or cancellation
    lasting: bool = False  # declined: whether a later offer of the same job would be, too
    name: str = ""  # name of the site's own job

    @property
    def ended(self) -> bool:
        """Whether nothing of the attempt runs at the site, or will."""
        return self.state in ENDED or self.state in ("declined", "absent")


PLACEMENT_MESSAGES: tuple[type[Message], ...] = (SiteNews, OfferJob, CancelJob, JobReport)

PLACEMENT: Protocol = FABRIC.extended(*PLACEMENT_MESSAGES)
"""The protocol of a link."""
