"""The status of a hub that places jobs on sites, which is no run itself."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from planetary.fleet.protocol.status import Gauge, KindView, RunStatus

PLACED_STATES = ("waiting", "offered", "placed", "cancelling", "finished", "failed", "cancelled")
"""Of a hub's job. waiting: no site has it; offered: a site was asked; placed: a site has it; the others end it."""


_THERE = ("offered", "queued", "running", "cancelling")
"""States of a hub's job at the site, as last reported; offered: it has not answered yet."""


class PlacedJobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job of a hub that places jobs on sites."""

    job_id: str
    controller: str  # "training", "rl" or "inference"
    kind: str  # kind of run
    state: str  # one of PLACED_STATES
    site: str  # site with the job, or the newest offer of it; "": none. Over several sites: those of the parts
    why: str  # it is at that site; of a waiting job: why no site has it
    reason: str  # why it ended, is to end, or waits again
    attempt: int  # how many sites were asked, the present one included
    state_there: str  # newest reported state of the site's own job; "": not known
    name_there: str  # name of the site's own job
    strays: dict[str, str]  # sites where an earlier attempt may still run -> "recalled", or "away"
    priority: int | None  # None: as the site has it
    by: str  # name of the token it was submitted with
    submitted_at: float  # Unix time in seconds, as these
    placed_at: float | None  # start of the job's time at a site; None: none has had it
    ended_at: float | None
    whole: str = ""  # job over several sites it is a part of; "": none
    parts: tuple[str, ...] = ()  # jobs of the parts; empty: a job for one site
    progress: str = ""  # progress of the hub's own run of a job over several sites, in words


class HubSiteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A site of a hub that places jobs."""

    name: str
    connected: bool
    address: str  # address of the site; "": the site is away
    jobs: tuple[str, ...]  # jobs of the hub at the site, certain or possible
    controllers: dict[str, str]  # controllers taking jobs, each with "2 of 3 jobs"
    workers: tuple[str, ...]  # groups of workers that are alike, in words
    data_sets: tuple[str, ...]  # data sets at the site
    policy: str  # policy in words
    gb_today: float  # traffic of the site's line today


class HubStatus(RunStatus, frozen=True, kw_only=True):
    """A hub that places jobs on sites."""

    kind: str = "placement"
    hub: str  # identity of the hub, by which sites know it
    sites: tuple[HubSiteStatus, ...]
    jobs: tuple[PlacedJobStatus, ...]  # jobs in the order of submission

    def gauges(self) -> Iterator[Gauge]:
        states = [job.state for job in self.jobs]
        yield Gauge("hub_jobs", "Jobs of the hub by state.", ("state",), {(s,): states.count(s) for s in PLACED_STATES})
        there = {
            site.name: [job.state_there or "offered" for job in self.jobs if job.job_id in site.jobs]
            for site in self.sites
        }
        yield Gauge(
            "hub_site_jobs",
            "Jobs of the hub at a site by their state there.",
            ("site", "state"),
            {(name, state): found.count(state) for name, found in there.items() for state in _THERE},
        )
        yield Gauge(
            "hub_site_connected",
            "1 for a site that is connected to the hub.",
            ("site",),
            {(site.name,): float(site.connected) for site in self.sites},
        )
        yield Gauge(
            "hub_site_line_bytes",
            "Bytes that the site's line has carried today, both ways.",
            ("site",),
            {(site.name,): site.gb_today * 1e9 for site in self.sites},
        )


VIEW = KindView(name="placement", status=HubStatus)
