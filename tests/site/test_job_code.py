"""Code of a job runs in no process that has the runs of others, and a job that ends the site is failed."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest
from site_support import Running, run, running, toy_kinds  # noqa: F401

from planetary.core.config import config_from_tables
from planetary.core.configuration.schema import Config
from planetary.core.errors import LocalProtocolError, PlanetaryError, UserError
from planetary.core.user_code import barred, load_module
from planetary.fleet.gateway.gateway import GatewayOptions
from planetary.site.config import ControllerOptions, Controllers
from planetary.site.jobs import JobBook, JobEnded, JobStarted, JobState, JobSubmitted, SiteStopped
from planetary.site.model_process import PreparationLimits, prepare_apart
from planetary.site.submission import refuse_own_code, with_data_sets

pytestmark = pytest.mark.usefixtures("toy_kinds")


def test_a_job_with_an_object_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit(3)")
    config = config_from_tables({}, [f"outer.merge={tmp_path}/own.py:Rule"])
    with pytest.raises(UserError, match="a site runs no code of jobs in its own process"):
        refuse_own_code(config)
    refuse_own_code(config_from_tables({}, ["outer.merge=median"]))
    with pytest.raises(UserError, match=r"eval\.metrics\[1\] = .*own\.py:Figure"):
        refuse_own_code(config_from_tables({}, [f"eval.metrics=['perplexity', '{tmp_path}/own.py:Figure']"]))
    with pytest.raises(UserError, match=r"data\.source = .*own\.py:Points: a site runs no code .* to \.npz or parquet"):
        refuse_own_code(config_from_tables({}, [f"data.source={tmp_path}/own.py:Points"]))
    task = "rl.task=my_task.py:Guess"
    with pytest.raises(UserError, match=r"rl\.task, without rl\.prompts = .*my_task\.py:Guess"):
        refuse_own_code(config_from_tables({}, [task]))
    refuse_own_code(config_from_tables({}, [task, "rl.prompts=some.jsonl"]))  # judged in separate processes


def test_a_sites_own_data_is_evaluated_by_name() -> None:
    sets = {"notes": "site://notes", "other": "/other.txt"}
    config = with_data_sets(config_from_tables({"eval": {"sets": sets}}), {"notes": "/notes.txt"})
    assert config.eval.sets == {"notes": "/notes.txt", "other": "/other.txt"}


MODEL = """
import os
import re
from pathlib import Path
with (Path(__file__).parent / "pids").open("a") as file:
    file.write(f"{os.getpid()}\\n")
import planetary.models.nanochat
def build(**options):
    return planetary.models.nanochat.build(**options)
"""
ENDS = {
    "os.kill(os.getpid(), 9)": "killed by SIGKILL",
    "print('last words'); sys.stdout.flush(); os._exit(7)": "exited with status 7.*its last lines: last words",
    "os.abort()": "killed by SIGABRT",
    "sys.exit(3)": r"it called exit\(3\)",
    "raise SystemError('unwell')": "SystemError: unwell",
    "bytearray(1 << 44)": "MemoryError",
    "time.sleep(999)": r"did not end within 6 s \(preparation.deadline_s",
}


def _tables(folder: Path, model: str) -> dict[str, Any]:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    (folder / "model.py").write_text(model)
    return {
        "run": {"name": "job"},
        "model": {"source": f"{folder}/model.py:build", "options": {"n_layer": 1, "n_head": 2, "n_embd": 32}},
        "data": {"source": str(folder / "text.txt")},
        "train": {"rounds": 2, "batch_size": 2, "sequence_length": 16, "inner_steps": 2},
        "eval": {"batches": 1},
    }


async def _prepare(folder: Path, config: Config, stages: list[str], limits: PreparationLimits) -> None:
    options = GatewayOptions(folder=folder / "run", cache=folder / "cache", host="", port=0, resume=False)
    await prepare_apart(config, options, limits, stages.append)


@pytest.mark.slow
@pytest.mark.parametrize("code", ENDS)
def test_death_of_model_code_is_an_error_with_its_reason(tmp_path: Path, code: str) -> None:
    limits, stages = PreparationLimits(deadline_s=6.0 if "sleep" in code else 60.0), []
    config = config_from_tables(_tables(tmp_path, f"import os, sys, time\n{code}\ndef build(**options): ...\n"))
    with pytest.raises(PlanetaryError, match=f"(?s){ENDS[code]}"):
        asyncio.run(_prepare(tmp_path, config, stages, limits))
    assert "preparing the data" in stages[:1] or len(stages) > 0


@pytest.mark.slow
def test_job_is_prepared_without_its_code_in_the_site(tmp_path: Path) -> None:
    """The run gets as far as waiting for workers, and the model's file was loaded by another process."""

    async def test(site: Running) -> None:
        answer = await site.post("/v1/jobs", {"config": _tables(tmp_path, MODEL)})
        assert answer.status_code == 202, answer.text

        async def waits() -> bool:
            status = (await site.get("/v1/jobs/job/status")).json()
            assert status["state"] != "failed", status
            return status["state"] == "waiting"

        async with asyncio.timeout(50):
            while not await waits():
                await asyncio.sleep(0.05)
        pids = (tmp_path / "pids").read_text().split()
        assert len(set(pids) - {str(os.getpid())}) == len(set(pids)) > 0

    run(tmp_path / "site", test)


@pytest.mark.slow
def test_job_whose_code_dies_fails_and_the_site_goes_on(tmp_path: Path) -> None:
    async def test(site: Running) -> None:
        await site.submit("toy-other")
        await site.post("/v1/jobs", {"config": _tables(tmp_path, "import os\nos.kill(os.getpid(), 9)\n")})
        job = await site.until_state("job", "failed")
        assert "killed by SIGKILL" in job["reason"]
        assert (await site.job("toy-other"))["state"] == "running"

    parallel = Controllers(training=ControllerOptions(enabled=True, parallel=2))
    run(tmp_path / "site", test, controllers=parallel)


def test_barred_task_loads_no_code_of_users(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("1 / 0\n")

    async def load() -> None:
        with barred("of the test"):
            await asyncio.to_thread(load_module, "planetary.models.gpt2")
            await asyncio.to_thread(load_module, str(path))

    with pytest.raises(LocalProtocolError, match="of the test"):
        asyncio.run(load())
    with pytest.raises(UserError, match="ZeroDivisionError"):
        load_module(str(path))


# --- a site that dies ----------------------------------------------------------------------------------------


def _book(*records: Any) -> JobBook:
    book = JobBook()
    submitted = JobSubmitted(job="a", controller="training", kind="toy", folder="/a", config="", priority=0)
    for record in (submitted, *records):
        book.apply(record)
    return book


def _started(progress: int) -> JobStarted:
    return JobStarted(job="a", progress=progress)


@pytest.mark.parametrize(
    ("records", "progress", "deaths"),
    [
        ([], 0, 0),
        ([_started(0)], 0, 1),
        ([_started(0), _started(0)], 0, 2),
        ([_started(0), _started(0)], 1, 0),  # a round was finished
        ([_started(0), _started(3), _started(3)], 3, 2),
        ([_started(0), SiteStopped(), _started(0)], 0, 1),  # it has died once
        ([_started(0), _started(0), SiteStopped()], 0, 0),
        ([_started(-1), _started(-1), _started(-1)], -1, 0),  # of a journal without progress
    ],
)
def test_deaths_without_progress_are_counted_in_a_row(records: list[Any], progress: int, deaths: int) -> None:
    assert _book(*records).jobs["a"].deaths_with(progress) == deaths


def test_job_that_the_site_died_with_twice_is_failed(tmp_path: Path) -> None:
    """The third start fails it, with the reason, and takes the next job."""

    async def test() -> None:
        for start in range(3):
            async with running(tmp_path) as site:
                if start == 0:
                    await site.submit("toy")
                    await site.submit("toy-next")
                if start == 2:
                    job = await site.until_state("toy", "failed")
                    assert re.search("died 2 times in a row.*--resume toy", job["reason"])
                    await site.until_state("toy-next", "running")
                await site.until_open("toy" if start < 2 else "toy-next")
                site.site.journal.append = _forgets(site.site.journal.append)  # as if it were killed

    asyncio.run(test())


def _forgets(append: Any) -> Any:
    def appended(record: Any) -> None:
        if not isinstance(record, SiteStopped | JobEnded):
            append(record)

    return appended


def test_job_of_a_site_that_is_stopped_often_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        for start in range(4):
            async with running(tmp_path) as site:
                if start == 0:
                    await site.submit("toy")
                await site.until_open("toy")
                assert site.site.book.jobs["toy"].state is JobState.RUNNING

    asyncio.run(test())
