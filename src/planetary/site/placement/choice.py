"""Which site of a hub gets a job: a pure function of the job, the sites' policies and their newest reports.

A site can take a job unless one of these holds, in this order:

1. the policy forbids it (roles, data sets, trust), or the job names another site: for good,
2. it refused this job for a reason that lasts: for good,
3. it is away, or an earlier attempt of the job may still run there,
4. it has no such controller, not the data the job reads, or too few workers of the role, backend and memory,
5. the line has carried the bytes of the day,
6. the controller has as many jobs as it runs at once.

Of several sites the one with the most idle workers that fit gets it, then the one with the most workers, then with the
fewest jobs of the hub, then the first by name.

A job over several sites is divided into parts. Parts are placed together, each on a separate site: `choose_sites` finds
none before there is one for every part. Later a part is placed like any job, but not on a site that has, or had,
another part: a site's tokens in the merged model belong to one part of the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from planetary.core.configuration.ranges import Count, Index
from planetary.site.config import ANY_DATA, SitePolicy, Trust, WorkerRole
from planetary.site.placement.messages import SiteNews, WorkerGroup


class JobNeeds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requirements of a job on a site, from the submission."""

    site: str = ""  # the only one; "": any
    backend: str = ""  # backend of the workers; "": any
    workers: Index = 1  # least number of fitting workers; 0: they may come later
    memory_mb: Index = 0  # free on each worker's machine as it started, in MiB
    trust: Trust = "full"  # "judged": a site that is not trusted will do
    sites: Count = 1  # sites of a joint run, each with a part; 1: one site has the job alone


class PlaceableJob(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a job for placement."""

    controller: str
    roles: tuple[WorkerRole, ...]  # roles of the needed workers
    data_sets: tuple[str, ...]  # data sets of the site
    needs: JobNeeds = JobNeeds()


class SiteNow(msgspec.Struct, frozen=True, kw_only=True):
    """A site at one moment, as a job that is to be placed sees it."""

    policy: SitePolicy
    news: SiteNews | None  # None: it is away
    placed: int = 0  # jobs of the hub at the controller
    refused: str = ""  # why it refused this job for good
    rests: str = ""  # why it is not asked again for a while
    part: str = ""  # another part of the same job it has or had; "": none
    stray: bool = False  # an earlier attempt of this job may still run there
    nbytes: int = 0  # the line's traffic today


class Obstacle(msgspec.Struct, frozen=True):
    """Why a site cannot take a job."""

    reason: str
    lasting: bool  # the site will never take the job


class SiteChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The decision."""

    site: str  # "": none can take it now
    why: str
    obstacles: dict[str, Obstacle]  # obstacles by site

    @property
    def hopeless(self) -> bool:
        """Whether no site will ever take it."""
        return not self.site and all(one.lasting for one in self.obstacles.values())


class SitesChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The decision on a job over several sites.

    Attributes:
        sites: of the parts, in their order; empty: there are not enough.
        why: of each of them; where there are not enough, one reason.
        hopeless: whether there will never be enough.
    """

    sites: tuple[str, ...]
    why: tuple[str, ...]
    hopeless: bool = False


def choose_site(job: PlaceableJob, sites: Sequence[SiteNow]) -> SiteChoice:
    """Return the site that gets a job, with the reason, and the obstacles of the others."""
    obstacles: dict[str, Obstacle] = {}
    able: list[SiteNow] = []
    for site in sites:
        found = obstacle_of(job, site)
        if found is None:
            able.append(site)
        else:
            obstacles[site.policy.name] = found
    if not able:
        reasons = "; ".join(f"{name}: {one.reason}" for name, one in obstacles.items())
        return SiteChoice(site="", why=reasons or "the hub has no sites", obstacles=obstacles)
    best = min(able, key=lambda site: _rank(job, site))
    return SiteChoice(site=best.policy.name, why=_why(job, best, able), obstacles=obstacles)


def obstacle_of(job: PlaceableJob, site: SiteNow) -> Obstacle | None:
    """Return why a site cannot take a job; None: it can."""
    if lasting := policy_obstacle(job, site.policy) or site.refused or _other_part(site):
        return Obstacle(lasting, lasting=True)
    return next((Obstacle(reason, lasting=False) for reason in _present_obstacles(job, site)), None)


def choose_sites(parts: Sequence[PlaceableJob], sites: Sequence[SiteNow]) -> SitesChoice:
    """Return the sites that get the parts of a job, in the order of the parts, each with the reason."""
    left, chosen, obstacles = list(sites), list[SiteChoice](), dict[str, Obstacle]()
    for part in parts:
        choice = choose_site(part, left)
        passing = {name for name, one in obstacles.items() if not one.lasting}  # to a part named for the site
        obstacles |= {name: one for name, one in choice.obstacles.items() if name not in passing}
        if choice.site:
            chosen.append(choice)
            left = [site for site in left if site.policy.name != choice.site]
    if len(chosen) == len(parts):
        return SitesChoice(sites=tuple(one.site for one in chosen), why=tuple(one.why for one in chosen))
    # A site of the chosen ones is no obstacle, though it could not take the part it was named for.
    names = {one.site for one in chosen}
    blocked = {name: one for name, one in obstacles.items() if name not in names}
    possible = sum(not one.lasting for one in blocked.values()) + len(chosen)
    reasons = "; ".join(f"{name}: {one.reason}" for name, one in blocked.items()) or "the hub has no more sites"
    return SitesChoice(
        sites=(),
        why=(f"{len(chosen)} of {len(parts)} sites can take a part now; {reasons}",),
        hopeless=possible < len(parts),
    )


def _other_part(site: SiteNow) -> str:
    return f"it has, or had, another part of this job ({site.part})" if site.part else ""


def policy_obstacle(job: PlaceableJob, policy: SitePolicy) -> str:
    """Return why a site's policy forbids a job; "": it does not."""
    needs = job.needs
    if needs.site not in ("", policy.name):
        return f"the job is for {needs.site}"
    if policy.roles and (lacking := [role for role in job.roles if role not in policy.roles]):
        return f"its policy gives it no {' and no '.join(lacking)} (roles: {', '.join(policy.roles)})"
    if ANY_DATA not in policy.data_sets and (hidden := [s for s in job.data_sets if s not in policy.data_sets]):
        allowed = ", ".join(policy.data_sets) or "none"
        return f"its policy does not let it read the data set {', '.join(hidden)} (data_sets: {allowed})"
    if policy.trust == "judged" and needs.trust == "full":
        return "it is judged, not trusted, and nothing judges a job that it has alone (needs.trust)"
    return ""


def _present_obstacles(job: PlaceableJob, site: SiteNow) -> Iterator[str]:
    needs, news = job.needs, site.news
    if news is None:
        yield "it is away"
        return
    if site.stray:
        yield "it has not ended an earlier attempt of this job yet"
    if site.rests:
        yield site.rests
    room = next((one for one in news.controllers if one.controller == job.controller), None)
    if room is None:
        yield f"its controller {job.controller} is not enabled"
        return
    if lacking := [name for name in job.data_sets if name not in news.data_sets]:
        yield f"it has no data set {', '.join(lacking)}"
    if (number := _workers(job, site)) < needs.workers:
        wanted = f"{needs.backend} " if needs.backend else ""
        memory = f" with {needs.memory_mb} MiB" if needs.memory_mb else ""
        yield f"it has {number} {wanted}workers{memory} for this job, which needs {needs.workers}"
    budget = site.policy.gb_per_day * 1e9
    if 0 < budget <= site.nbytes:
        yield f"its line has carried {site.nbytes / 1e9:.3g} GB today, of {site.policy.gb_per_day:g} (gb_per_day)"
    if (busy := room.own + site.placed) >= room.parallel:
        yield f"its controller {job.controller} has {busy} jobs and runs {room.parallel} at once"


def _fitting(job: PlaceableJob, site: SiteNow) -> list[WorkerGroup]:
    needs = job.needs
    return [
        group
        for group in (site.news.workers if site.news is not None else ())
        if needs.backend in ("", group.backend)
        and group.memory >= needs.memory_mb << 20
        and (not group.roles or not job.roles or set(group.roles) & set(job.roles))
    ]


def _workers(job: PlaceableJob, site: SiteNow) -> int:
    return sum(group.number for group in _fitting(job, site))


def _idle(job: PlaceableJob, site: SiteNow) -> int:
    return sum(group.idle for group in _fitting(job, site))


def _rank(job: PlaceableJob, site: SiteNow) -> tuple[int, int, int, str]:
    return -_idle(job, site), -_workers(job, site), site.placed, site.policy.name


def _why(job: PlaceableJob, best: SiteNow, able: Sequence[SiteNow]) -> str:
    """Return the first measure in which the best site differs from the next one, in words."""
    if len(able) == 1:
        return "the job is for it" if job.needs.site else "it is the only site that can take it now"
    second = min((site for site in able if site is not best), key=lambda site: _rank(job, site))
    others = f"{second.policy.name} has"
    if (idle := _idle(job, best)) != (less := _idle(job, second)):
        return f"it has {idle} idle workers that fit; {others} {less}"
    if (number := _workers(job, best)) != (less := _workers(job, second)):
        return f"it has {number} workers that fit; {others} {less}"
    if best.placed != second.placed:
        return f"it has {best.placed} jobs of the hub; {others} {second.placed}"
    return f"it is the first by name of {len(able)} sites that are alike"
