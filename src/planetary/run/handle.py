"""`Run`: a run in a folder, whether it is under way, has ended, or was stopped."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from planetary.artifacts.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, load_latest
from planetary.core.config import load_config
from planetary.core.configuration.schema import Config, DataSource
from planetary.core.errors import PeerError, ResourceError, UserError
from planetary.core.places import cache_folder
from planetary.fleet.gateway.run_files import CHECKPOINTS, CONFIG, EVENTS, holder_of
from planetary.monitor.report import Report, build_report
from planetary.monitor.run_folder import Event, load_history, read_events, read_metrics
from planetary.run.choice import resumed_run, settings
from planetary.run.metrics import Metrics, RoundRewards, rewards_of
from planetary.run.processes.local_run import STOP_LIMIT_S, LocalRun, LocalRunOptions, Outcome
from planetary.run.processes.round_observer import OnRound, RoundObserver
from planetary.run.status_source import status_source
from planetary.runs.rounds.training_status import TrainingStatus, training_of
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.scheduling.sampling import USUAL, USUAL_TOKENS, SamplingOptions

if TYPE_CHECKING:
    from planetary.run.model.adapter_export import AdapterExport
    from planetary.run.model.pretrained_export import PretrainedExport
    from planetary.run.model.text_continuation import TextContinuation

EXIT_LIMIT_S = 3 * STOP_LIMIT_S


class Orchestration(Protocol):
    """Starts, follows and ends the processes of a run: `planetary.run.processes.local_run.LocalRun`."""

    async def run(self) -> Outcome:
        """Run to the end, or until `stop`."""
        ...

    def stop(self) -> None:
        """End in order. Called on the event loop of `run`."""
        ...

    def kill(self) -> None:
        """Kill the processes. Called from any thread."""
        ...


class BackgroundRun:
    """An orchestration in a separate thread: it needs no event loop, and works beside one, as in a notebook.

    The thread installs no signal handlers. At the interpreter's exit every run under way is stopped in order; remaining
    processes are killed by their ids.
    """

    def __init__(self, orchestration: Orchestration) -> None:
        """Start."""
        self.outcome: concurrent.futures.Future[Outcome] = concurrent.futures.Future()
        self.outcome.set_running_or_notify_cancel()  # from now on waiting for it can be cancelled, itself it cannot
        self._orchestration = orchestration
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        _CARRIED.add(self)
        # A daemon: the interpreter would wait for any other thread before it calls `_stop_all`.
        self._thread = threading.Thread(target=self._carry, name="planetary-run", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask for an orderly end; from any thread. `outcome` is set at the end."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has come
            self._loop.call_soon_threadsafe(self._orchestration.stop)

    def end(self, within_s: float) -> None:
        """Stop, and kill the processes if they have not ended after `within_s` seconds.

        On the run's own thread, which a callback is called on, it only asks: waiting there would wait for itself.
        """
        self.stop()
        if threading.current_thread() is self._thread:
            return
        if not concurrent.futures.wait([self.outcome], within_s).done:
            self._orchestration.kill()
            concurrent.futures.wait([self.outcome], within_s)

    def _carry(self) -> None:
        try:
            with self._runner:
                outcome = self._runner.run(self._orchestration.run())
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            _CARRIED.discard(self)
            self.outcome.set_exception(error)
        else:
            _CARRIED.discard(self)
            self.outcome.set_result(outcome)


_CARRIED: set[BackgroundRun] = set()


@atexit.register
def _stop_all() -> None:
    carried = list(_CARRIED)
    for run in carried:
        run.stop()
    for run in carried:
        run.end(EXIT_LIMIT_S)


STOP_ELSEWHERE_S = 30.0  # time for a gateway of another program to end after SIGTERM
_POLL_S = 0.2


class Run:
    """A run in a folder.

    `planetary.train` returns one, and `Run.open` reads the one in a folder: an ended run, or one carried by this or
    another program. Reading never disturbs it.

    Attributes:
        folder: the run folder; docs/ops.md lists the files.

    Example:
        >>> run = planetary.Run.open("runs/tiny")
        >>> run.status.state, run.under_way, run.metrics[-1].round, run.report().outcome
        ('finished', False, 2, 'finished')
        >>> len(run.params()), len(run.generate("def ", max_tokens=5, seed=1)) > 0
        (8, True)
        >>> len(run.resume(rounds=3).metrics)
        3
    """

    def __init__(self, folder: Path, background: BackgroundRun | None = None, observer: RoundObserver | None = None):
        """Made by `planetary.train` and `Run.open`."""
        self.folder = folder
        self._background = background
        self._observer = observer
        self._trained: tuple[Path | None, str, TextContinuation] | None = None

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Run:
        """Return the run in `folder`.

        Raises:
            UserError: the folder holds no run; runs beside it are named.
        """
        found = Path(folder).absolute()
        load_history(found)
        return cls(found)

    def __repr__(self) -> str:
        shown = os.path.relpath(self.folder)
        if not (self.folder / EVENTS).exists():
            return f"Run({shown!r}): preparing"
        try:
            status = training_of(status_source(str(self.folder))())
        except UserError as error:
            return f"Run({shown!r}): {error}"
        return f"Run({shown!r}): {status.state}, {status.rounds_finished} of {status.rounds} rounds"

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """The configuration as the gateway resolved it. Raises `UserError` before the run has begun."""
        return load_config(self.folder / CONFIG)

    @property
    def status(self) -> TrainingStatus:
        """The run now: state, round, losses, workers; steps in progress only if this program carries the run."""
        dashboard = self._observer.dashboard if self._observer is not None else ""
        if dashboard:
            with contextlib.suppress(PeerError):  # it may end just now; then the folder knows
                return training_of(status_source(dashboard)())
        if not (self.folder / EVENTS).exists():
            return TrainingStatus(run=self.folder.name, state="preparing", stage="starting")
        return training_of(status_source(str(self.folder))())

    @property
    def metrics(self) -> Metrics:
        """The records of all finished rounds: `metrics[-1].loss`, `metrics.records()`, `metrics.dataframe()`."""
        return Metrics(read_metrics(self.folder))

    @property
    def rewards(self) -> Sequence[RoundRewards]:
        """The rewards of every finished round of reinforcement learning; a run that trains on data has none."""
        return rewards_of(self.metrics)

    @property
    def events(self) -> Sequence[Event]:
        """The journal, oldest first: dictionaries with `event`, `t` (Unix time in seconds) and keys of their own."""
        return read_events(self.folder)

    def report(self) -> Report:
        """Return quality, speed, traffic and faults of the run so far. Raises `UserError` before it has begun."""
        return build_report(load_history(self.folder))

    def checkpoint(self, round: int | None = None) -> Checkpoint:
        """Return the checkpoint of a round, by default the newest: `params` and `velocity`, float32, and `info`.

        Raises:
            UserError: there is none; the rounds that have one are named.
            TrustError: it is damaged.
        """
        if round is None:
            return load_latest(self.folder / CHECKPOINTS)
        return load_checkpoint(self._checkpoint_path(round))

    def params(self, round: int | None = None) -> Mapping[str, np.ndarray]:
        """Return the parameters after a round, float32, by their dotted names. Raises as `checkpoint` does."""
        return self.checkpoint(round).params

    def generate(
        self,
        prompt: str,
        max_tokens: int = USUAL_TOKENS,
        *,
        temperature: float = USUAL.temperature,
        top_k: int = USUAL.top_k,
        seed: int = USUAL.seed,
        round: int | None = None,
        experts: str = ServeConfig().experts,
    ) -> str:
        """Return text that continues `prompt`, without the prompt. Equal arguments give equal text.

        A server of the run with float32 weights and cache gives the same text for the same options and seed, up to the
        end of the context.

        Args:
            prompt: at least one character.
            max_tokens: the most to draw; a token that ends a text ends it earlier.
            temperature: divides the logits, 0 to 100; 0 always takes the likeliest token.
            top_k: draw from the k likeliest tokens only; 0: from all.
            seed: of the draws.
            round: whose checkpoint is used; by default the newest.
            experts: of a mixture: "real", "surrogates", or "composer:N".

        Raises:
            UserError: no checkpoint, an empty prompt, or a model without logits.
            NumericsError: the logits are not finite.
        """
        options = SamplingOptions(temperature=temperature, top_k=top_k, seed=seed)
        return "".join(self._model(round, experts).continue_text(prompt, options, max_tokens))

    def evaluate(
        self,
        data: Mapping[str, str | os.PathLike[str]] | None = None,
        metrics: Sequence[str] = (),
        *,
        round: int | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> dict[str, dict[str, float]]:
        """Return the value of each metric on each named set, as `planetary evaluate` does: `found["notes"]["loss"]`.

        Args:
            data: name -> source as of `data.source`; by default the run's own held-out part, `held_out`.
            metrics: names, or "file.py:Name"; by default loss, perplexity, bits_per_byte and accuracy.
            round: whose checkpoint is used; by default the newest.
            cache: of prepared data.

        Raises:
            UserError: no checkpoint, a set or a metric that does not fit, or a metric that fails.
        """
        from planetary.run.model.evaluation import evaluate_folder

        sources = {name: DataSource(os.fspath(source), text_key="text") for name, source in (data or {}).items()}
        path = self._checkpoint_path(round) if round is not None else None
        found = next(evaluate_folder(self.folder, sources, metrics, cache=cache_folder(cache), checkpoint=path))
        if failed := [f"set {one.name}: {why}" for one in found.sets for why in one.failed.values()]:
            raise UserError("; ".join(failed))
        return {one.name: {metric: value.value for metric, value in one.values.items()} for one in found.sets}

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, round: int | None = None, dtype: str | None = None, force: bool = False
    ) -> PretrainedExport:
        """Write the trained model into a folder that `from_pretrained` of `transformers` loads, with the tokenizer.

        Args:
            folder: gets config.json, model.safetensors (frozen tensors included), the tokenizer's files, and those the
                pretrained folder had which the run started from.
            round: whose checkpoint is used; by default the newest.
            dtype: "float32", "bfloat16" or "float16"; by default that of the pretrained folder, or float32.
            force: replace a model that is in `folder`.

        Raises:
            UserError: no checkpoint, a model that `transformers` does not have, or `folder` holds one already.
        """
        from planetary.run.model.pretrained_export import DTYPES, export_pretrained

        if dtype is not None and dtype not in DTYPES:
            raise UserError(f"dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
        path = self._checkpoint_path(round) if round is not None else None
        return export_pretrained(self.folder, Path(folder), checkpoint=path, dtype=dtype or "", force=force)

    def save_adapter(
        self, folder: str | os.PathLike[str], *, round: int | None = None, force: bool = False
    ) -> AdapterExport:
        """Write the trained adapters into a folder that `PeftModel.from_pretrained` of `peft` loads.

        Args:
            folder: gets adapter_config.json and adapter_model.safetensors.
            round: whose checkpoint is used; by default the newest.
            force: replace an adapter that is in `folder`.

        Raises:
            UserError: no checkpoint, a run without adapters, or `folder` holds one already.
        """
        from planetary.run.model.adapter_export import export_adapter

        path = self._checkpoint_path(round) if round is not None else None
        return export_adapter(self.folder, Path(folder), checkpoint=path, force=force)

    def _model(self, round_: int | None, experts: str) -> TextContinuation:
        from planetary.run.model.served import load_trained
        from planetary.run.model.text_continuation import TextContinuation

        path = self._checkpoint_path(round_) if round_ is not None else None
        entries = list_checkpoints(self.folder / CHECKPOINTS)
        version = path or (entries[-1].path if entries else None)
        if self._trained is None or version is None or self._trained[:2] != (version, experts):
            self._trained = version, experts, TextContinuation(load_trained(self.folder, path, experts))
        return self._trained[2]

    def _checkpoint_path(self, round_: int) -> Path:
        entries = {entry.round: entry.path for entry in list_checkpoints(self.folder / CHECKPOINTS)}
        if round_ not in entries:
            kept = ", ".join(map(str, entries)) or "none"
            raise UserError(f"{self.folder} has no checkpoint of round {round_}; rounds with one: {kept}")
        return entries[round_]

    # --- waiting, stopping, resuming --------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """Whether the run is being trained, by this program or another."""
        if self._background is not None and not self._background.outcome.done():
            return True
        return holder_of(self.folder) is not None

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until the run ends, and return it. Ctrl+C stops the run in order before it is raised.

        Raises:
            PlanetaryError: the run failed; the class is that of the cause.
            TimeoutError: it goes on after `timeout` seconds.
        """
        if self._background is None:
            self._wait_elsewhere(timeout)
            return self
        try:
            self._background.outcome.result(timeout)
        except KeyboardInterrupt:
            self._background.end(EXIT_LIMIT_S)
            raise
        except concurrent.futures.TimeoutError:
            if self._background.outcome.done():
                raise
            raise TimeoutError(f"the run in {self.folder} goes on after {timeout} s") from None
        return self

    def __await__(self) -> Generator[Any, None, Run]:
        """Wait on an event loop: `await run`. Cancelling it leaves the run alone."""
        return self._ended().__await__()

    async def _ended(self) -> Run:
        if self._background is None:
            return await asyncio.to_thread(self.wait)
        await asyncio.wrap_future(self._background.outcome)
        return self

    def stop(self) -> Run:
        """Stop the run in order, also one that another program carries, and return it. It can be resumed.

        Returns at once if the run is not under way, and from `on_round`, which the run waits for.

        Raises:
            ResourceError: another program's gateway did not end.
        """
        if self._background is not None and not self._background.outcome.done():
            self._background.end(EXIT_LIMIT_S)
        elif (holder := holder_of(self.folder)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder, signal.SIGTERM)
            try:
                self._wait_elsewhere(STOP_ELSEWHERE_S)
            except TimeoutError:
                raise ResourceError(
                    f"the gateway of {self.folder} (process {holder}) did not end within {STOP_ELSEWHERE_S:.0f} s"
                ) from None
        return self

    def _wait_elsewhere(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while holder_of(self.folder) is not None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the run in {self.folder} goes on after {timeout} s")
            time.sleep(_POLL_S)

    def resume(
        self,
        *,
        rounds: int | None = None,
        workers: int | None = None,
        round: int | None = None,
        on_round: OnRound | None = None,
        wait: bool = True,
        cache: str | os.PathLike[str] | None = None,
        plain_loopback: bool = False,
    ) -> Run:
        """Go on with the run, and return it.

        Args:
            rounds: of the whole run; by default as many as it was to have.
            workers: on this machine; by default as before.
            round: whose checkpoint it goes on from; by default the newest.
            on_round: as of `planetary.train`, like the arguments below.
            wait: whether to return when the run has ended.
            cache: of prepared data and compiled steps.
            plain_loopback: no TLS and no token between the processes.

        Raises:
            UserError: the run is under way, or there is nothing to resume.
        """
        if self.under_way:
            raise UserError(f"cannot resume {self.folder}: it is under way; stop it first, or wait for it")
        checkpoint = self._checkpoint_path(round) if round is not None else None
        config, folder = resumed_run(self.folder, settings(rounds=rounds, workers=workers), checkpoint)
        options = LocalRunOptions(
            folder=folder,
            cache=cache_folder(cache),
            resume=True,
            checkpoint=checkpoint,
            plain=plain_loopback,
        )
        self._background, self._observer = _carry(config, options, on_round)
        self._trained = None
        return self.wait() if wait else self


def start_run(config: Config, options: LocalRunOptions, on_round: OnRound | None = None) -> Run:
    """Start the processes of a run on this machine, and return it under way."""
    return Run(options.folder, *_carry(config, options, on_round))


def _carry(config: Config, options: LocalRunOptions, on_round: OnRound | None) -> tuple[BackgroundRun, RoundObserver]:
    observer = RoundObserver(options.folder, on_round)
    return BackgroundRun(LocalRun(config, options, observer)), observer
