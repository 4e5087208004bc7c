"""`planetary.Jobs`: the jobs of a gateway from Python, against a real control API on loopback."""

from __future__ import annotations

import asyncio
import doctest
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from site_support import ADMIN, Running, forget_the_kind, run, toy_kinds  # noqa: F401

import planetary
from planetary.artifacts.checkpoint import (
    list_checkpoints,
    load_checkpoint,
)
from planetary.client import jobs as client
from planetary.core.errors import ClosedError, CompileError, ConflictError, PeerError, TrustError, UserError
from saved_parameters import save_parameters
from waiting import HANG_S

pytestmark = pytest.mark.usefixtures("toy_kinds")


def ask(folder: Path, test: Callable[[planetary.Jobs, Running], Any], **options: Any) -> None:
    """Run a blocking test of a client beside the site's event loop."""

    async def whole(site: Running) -> None:
        site.join("w/0", answers=True)
        await asyncio.to_thread(test, planetary.Jobs(site.url, token=ADMIN), site)

    run(folder, whole, **options)


def toy(workers: int = 99) -> dict[str, Any]:
    """Return a job that ends when so many workers have answered."""
    return {"run": {"name": "toy"}, "fabric": {"workers": workers}}


def test_example_of_jobs_runs(tmp_path: Path) -> None:
    def test(jobs: planetary.Jobs, site: Running) -> None:
        globs = {"planetary": planetary, "url": site.url, "token": ADMIN}
        example = doctest.DocTestParser().get_doctest(planetary.Jobs.__doc__ or "", globs, "Jobs", None, 0)
        assert len(example.examples) == 6
        said: list[str] = []
        assert not doctest.DocTestRunner().run(example, out=said.append).failed, "".join(said)

    ask(tmp_path, test)


def test_job_is_submitted_awaited_and_followed(tmp_path: Path) -> None:
    def test(jobs: planetary.Jobs, site: Running) -> None:
        job = jobs.submit(toy(), overrides={"fabric.workers": 1}, priority=3)
        assert (job.job_id, job.controller, job.priority) == ("toy", "training", 3)
        ended = jobs.wait("toy", timeout=HANG_S)
        assert ended == jobs.get("toy") == jobs.list("finished")[0]
        assert jobs.list("queued") == ()
        assert jobs.status("toy").run == "toy"
        events = list(jobs.events("toy"))
        assert [one.number for one in events] == list(range(1, len(events) + 1))
        assert events[0].event == events[0].record["event"]
        assert events[0].t > 0
        assert list(jobs.events("toy", after=events[0].number)) == events[1:]
        of_site = [one.event for one in jobs.events(follow=False)]
        assert {"job_submitted", "job_started", "job_ended"} <= set(of_site)

    ask(tmp_path, test)


def test_errors_of_a_gateway_are_typed(tmp_path: Path) -> None:
    def test(jobs: planetary.Jobs, site: Running) -> None:
        jobs.submit(toy())
        with pytest.raises(TimeoutError, match=r"the job toy goes on after 0\.0 s"):
            jobs.wait("toy", timeout=0.0)
        assert jobs.cancel("toy", "enough").reason == "enough"
        with pytest.raises(ClosedError, match="the job toy was cancelled: enough"):
            jobs.wait("toy", timeout=HANG_S)
        with pytest.raises(ConflictError, match="it is cancelled") as refused:
            jobs.cancel("toy")
        assert refused.value.code == "job_over"
        for call, said in (
            (lambda: jobs.get("nothing"), "there is no job 'nothing'"),
            (lambda: jobs.list("done"), "expected one of queued"),
            (lambda: list(jobs.events("nothing")), "there is no job 'nothing'"),
            (lambda: jobs.submit({"train": {"roundz": 3}}), r"did you mean train\.rounds"),
            (lambda: jobs.submit(toy(), resume="toy"), r"give one of FILE \(in Python config\)"),
            (lambda: jobs.submit(toy(), overrides="train.rounds=3"), "overrides are a dictionary"),
            (lambda: jobs.submit(toy(), needs={"site": "paris"}), "are for a hub"),
            (lambda: jobs.download("toy", tmp_path / "copy"), "has no checkpoint; rounds with one: none"),
            (lambda: planetary.Jobs(site.url, token="x", token_file="y"), "are both given"),
        ):
            with pytest.raises(UserError, match=said):
                call()
        assert not (tmp_path / "copy").exists()
        with pytest.raises(TrustError, match="token"):
            planetary.Jobs(site.url, token="wrong").list()

    ask(tmp_path, test)


def test_wait_ends_when_the_gateway_stays_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "AWAY_S", 0.0)
    monkeypatch.setattr(client, "LOOK_S", 0.0)
    jobs = planetary.Jobs("http://127.0.0.1:1", token="x")
    with pytest.raises(PeerError, match="is a gateway running"):
        jobs.wait("toy")


def test_answer_of_another_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = planetary.Jobs("http://127.0.0.1:1", token="x")
    monkeypatch.setattr(jobs._client, "get", lambda path: {"site_id": "lab"})
    with pytest.raises(PeerError, match="use the client of the gateway's version"):
        jobs.list()


def steps(state: str) -> dict[str, Any]:
    stage = {"state": state, "step": "", "overrides": [], "by": "", "reason": "its loss is NaN"}
    return {"job_id": "a", "step": "", "steps": [], "roll_out": stage}


def job(state: str) -> dict[str, Any]:
    texts = dict.fromkeys(("controller", "kind", "folder", "by"), "x")
    times: dict[str, Any] = {"submitted_at": 1.0, "started_at": 1.0, "ended_at": None}
    return {
        "job_id": "a",
        "state": state,
        "priority": 0,
        "reason": "all rounds are done",
        "workers": [],
        **texts,
        **times,
    }


@pytest.mark.parametrize("wait", [True, False])
def test_roll_out_ends_with_its_step_or_its_job(monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    """A run that ends before the new step is verified forgets the roll-out; a refused step is an error."""
    jobs = planetary.Jobs("http://127.0.0.1:1", token="x")
    monkeypatch.setattr(client, "LOOK_S", 0.0)
    later: list[tuple[str, str]] = []
    posted: list[tuple[str, Any]] = []

    def post(path: str, body: Any) -> Any:
        posted.append((path, body))
        return steps("preparing" if later else "refused")

    def get(path: str) -> Any:
        return steps(later.pop(0)[1]) if path.endswith("/steps") else job(later[0][0])

    monkeypatch.setattr(jobs._client, "post", post)
    monkeypatch.setattr(jobs._client, "get", get)
    later[:] = [("running", "preparing"), ("running", "verified"), ("running", "in use")]
    stages: list[str] = []
    found = jobs.roll_out("a", {"train.remat": "none"}, reason="why", wait=wait, on_stage=stages.append)
    assert posted == [("/v1/jobs/a/steps", {"overrides": ['train.remat="none"'], "reason": "why"})]
    assert (found.roll_out.state, stages) == (("in use", ["preparing", "verified"]) if wait else ("preparing", []))
    if wait:
        later[:] = [("running", "verified"), ("finished", "")]
        with pytest.raises(ClosedError, match=r"a is finished \(all rounds are done\)"):
            jobs.roll_back("a", "3f9c")
        assert posted[-1] == ("/v1/jobs/a/steps/rollback", {"step": "3f9c", "reason": ""})
    later.clear()
    with pytest.raises(CompileError, match="the run a keeps its training step: its loss is NaN"):
        jobs.roll_out("a", wait=wait)


def write_results(folder: Path) -> np.ndarray:
    """Write a checkpoint of round 2 into the folder of a run, and return the value of the parameter w."""
    values = np.arange(3, dtype=np.float32)
    save_parameters(folder, {"w": values}, 2)
    return values


def test_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "site.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Jobs(" in block)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token.txt").write_text(ADMIN)
    (tmp_path / "my.toml").write_text('[run]\nname = "toy"\n[fabric]\nworkers = 1\n')

    def test(jobs: planetary.Jobs, site: Running) -> None:
        known = example.replace("http://gateway.example:18010", site.url).replace('"train.rounds": 20', '"run.seed": 1')
        lines = known.splitlines()
        (at,) = (number for number, line in enumerate(lines) if "download" in line)
        globs: dict[str, Any] = {}
        exec("\n".join(lines[:at]), globs)
        write_results(site.folder / "runs" / "toy")
        exec("\n".join(lines[at:]), globs)
        assert globs["run"].folder == tmp_path / "copies" / "first"
        assert list(globs["run"].params()) == ["w"]

    ask(tmp_path, test)


def test_downloaded_results_are_a_run(tmp_path: Path) -> None:
    """The copy of a run folder has the gateway's checkpoint, and a damaged one is refused and leaves nothing."""

    def test(jobs: planetary.Jobs, site: Running) -> None:
        jobs.submit(toy(1))
        jobs.wait("toy", timeout=HANG_S)
        kept = site.folder / "runs" / "toy" / "checkpoints"
        values = write_results(kept.parent)
        assert [one.round for one in jobs.checkpoints("toy")] == [2]
        found = jobs.download("toy", tmp_path / "copy")
        assert found.folder == tmp_path / "copy"
        assert found.params()["w"].tolist() == values.tolist()
        assert [event["event"] for event in found.events] == [one.event for one in jobs.events("toy")]
        assert found.config.run.name == "toy"
        with pytest.raises(UserError, match="it is there already"):
            jobs.download("toy", tmp_path / "copy")
        with pytest.raises(UserError, match="no checkpoint of round 9; rounds with one: 2"):
            jobs.download("toy", tmp_path / "other", round=9)
        file = list_checkpoints(kept)[0].path / "params.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
        with pytest.raises(TrustError, match="that arrived from"):
            jobs.download("toy", tmp_path / "other")
        assert [path.name for path in tmp_path.iterdir() if "other" in path.name] == []
        assert load_checkpoint(list_checkpoints(tmp_path / "copy" / "checkpoints")[0].path).info.round == 2

    ask(tmp_path, test)


def test_results_of_a_kind_that_is_not_installed_are_downloaded(tmp_path: Path) -> None:
    def test(jobs: planetary.Jobs, site: Running) -> None:
        jobs.submit(toy(1))
        jobs.wait("toy", timeout=HANG_S)
        values = write_results(site.folder / "runs" / "toy")
        forget_the_kind(site.folder / "runs" / "toy")
        found = jobs.download("toy", tmp_path / "copy")
        assert found.params()["w"].tolist() == values.tolist()
        assert [event["event"] for event in found.events] == [one.event for one in jobs.events("toy")]
        with pytest.raises(UserError, match="the kind of run 'comet' is not known here"):
            _ = found.status
        assert "the kind of run 'comet' is not known here" in repr(found)

    ask(tmp_path, test)
