"""`planetary.Jobs`: the jobs of a site or of a hub, from Python; `planetary jobs` is made of it."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import tomllib
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from planetary.artifacts.checkpoint import checkpoint_name, verify_checkpoint
from planetary.client.connection import client_of
from planetary.core import decoding
from planetary.core.errors import ClosedError, CompileError, PeerError, PlanetaryError, TrustError, UserError
from planetary.fleet.protocol.status import RunStatus
from planetary.run.status_source import status_in
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.site.api.views import CheckpointView, JobView, SiteView, StepHistory
from planetary.site.placement.status import PlacedJobStatus
from planetary.version import __version__

if TYPE_CHECKING:
    from planetary.run.choice import ConfigSource
    from planetary.run.handle import Run

JobStatus = JobView | PlacedJobStatus
"""A job of a site, or of a hub that places jobs on sites."""
Controller = Literal["training", "rl", "inference"]

ENDS = ("finished", "failed", "cancelled")
LOOK_S = 0.5  # pause between two looks at a job
AWAY_S = 60.0  # time that a gateway may be out of reach during a wait for a job: a restart takes some seconds
ROLL_OUT_S = 3600.0  # time limit of a roll-out: an export, a compilation, the rest of a round
SETTLED = ("in use", "refused")  # states of a roll-out that is over
_PLACED = "/v1/federation"

T = TypeVar("T")


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a journal."""

    number: int  # place in the stream, from 1; `Jobs.events(after=number)` begins behind it
    event: str  # name, as `round_finished`
    t: float  # Unix time in seconds
    record: dict[str, Any]  # the whole line of the journal, without secrets


class Jobs:
    """The jobs of a gateway with controllers (a site), or of a hub that places jobs on sites.

    Every method asks the gateway, and raises `PeerError` without an answer, `TrustError` where the token does not
    allow it, `ConflictError` where the state of things does not, and `UserError` for a wrong argument or a job that is
    not there.

    Attributes:
        url: of the gateway's page.

    Example:
        >>> jobs = planetary.Jobs(url, token=token)
        >>> job = jobs.submit({"run": {"name": "first"}}, overrides={"fabric.workers": 2})
        >>> job.job_id, job.controller, [one.job_id for one in jobs.list()]
        ('first', 'training', ['first'])
        >>> jobs.cancel("first", "another idea").state in ("cancelling", "cancelled")
        True
        >>> from planetary.core.errors import ClosedError
        >>> try:
        ...     jobs.wait("first", timeout=60)
        ... except ClosedError as error:
        ...     print(error)
        the job first was cancelled: another idea
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str = "",
        token_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Ask the gateway at `url`; nothing is sent yet.

        Args:
            url: of its page; by default this machine's, http://127.0.0.1:18010.
            token: with which the gateway lets in, as `planetary token` printed it (over HTTPS: TOKEN@FINGERPRINT).
            token_file: with the token. By default it is in $PLANETARY_API_TOKEN, or in the state folder of this user's
                gateway on this machine.
        """
        if token and token_file is not None:
            raise UserError("Jobs: token and token_file are both given: leave one of them out")
        self._client = client_of(url, None if token_file is None else Path(token_file), token)
        self.url = self._client.url

    def __repr__(self) -> str:
        return f"Jobs({self.url!r})"

    @cached_property
    def site(self) -> SiteView:
        """The gateway, asked once: name, version, which controllers take jobs, and whether it is a hub."""
        return self._get("/v1/site", SiteView)

    # --- jobs -------------------------------------------------------------------------------------------------

    def submit(
        self,
        config: ConfigSource | None = None,
        *,
        overrides: Mapping[str, Any] | Sequence[str] = (),
        name: str = "",
        priority: int | None = None,
        send_files: bool = False,
        resume: str = "",
        controller: Controller | None = None,
        needs: Mapping[str, Any] | None = None,
    ) -> JobStatus:
        """Submit a job, and return it at once.

        Args:
            config: as of `planetary.train`. Paths in it are the gateway's.
            overrides: of keys: `{"train.rounds": 3}`, or `["train.rounds=3"]`.
            name: of the job and the run's folder; by default `run.name`, with a number where that is taken.
            priority: claim to workers, -1000 to 1000; by default the controller's.
            send_files: send the files of `model.source`, `model.weights`, `data.source` and `data.tokenizer` that are
                on this machine along.
            resume: in place of `config`, a run in the gateway's folder that goes on.
            controller: in place of `config`, the controller, by name; its own `config_path` is submitted.
            needs: of a hub only: `{"site": "paris", "backend": "cuda", "workers": 2, "memory_mb": 8000, "sites": 3}`.
        """
        if sum((config is not None, bool(resume), controller is not None)) != 1:
            raise UserError(
                "jobs submit: give one of FILE (in Python config), --resume RUN (resume) and --controller NAME "
                "(controller)"
            )
        settings = _settings(overrides)
        body: dict[str, Any] = {"name": name}
        if priority is not None:
            body["priority"] = priority
        if config is not None:
            from planetary.core.configuration.toml import to_toml
            from planetary.run.choice import read_config

            # Relative paths become absolute: of this machine, which the gateway has to have as well.
            body["config"] = tomllib.loads(to_toml(read_config(config, settings)))
        else:
            body |= {"overrides": settings, "resume": resume}
        if self.site.places_jobs:
            if config is None or send_files:
                raise UserError(
                    "jobs submit: a hub takes a FILE (in Python config), whose paths are those of the site that gets "
                    "the job (site://NAME is its data set of that name); --resume, --controller and --send-files are "
                    "for the gateway of a site"
                )
            return self._post(f"{_PLACED}/jobs", {**body, "needs": dict(needs or {})}, PlacedJobStatus)
        if needs:
            raise UserError("jobs submit: --needs and --sites are for a hub; this gateway has workers of its own")
        if send_files:
            body["files"] = self._send_files(body.get("config", {}))
        return self._post(f"/v1/{controller}/jobs" if controller else "/v1/jobs", body, JobView)

    def list(self, state: str = "") -> tuple[JobStatus, ...]:
        """Return the jobs in the order of submission, by default of every state."""
        query = f"?{urllib.parse.urlencode({'state': state})}" if state else ""
        return self._entries(f"{self._jobs}{query}", "jobs", self._kind)

    def get(self, job: str) -> JobStatus:
        """Return a job."""
        return self._get(f"{self._jobs}/{_quoted(job)}", self._kind)

    def cancel(self, job: str, reason: str = "") -> JobStatus:
        """End a job at once, also in the middle of a round, and return it; checkpoints stay."""
        return self._post(f"{self._jobs}/{_quoted(job)}/cancel", {"reason": reason}, self._kind)

    def wait(self, job: str, timeout: float | None = None) -> JobStatus:
        """Wait until a job has finished, and return it. A gateway that is started again meanwhile goes on with it.

        Raises:
            PlanetaryError: the job failed; the text has the gateway's reason.
            ClosedError: it was cancelled.
            PeerError: the gateway was out of reach for a minute.
            TimeoutError: the job goes on after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        answered = time.monotonic()
        while True:
            try:
                found = self.get(job)
                answered = time.monotonic()
            except PeerError:
                found = None
                if time.monotonic() > answered + AWAY_S:
                    raise
            if found is not None and found.state in ENDS:
                return _finished(found)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the job {job} goes on after {timeout} s")
            time.sleep(LOOK_S)

    # --- the run of a job -------------------------------------------------------------------------------------

    def status(self, job: str) -> RunStatus:
        """Return the status of a job's run: state, round, losses, workers."""
        return status_in(self._get(f"/v1/jobs/{_quoted(job)}/status", dict[str, Any]), self.url)

    def metrics(self, job: str) -> tuple[RoundMetrics, ...]:
        """Return the metrics of every finished round of a job's run."""
        return self._get(f"/v1/jobs/{_quoted(job)}/metrics", tuple[RoundMetrics, ...])

    def events(self, job: str = "", *, after: int = 0, follow: bool = True) -> Iterator[JobEvent]:
        """Yield the events of a job's run, or of the site (or hub) itself.

        Args:
            job: its run is followed; "": jobs and workers of the gateway.
            after: number of the last event that is known already.
            follow: go on until the job has ended, or the gateway ends. False: end after the present events.
        """
        query = urllib.parse.urlencode({"after": after, "follow": "true" if follow else "false"})
        place = f"/v1/jobs/{_quoted(job)}" if job else _PLACED if self.site.places_jobs else "/v1"
        fields: dict[bytes, bytes] = {}
        for line in self._client.lines(f"{place}/events?{query}"):
            name, colon, value = line.rstrip(b"\r\n").partition(b": ")
            if colon:
                fields[name] = value
                continue
            if b"data" in fields:
                yield _event(fields)
            fields = {}

    def checkpoints(self, job: str) -> tuple[CheckpointView, ...]:
        """Return the checkpoints of a job's run, oldest first."""
        return self._entries(f"/v1/jobs/{_quoted(job)}/checkpoints", "checkpoints", CheckpointView)

    def download(self, job: str, folder: str | os.PathLike[str], *, round: int | None = None) -> Run:
        """Copy the results of a job's run into a new folder, and return them as a run: `jobs.download(…).params()`.

        The copy has the configuration without secrets, the journal, the metrics, and one checkpoint; its digests are
        checked. A tokenizer that the run made from its data, and files of code, stay with the gateway.

        Args:
            job: that has a checkpoint.
            folder: of the copy; it must not be there yet.
            round: of the checkpoint; by default the newest.

        Raises:
            UserError: `folder` is there, or there is no such checkpoint; those there are are named.
            TrustError: the checkpoint that arrived is damaged.
        """
        from planetary.fleet.gateway.run_files import CHECKPOINTS, CONFIG, CONFIG_END, EVENTS, METRICS
        from planetary.run.handle import Run

        place, path = Path(folder).absolute(), f"/v1/jobs/{_quoted(job)}"
        if place.exists():
            raise UserError(f"cannot copy the job {job} into {place}: it is there already; name another folder")
        entries = self.checkpoints(job)
        chosen = next((one for one in reversed(entries) if round in (None, one.round)), None)
        if chosen is None:
            kept = ", ".join(str(one.round) for one in entries) or "none"
            what = "checkpoint" if round is None else f"checkpoint of round {round}"
            raise UserError(f"the job {job} has no {what}; rounds with one: {kept}")
        place.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
        try:
            kept_in = aside / CHECKPOINTS / checkpoint_name(chosen.round)
            kept_in.mkdir(parents=True)
            for file in chosen.files:
                with (kept_in / Path(file.name).name).open("wb") as data:
                    self._client.download(f"{path}/checkpoints/{chosen.round}/{_quoted(file.name)}", data)
            if defect := verify_checkpoint(kept_in):
                raise TrustError(f"the checkpoint of {job} that arrived from {self.url} cannot be used: {defect}")
            (aside / CONFIG).write_bytes(self._client.text(f"{path}/config").encode() + CONFIG_END)
            _write_lines(aside / METRICS, self.metrics(job))
            _write_lines(aside / EVENTS, (one.record for one in self.events(job, follow=False)))
            aside.rename(place)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        return Run.open(place)

    # --- training steps ---------------------------------------------------------------------------------------

    def steps(self, job: str) -> StepHistory:
        """Return the training steps that a job's run has had, and the one that is being rolled out."""
        return self._get(f"/v1/jobs/{_quoted(job)}/steps", StepHistory)

    def roll_out(
        self,
        job: str,
        overrides: Mapping[str, Any] | Sequence[str] = (),
        *,
        reason: str = "",
        wait: bool = True,
        on_stage: Callable[[str], object] | None = None,
    ) -> StepHistory:
        """Replace the training step of a job's run at the end of a round, once the new step is verified.

        Args:
            job: that runs.
            overrides: of keys of the step, `{"optimizer.weight_decay": 0.05}`; none: the model's files as they are now.
            reason: for the journal.
            wait: return when the step is in use.
            on_stage: called with each state of the roll-out while waiting: "preparing", "verified".

        Raises:
            CompileError: the step is refused, and the run keeps the present step.
            ClosedError: the job ended before.
        """
        body = {"overrides": _settings(overrides), "reason": reason}
        asked = self._post(f"/v1/jobs/{_quoted(job)}/steps", body, StepHistory)
        return self._replaced(job, asked, on_stage) if wait else _accepted(job, asked)

    def roll_back(
        self,
        job: str,
        step: str = "",
        *,
        reason: str = "",
        wait: bool = True,
        on_stage: Callable[[str], object] | None = None,
    ) -> StepHistory:
        """Use an earlier training step of a job's run again; arguments and errors are those of `roll_out`.

        Args:
            job: that runs.
            step: digest, or its beginning; by default of the step before.
            reason: for the journal.
            wait: return when the step is in use.
            on_stage: called with each state of the roll-out while waiting.
        """
        body = {"step": step, "reason": reason}
        asked = self._post(f"/v1/jobs/{_quoted(job)}/steps/rollback", body, StepHistory)
        return self._replaced(job, asked, on_stage) if wait else _accepted(job, asked)

    def _replaced(self, job: str, answer: StepHistory, on_stage: Callable[[str], object] | None) -> StepHistory:
        deadline, shown = time.monotonic() + ROLL_OUT_S, ""
        while answer.roll_out.state not in SETTLED:
            if answer.roll_out.state != shown and on_stage is not None:
                on_stage(answer.roll_out.state)
            shown = answer.roll_out.state
            if time.monotonic() > deadline:
                raise PeerError(
                    f"the step of {job} is not in use after {ROLL_OUT_S:g} s; planetary jobs steps shows it"
                )
            time.sleep(LOOK_S)
            now, answer = self._get(f"/v1/jobs/{_quoted(job)}", JobView), self.steps(job)
            if now.state in ENDS and answer.roll_out.state not in SETTLED:
                raise ClosedError(
                    f"the job {job} is {now.state} ({now.reason or 'no reason is known'}), and its run ended before "
                    "the new step was in use"
                )
        return _accepted(job, answer)

    # --- requests ---------------------------------------------------------------------------------------------

    @property
    def _jobs(self) -> str:
        return f"{_PLACED}/jobs" if self.site.places_jobs else "/v1/jobs"

    @property
    def _kind(self) -> Any:
        return PlacedJobStatus if self.site.places_jobs else JobView

    def _get(self, path: str, kind: type[T]) -> T:
        return self._read(self._client.get(path), kind)

    def _post(self, path: str, body: object, kind: type[T]) -> T:
        return self._read(self._client.post(path, body), kind)

    def _entries(self, path: str, key: str, kind: type[T]) -> tuple[T, ...]:
        answer = self._get(path, dict[str, Any])
        return tuple(self._read(one, kind) for one in self._read(answer.get(key), tuple[Any, ...]))

    def _read(self, answer: Any, kind: type[T]) -> T:
        try:
            return decoding.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise PeerError(
                f"{self.url} answered with something else than a gateway of planetary {__version__} does ({error}): "
                "use the client of the gateway's version (planetary status shows it)"
            ) from None

    def _send_files(self, tables: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """Send the files a configuration names; return them by key. Raises `UserError` for a folder."""
        from planetary.core.configuration.schema import FILE_KEYS

        sent: dict[str, dict[str, str]] = {}
        for key in FILE_KEYS:
            section, _, field = key.partition(".")
            value = str(tables.get(section, {}).get(field, ""))
            place, _, function = value.rpartition(":")
            path = Path(place if place.endswith(".py") and function else value)
            if not value or not path.is_absolute():
                continue  # a module, a URL, or built in
            if not path.is_file():
                raise UserError(
                    f"--send-files: {key} = {value}: expected one file of this machine; a folder is not sent"
                )
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            self._client.put(f"/v1/files/{digest}/{_quoted(path.name)}", path)
            sent[key] = {"digest": digest, "name": path.name}
        return sent


def _settings(overrides: Mapping[str, Any] | Sequence[str]) -> Sequence[str]:
    if isinstance(overrides, Mapping):
        from planetary.run.choice import settings

        return settings(overrides)
    if isinstance(overrides, str):
        raise UserError(f'overrides are a dictionary such as {{"train.rounds": 3}}, or a list; found {overrides!r}')
    return [*overrides]


def _finished(job: JobStatus) -> JobStatus:
    if job.state == "finished":
        return job
    error, what = (ClosedError, "was cancelled") if job.state == "cancelled" else (PlanetaryError, "failed")
    raise error(f"the job {job.job_id} {what}: {job.reason or 'the gateway knows no reason'}")


def _accepted(job: str, steps: StepHistory) -> StepHistory:
    if steps.roll_out.state == "refused":
        raise CompileError(f"the run {job} keeps its training step: {steps.roll_out.reason}")
    return steps


def _event(fields: Mapping[bytes, bytes]) -> JobEvent:
    record = msgspec.json.decode(fields[b"data"])
    if b"id" not in fields:
        raise PeerError(f"the gateway cannot read the journal: {record.get('message', record)}")
    return JobEvent(number=int(fields[b"id"]), event=record.get("event", ""), t=record.get("t", 0.0), record=record)


def _write_lines(path: Path, records: Any) -> None:
    with path.open("wb") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")
