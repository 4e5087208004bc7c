"""The choice of a site for a job: each obstacle, each rank, and their reasons."""

from __future__ import annotations

import msgspec
import pytest

from planetary.site.config import SitePolicy
from planetary.site.placement.choice import JobNeeds, PlaceableJob, SiteNow, choose_site
from planetary.site.placement.messages import ControllerRoom, SiteNews, WorkerGroup

TRAINING = PlaceableJob(controller="training", roles=("trainer",), data_sets=())


def group(number: int = 1, idle: int = 1, **more: object) -> WorkerGroup:
    fields = {"backend": "cpu", "target": "host", "device": "", "roles": (), "memory": 0, **more}
    return WorkerGroup(number=number, idle=idle, **fields)  # type: ignore[arg-type]


def site(name: str, *workers: WorkerGroup, parallel: int = 1, own: int = 0, data: tuple[str, ...] = ()) -> SiteNow:
    room = ControllerRoom(controller="training", parallel=parallel, own=own)
    news = SiteNews(controllers=(room,), workers=workers or (group(),), data_sets=data)
    return SiteNow(policy=SitePolicy(name=name), news=news)


def having(now: SiteNow, **policy: object) -> SiteNow:
    return msgspec.structs.replace(now, policy=msgspec.structs.replace(now.policy, **policy))


def needing(job: PlaceableJob = TRAINING, **needs: object) -> PlaceableJob:
    return msgspec.structs.replace(job, needs=msgspec.convert(needs, JobNeeds))


OBSTACLES = {
    "another site": (needing(site="b"), site("a"), "the job is for b", True),
    "role": (TRAINING, having(site("a"), roles=("server",)), "gives it no trainer (roles: server)", True),
    "data hidden": (
        msgspec.structs.replace(TRAINING, data_sets=("secret",)),
        having(site("a", data=("secret",)), data_sets=("notes",)),
        "does not let it read the data set secret (data_sets: notes)",
        True,
    ),
    "trust": (TRAINING, having(site("a"), trust="judged"), "judged, not trusted", True),
    "refused": (TRAINING, msgspec.structs.replace(site("a"), refused="no such file"), "no such file", True),
    "away": (TRAINING, msgspec.structs.replace(site("a"), news=None), "it is away", False),
    "stray": (TRAINING, msgspec.structs.replace(site("a"), stray=True), "an earlier attempt", False),
    "rests": (TRAINING, msgspec.structs.replace(site("a"), rests="it declined the job: busy"), "busy", False),
    "controller": (
        msgspec.structs.replace(TRAINING, controller="inference", roles=("server",)),
        site("a"),
        "its controller inference is not enabled",
        False,
    ),
    "data lacks": (
        msgspec.structs.replace(TRAINING, data_sets=("notes",)),
        site("a", data=("others",)),
        "it has no data set notes",
        False,
    ),
    "backend": (needing(backend="cuda"), site("a"), "0 cuda workers for this job, which needs 1", False),
    "memory": (needing(memory_mb=100), site("a", group(memory=99 << 20)), "0 workers with 100 MiB", False),
    "number": (needing(workers=3), site("a", group(2)), "it has 2 workers for this job, which needs 3", False),
    "allowed roles": (TRAINING, site("a", group(roles=("server",))), "it has 0 workers for this job", False),
    "budget": (
        TRAINING,
        msgspec.structs.replace(having(site("a"), gb_per_day=0.5), nbytes=500_000_000),
        "its line has carried 0.5 GB today, of 0.5",
        False,
    ),
    "room": (TRAINING, msgspec.structs.replace(site("a", parallel=2, own=1), placed=1), "has 2 jobs and runs 2", False),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_obstacle_has_its_reason_and_only_lasting_ones_end_hope(name: str) -> None:
    job, now, reason, lasting = OBSTACLES[name]
    choice = choose_site(job, [now])
    assert choice.site == ""
    assert reason in choice.obstacles["a"].reason
    assert choice.why == f"a: {choice.obstacles['a'].reason}"
    assert choice.hopeless is lasting
    assert choose_site(job, [now, site("b")]).hopeless is False


def test_the_same_sites_take_the_job_once_their_obstacle_is_gone() -> None:
    assert choose_site(needing(trust="judged"), [having(site("a"), trust="judged")]).site == "a"
    data = msgspec.structs.replace(TRAINING, data_sets=("notes",))
    assert choose_site(data, [having(site("a", data=("notes",)), data_sets=("notes",))]).site == "a"
    budget = msgspec.structs.replace(having(site("a"), gb_per_day=0.5), nbytes=499_999_999)
    assert choose_site(TRAINING, [budget]).site == "a"
    assert choose_site(needing(memory_mb=100, backend="cpu"), [site("a", group(memory=100 << 20))]).site == "a"
    assert choose_site(needing(workers=0), [site("a", group(0, 0))]).site == "a"


def test_idle_workers_come_first_then_the_fewest_jobs() -> None:
    """Idle workers come first then workers then the fewest jobs then the name."""

    def chosen(*sites: SiteNow) -> tuple[str, str]:
        found = choose_site(TRAINING, sites)
        return found.site, found.why

    busy, idle = site("a", group(9, 0)), site("b", group(1, 1))
    assert chosen(busy, idle) == ("b", "it has 1 idle workers that fit; a has 0")
    small, large = site("a", group(2, 1)), site("b", group(3, 1))
    assert chosen(small, large) == ("b", "it has 3 workers that fit; a has 2")
    used = msgspec.structs.replace(site("a", parallel=3), placed=1)
    assert chosen(used, site("b")) == ("b", "it has 0 jobs of the hub; a has 1")
    assert chosen(site("b"), site("a")) == ("a", "it is the first by name of 2 sites that are alike")
    assert chosen(site("a")) == ("a", "it is the only site that can take it now")
    assert choose_site(needing(site="b"), [site("a", group(9, 9)), site("b")]).why == "the job is for it"
