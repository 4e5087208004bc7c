"""The worker process as a candidate of a `BackendTrial`: it verifies the step, and times it in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from planetary.artifacts.store import write_atomically
from planetary.core.errors import PlanetaryError
from planetary.core.trials.step import Trial, decode_reference, draw_trial
from planetary.fleet.protocol import messages as m
from planetary.fleet.worker.role import NothingToDo, Role, Roles, Workplace
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.worker.backend_trial import POLL_S, STEPS, TURNS, Loaded, write_answer
from planetary.runs.rounds.worker.role import OpenStep, TrainingLoader
from planetary.runtime.executor import Executor, open_executor
from planetary.runtime.step_check import WARM_UP_STEPS, step_milliseconds


class _StepCandidate:
    """Makes no role of a run of rounds, but takes part in the choice of a backend. See `RoleLoader`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def blobs(self, job: m.WorkerJob) -> tuple[str, ...]:
        """The step's digest may suffice to look up the choice."""
        assert isinstance(job, rm.TrainingJob)
        if not job.reference:
            return _NothingToTry(self._folder).blobs(job)
        write_answer(self._folder / "job", Loaded(job.spec.stablehlo_digest))
        return TrainingLoader().blobs(job)

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        assert isinstance(job, rm.TrainingJob)
        try:
            step = OpenStep(job, place, open_executor)
        except PlanetaryError as error:
            write_atomically(self._folder / "failed", str(error).encode())
            raise
        reference = decode_reference(place.store.get(job.reference), job.spec)
        trial = draw_trial(job.spec, reference.values, step.buffers)
        _take_part(step.executor, trial, self._folder, place.is_ending)
        step.executor.close()
        raise NothingToDo("its backend was tried")


class _NothingToTry:
    """Tells that a job has no training step. See `RoleLoader`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def blobs(self, job: m.WorkerJob) -> tuple[str, ...]:
        write_answer(self._folder / "job", Loaded(""))
        raise NothingToDo(f"there is no step in a {type(job).__name__} that could be timed")

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        raise NothingToDo("there is no step that could be timed")


def candidate_roles(folder: Path) -> Roles:
    """Return the role loaders of a candidate, by class of job."""
    return {rm.TrainingJob: _StepCandidate(folder), m.WorkerJob: _NothingToTry(folder)}


def _take_part(executor: Executor, trial: Trial, folder: Path, stopped: Callable[[], bool]) -> None:
    """Say that the step is loaded, then time steps whenever it is this candidate's turn, until `stopped`."""
    executor.load(trial.params, trial.buffers, trial.opt_state)
    batches = [trial.train_batch] * (WARM_UP_STEPS + STEPS)
    write_answer(folder / "loaded", Loaded(executor.spec.stablehlo_digest))
    for turn in range(TURNS):
        while not (folder / f"turn-{turn}").exists():
            if stopped():
                return
            time.sleep(POLL_S / 5)
        write_answer(folder / f"times-{turn}", step_milliseconds(executor, batches))
