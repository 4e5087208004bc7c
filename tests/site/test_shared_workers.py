"""Workers on real connections that runs of one site share: jobs after and beside one another, drains, and losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from site_support import Running, run, toy_kinds  # noqa: F401

from planetary.fleet.gateway.gateway import Gateway
from planetary.site.config import ControllerOptions, Controllers

pytestmark = pytest.mark.usefixtures("toy_kinds")


async def works_for(site: Running, **expected: str) -> None:
    """Wait until workers are connected and work for these jobs."""

    async def holds() -> bool:
        workers = (await site.get("/v1/workers")).json()["workers"]
        found = {one["name"]: one["job"] for one in workers if one["connected"]}
        return found == expected

    await site.until(holds)


def journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / "site.jsonl").read_text().splitlines()]


def departures(folder: Path, run: str) -> list[tuple[str, str, str]]:
    """Return the event, the kind and the worker of each departure from a run."""
    lines = [json.loads(line) for line in (folder / "runs" / run / "events.jsonl").read_text().splitlines()]
    gone = ("worker_lost", "worker_left", "worker_banned")
    return [(one["event"], one["kind"], one["worker"]) for one in lines if one["event"] in gone]


async def have_joined(site: Running, folder: Path, run: str, count: int) -> None:
    """Wait until a run's workers have joined so often."""
    path = folder / "runs" / run / "events.jsonl"

    async def holds() -> bool:
        return path.exists() and path.read_text().count('"worker_joined"') >= count

    await site.until(holds)


def test_workers_wait_for_a_job_and_go_on_with_the_next(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        for name in ("a", "b"):
            site.join(name, answers=True)
        await works_for(site, a="", b="")
        await site.submit(workers=2)
        await site.submit(workers=2)
        for name in ("toy", "toy-2"):
            assert (await site.until_state(name, "finished"))["reason"] == "all have answered"
        await works_for(site, a="", b="")

    run(tmp_path, test)
    assert [one["job"] for one in journal(tmp_path) if one["event"] == "job_ended"] == ["toy", "toy-2"]


def test_served_model_borrows_one_of_two_workers(tmp_path: Path) -> None:
    """A served model gets one of two workers and gives it back when it is over."""

    async def test(site: Running) -> None:
        for name in ("a", "b"):
            site.join(name, answers=True)
        await site.submit()
        await have_joined(site, tmp_path, "toy", 2)
        serving = await site.submit(name="toy-serve")
        assert (serving["controller"], serving["priority"]) == ("inference", 100)
        await works_for(site, a="toy-serve", b="toy")
        await site.kill("a")  # it is replaced only if it stays away
        site.join("a")
        await works_for(site, a="toy-serve", b="toy")
        await site.post("/v1/jobs/toy-serve/cancel")
        await works_for(site, a="toy", b="toy")

    run(tmp_path, test)
    moves = [
        (one["worker"], one["source"], one["target"]) for one in journal(tmp_path) if one["event"] == "worker_moved"
    ]
    assert ("a", "toy", "toy-serve") in moves
    assert all(one["why"] for one in journal(tmp_path) if one["event"] == "worker_moved" and one["target"])
    gone = departures(tmp_path, "toy")
    assert ("worker_left", "moved", "a") in gone
    assert [one for one in gone if one[0] == "worker_lost"] == []


def test_drained_worker_is_kept_from_runs_until_released(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        site.join("node/a", answers=True)
        await site.submit()
        await have_joined(site, tmp_path, "toy", 1)
        drained = await site.post("/v1/workers/node/a/drain")
        assert (drained.status_code, drained.json()["drained"]) == (202, True)
        await works_for(site, **{"node/a": ""})
        assert (await site.get("/v1/site")).json()["idle_workers"] == 1
        restart = await site.post("/v1/workers/node/a/restart")
        assert restart.status_code == 409
        await site.post("/v1/workers/node/a/release")
        await have_joined(site, tmp_path, "toy", 2)
        role = await site.client.put("/v1/workers/node/a/role", json={"controller": "inference"})
        assert role.json()["controller"] == "inference"
        await works_for(site, **{"node/a": ""})
        wrong = await site.client.put("/v1/workers/node/a/role", json={"controller": "infrence"})
        assert wrong.status_code == 400

    run(tmp_path, test)
    assert [one["event"] for one in journal(tmp_path) if one["event"] in ("worker_drained", "worker_released")] == [
        "worker_drained",
        "worker_released",
    ]
    assert departures(tmp_path, "toy") == [("worker_left", kind, "node/a") for kind in ("drained", "moved")]


def test_a_worker_whose_role_no_run_has_waits(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        site.join("a", roles=("composer",))
        site.join("b")
        await site.submit()
        await works_for(site, a="toy", b="toy")  # a toy has one role only

    run(tmp_path, test)


def test_two_jobs_of_one_controller_share_workers_evenly(tmp_path: Path) -> None:
    """Two jobs of one controller beside one another share workers evenly."""

    async def test(site: Running) -> None:
        for name in ("a", "b", "c", "d"):
            site.join(name)
        await site.submit()
        await works_for(site, a="toy", b="toy", c="toy", d="toy")
        await site.submit()

        async def shared() -> bool:
            jobs = (await site.get("/v1/jobs")).json()["jobs"]
            return [len(job["workers"]) for job in jobs] == [2, 2]

        await site.until(shared)

    run(tmp_path, test, controllers=Controllers(training=ControllerOptions(enabled=True, parallel=2)))


def test_unpreparable_job_fails_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import toy_kind

    from planetary.core.errors import UserError

    class Unprepared(toy_kind.ToySetup):
        def prepare(self, gateway: Gateway[None]) -> Any:
            if gateway.config.run.name == "toy":
                raise UserError("there is no such model")
            return super().prepare(gateway)

    monkeypatch.setattr(toy_kind, "ToySetup", Unprepared)

    async def test(site: Running) -> None:
        await site.submit()
        await site.submit()
        assert (await site.until_state("toy", "failed"))["reason"] == "there is no such model"
        await site.until_state("toy-2", "running")

    run(tmp_path, test)


def test_the_configured_job_begins_with_the_site_and_only_once(tmp_path: Path) -> None:
    import asyncio

    from site_support import running

    (tmp_path / "job.toml").write_text('[run]\nname = "toy"\n')
    training = ControllerOptions(enabled=True, config_path=str(tmp_path / "job.toml"), workers=3)

    async def whole() -> None:
        for _ in range(2):
            async with asyncio.timeout(60), running(tmp_path, Controllers(training=training)) as site:
                await site.site.begin_configured()
                job = await site.until_state("toy", "running")
                assert job["by"] == "the configuration"
                assert len((await site.get("/v1/jobs")).json()["jobs"]) == 1
        async with asyncio.timeout(60), running(tmp_path, Controllers(training=training)) as site:
            assert (await site.post("/v1/training/jobs")).json()["job_id"] == "toy-2"

    asyncio.run(whole())


def test_a_supervisor_follows_its_worker_and_restarts_it(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        site.supervise("a")
        site.join("a")
        await works_for(site, a="")
        await site.submit()
        await works_for(site, a="toy")

        async def told() -> bool:
            """Ask until the supervisor has dialled again, which a restart needs."""
            await site.post("/v1/workers/a/restart")
            return bool(site.restarts)

        await site.until(told)
        assert site.restarts[0] == ("a", "restarted by the test")
        assert ("supervisor of a", "toy") in site.joined
        await site.submit(name="toy-serve")
        await works_for(site, a="toy-serve")

        peers = site.site.workers.peers

        async def together() -> bool:
            return {peer.run for peer in peers} == {"toy-serve"} and len(peers) == 2

        await site.until(together)

    run(tmp_path, test)
