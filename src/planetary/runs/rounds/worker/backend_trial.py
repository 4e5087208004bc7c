"""How a machine finds the fastest backend: one process per candidate joins the run, checks the step, and takes times.

A candidate is a worker process that never becomes ready: it fetches the job like any worker, verifies the step on the
device and then, when every candidate is there and nothing compiles any more, runs a few steps in turn. Parent and
candidates (`backend_candidate`) speak through files in a folder, each written in one piece.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from planetary.artifacts.store import BlobStore, write_atomically
from planetary.core import decoding
from planetary.core.errors import PlanetaryError, TrustError
from planetary.core.exit_status import describe_exit
from planetary.fleet.shell.child import Child
from planetary.runtime.backends import runtime_identity
from planetary.runtime.host import host_features

FASTER = 0.05
"""Another backend than the first one is taken only if the step is shorter by this part: less is noise."""


class BackendChoice(msgspec.Struct, frozen=True):
    """A backend and the reason, for people."""

    backend: str
    why: str  # e.g. "cpu 92 ms, pjrt:cpu 164 ms a step: taking cpu"


def choose_backend(
    candidates: Sequence[str], times: Mapping[str, Sequence[float]], failures: Mapping[str, str]
) -> BackendChoice:
    """Return the backend with the shortest step; the first candidate that works, unless another is 5 % faster.

    Args:
        candidates: in order of preference.
        times: milliseconds of single steps, by backend; the shortest counts, since other load only adds.
        failures: why a backend has no times.
    """
    least = {backend: min(times[backend]) for backend in candidates if times.get(backend)}
    if not least:
        why = "; ".join(f"{backend}: {failures[backend]}" for backend in candidates if backend in failures)
        return BackendChoice(candidates[0], f"no backend could be measured ({why}): taking {candidates[0]}")
    first = next(backend for backend in candidates if backend in least)
    fastest = min(least, key=lambda backend: least[backend])
    chosen = fastest if least[fastest] < (1 - FASTER) * least[first] else first
    said = ", ".join(f"{backend} {_milliseconds(least[backend])}" for backend in candidates if backend in least)
    missing = "".join(f"; {b}: {failures[b]}" for b in candidates if b in failures and b not in least)
    return BackendChoice(chosen, f"{said} a step: taking {chosen}{missing}")


def _milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


log = logging.getLogger(__name__)

TURNS = 2
STEPS = 4  # counted steps of a turn, after a first one
PATIENCE_S = 20.0  # how much longer than the first candidate the others may take to load the step
TIME_LIMIT_S = 3600.0  # limit of the first trial: as long as a compilation may take
POLL_S = 0.05


class Loaded(msgspec.Struct, frozen=True):
    """A candidate's answer, after receiving the job."""

    step: str  # digest of the training step; "": the run has none that could be measured


def write_answer(path: Path, value: object) -> None:
    """Leave a candidate's answer, in one piece."""
    write_atomically(path, msgspec.json.encode(value))


class BackendTrial:
    """Tries the candidates of one machine. Use it once."""

    def __init__(
        self,
        candidates: Sequence[str],
        command: Callable[[str, Path], Sequence[str]],
        *,
        store: BlobStore,
        threads: int,
        log_folder: Path | None,
    ) -> None:
        """Prepare.

        Args:
            candidates: backends, in order of preference.
            command: gives the command line of a candidate's process, from backend and folder.
            store: remembers choices.
            threads: of each worker.
            log_folder: for the candidates' output; None: this process's own.
        """
        self._candidates, self._command, self._store = candidates, command, store
        self._threads, self._logs = threads, log_folder
        self._children: dict[str, Child] = {}
        self._ended: dict[str, asyncio.Future[int]] = {}
        self._folders: dict[str, Path] = {}
        self._failures: dict[str, str] = {}

    async def choose(self) -> BackendChoice:
        """Return the known choice for the run's step on this machine, or measure."""
        if len(self._candidates) == 1:
            return BackendChoice(self._candidates[0], f"{self._candidates[0]} is the only backend installed")
        with tempfile.TemporaryDirectory(prefix="planetary-backends-") as name:
            try:
                return await self._choose(Path(name))
            finally:
                await self._end()

    async def _choose(self, folder: Path) -> BackendChoice:
        # The last choice most likely holds again, and then no other candidate need be started.
        last = self._known("")
        if last is not None:
            await self._start(last.backend, folder)
            known = await self._known_for_job()
            if known is not None:
                return known
        for backend in self._candidates:
            if backend not in self._children:
                await self._start(backend, folder)
        known = await self._known_for_job()
        if known is not None:
            return known
        steps, complete = await self._loaded()
        times: dict[str, list[float]] = {backend: [] for backend in steps}
        for turn in range(TURNS):
            for backend in steps:
                times[backend] += await self._turn(backend, turn)
        choice = choose_backend(self._candidates, times, self._failures)
        if complete and any(times.values()):
            self._keep(next(iter(steps.values())), choice)
        return choice

    async def _start(self, backend: str, folder: Path) -> None:
        own = self._folders[backend] = folder / backend.replace(":", "-")
        own.mkdir()
        logged = None if self._logs is None else self._logs / f"trying-{own.name}.log"
        child = await Child.start(self._command(backend, own), log=logged)
        self._children[backend] = child
        self._ended[backend] = asyncio.ensure_future(child.wait())

    async def _known_for_job(self) -> BackendChoice | None:
        """Wait for the first job; return the remembered choice for the step."""
        job = await self._first("job", TIME_LIMIT_S)
        if job is None:
            return None
        if not job.step:
            return BackendChoice(self._candidates[0], f"nothing to measure in this run: taking {self._candidates[0]}")
        return self._known(job.step)

    async def _first(self, name: str, within_s: float) -> Loaded | None:
        deadline = time.monotonic() + within_s
        alive = self._alive()
        while time.monotonic() < deadline and alive:
            alive = self._alive()  # before looking: an ended candidate has left an answer
            for backend in self._children:
                path = self._folders[backend] / name
                if path.exists():
                    return decoding.from_json(path.read_bytes(), Loaded)
            await asyncio.sleep(POLL_S)
        return None

    async def _loaded(self) -> tuple[dict[str, str], bool]:
        """Wait until the candidates have loaded the step; return it by backend, and whether none was left out."""
        await self._first("loaded", TIME_LIMIT_S)
        deadline = time.monotonic() + PATIENCE_S
        steps: dict[str, str] = {}
        while waiting := [backend for backend in self._alive() if backend not in steps]:
            for backend in waiting:
                path = self._folders[backend] / "loaded"
                if path.exists():
                    steps[backend] = decoding.from_json(path.read_bytes(), Loaded).step
            if time.monotonic() > deadline:
                for backend in (b for b in waiting if b not in steps):
                    self._failures[backend] = f"not ready {PATIENCE_S:.0f} s after the others; tried again next time"
                return steps, False
            await asyncio.sleep(POLL_S)
        return steps, True

    async def _turn(self, backend: str, turn: int) -> list[float]:
        own = self._folders[backend]
        (own / f"turn-{turn}").touch()
        deadline = time.monotonic() + TIME_LIMIT_S / 10
        while backend in self._alive():
            if (own / f"times-{turn}").exists():
                return decoding.from_json((own / f"times-{turn}").read_bytes(), list[float])
            if time.monotonic() > deadline:
                self._failures[backend] = f"{STEPS} steps did not end within {TIME_LIMIT_S / 10:.0f} s"
                self._children[backend].kill()
            await asyncio.sleep(POLL_S / 5)
        return []

    def _alive(self) -> list[str]:
        for backend, ended in self._ended.items():
            if ended.done():
                said = self._folders[backend] / "failed"
                why = said.read_text() if said.exists() else describe_exit(ended.result())
                self._failures.setdefault(backend, why)
        return [backend for backend in self._children if not self._ended[backend].done()]

    async def _end(self) -> None:
        await asyncio.gather(*(child.end(1.0) for child in self._children.values()))

    # --- remembered choices -----------------------------------------------------------------------------------------

    def _key(self, step: str) -> str:
        versions = " ".join(f"{backend} {runtime_identity(backend)}" for backend in self._candidates)
        return f"backend choice 1 {step or 'last'} {host_features()} threads {self._threads} of {versions}"

    def _known(self, step: str) -> BackendChoice | None:
        digest = self._store.resolve(self._key(step))
        if digest is None:
            return None
        try:
            return decoding.from_json(self._store.get(digest), BackendChoice)
        except (TrustError, msgspec.MsgspecError):
            return None

    def _keep(self, step: str, choice: BackendChoice) -> None:
        try:
            digest = self._store.put(msgspec.json.encode(choice))
            for key in (step, ""):
                self._store.link(self._key(key), digest)
        except PlanetaryError as error:
            log.warning("%s", error)
