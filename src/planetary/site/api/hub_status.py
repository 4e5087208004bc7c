"""What a hub shows of its jobs and sites."""

from __future__ import annotations

from planetary.core.printable import one_line
from planetary.site.config import ANY_DATA, SitePolicy
from planetary.site.placement.job_hub import JobHub
from planetary.site.placement.messages import WorkerGroup
from planetary.site.placement.placed_jobs import PlacedJob, PlacementState
from planetary.site.placement.status import HubSiteStatus, HubStatus, PlacedJobStatus
from planetary.site.site import Site


def hub_run_status(site: Site) -> HubStatus:
    """Return the status the hub's page shows."""
    hub = site.hub
    assert hub is not None
    jobs = tuple(job_status(site, job) for job in hub.book.jobs.values())
    sites = tuple(site_status(hub, one) for one in hub.policies)
    waiting = sum(job.state == PlacementState.WAITING for job in jobs)
    here = sum(one.connected for one in sites)
    return HubStatus(
        run=site.options.name,
        state="waiting",
        stage=f"places jobs: {here} of {len(sites)} sites are here, jobs that wait for a site: {waiting}",
        events=tuple(hub.events),
        hub=hub.book.hub,
        sites=sites,
        jobs=jobs,
    )


def job_status(site: Site, job: PlacedJob) -> PlacedJobStatus:
    hub = site.hub
    assert hub is not None
    return PlacedJobStatus(
        job_id=job.job,
        controller=job.placeable.controller,
        kind=job.kind,
        state=job.state.value,
        site=", ".join(part.site for part in hub.book.parts_of(job) if part.site) if job.parts else job.site,
        why=hub.waits_for(job) or _without(hub, job) or job.why,
        reason=job.reason,
        attempt=job.attempts,
        state_there=hub.state_there(job),
        name_there=job.name_there,
        strays={stray.site: "recalled" if stray.recalled else "away" for stray in job.strays.values()},
        priority=job.priority,
        by=job.by,
        submitted_at=job.submitted_at,
        placed_at=job.placed_at,
        ended_at=job.ended_at,
        whole=job.whole,
        parts=job.parts,
        progress=_progress_of(site, job),
    )


def _without(hub: JobHub, job: PlacedJob) -> str:
    """Return which parts of a job have ended before it, and how; "" where it has none, or was cancelled."""
    if job.state in (PlacementState.CANCELLING, PlacementState.CANCELLED):
        return ""
    ended = (PlacementState.FAILED, PlacementState.CANCELLED)
    lost = [part for part in hub.book.parts_of(job) if part.state in ended and part.ended_at]
    early = [part for part in lost if job.ended_at is None or (part.ended_at or 0.0) < job.ended_at]
    return f"without {', '.join(f'{part.job} ({part.state.value})' for part in early)}" if early else ""


def _progress_of(site: Site, job: PlacedJob) -> str:
    """Describe the hub's own run of a job over several sites; "" where it is not there."""
    run = site.runs.get(job.job)
    if run is None or not job.parts:
        return ""
    status = run.status()
    return "; ".join(filter(None, (status.progress or status.state, status.stage)))


def site_status(hub: JobHub, policy: SitePolicy) -> HubSiteStatus:
    news, placed = hub.site(policy.name).news, hub.book.at(policy.name)
    controllers: dict[str, str] = {}
    for room in news.controllers if news is not None else ():
        busy = room.own + sum(job.placeable.controller == room.controller for job in placed)
        controllers[one_line(room.controller)] = f"{busy} of {room.parallel} jobs"
    return HubSiteStatus(
        name=policy.name,
        connected=news is not None,
        address=hub.address_of(policy.name),
        jobs=tuple(job.job for job in placed),
        controllers=controllers,
        workers=tuple(one_line(_group_in_words(group)) for group in news.workers) if news is not None else (),
        data_sets=tuple(map(one_line, news.data_sets)) if news is not None else (),
        policy=policy_in_words(policy),
        gb_today=hub.nbytes_today(policy.name) / 1e9,
    )


def _group_in_words(group: WorkerGroup) -> str:
    texts = [f"{group.number} × {group.backend}:{group.target}", f"{group.idle} idle"]
    texts += [group.device] if group.device else []
    texts += [f"{group.memory / 2**30:.1f} GiB free"] if group.memory else []
    texts += [f"only {', '.join(group.roles)}"] if group.roles else []
    return ", ".join(texts)


def policy_in_words(policy: SitePolicy) -> str:
    """Describe the jobs a site may be given."""
    texts = [f"roles {', '.join(policy.roles)}" if policy.roles else "all roles"]
    texts += [] if ANY_DATA in policy.data_sets else [f"reads {', '.join(policy.data_sets) or 'no data set'}"]
    texts += [f"{policy.gb_per_day:g} GB a day"] if policy.gb_per_day else []
    texts += [policy.trust] if policy.trust != "full" else []
    return ", ".join([*texts, f"patience {policy.patience_s:g} s"])
