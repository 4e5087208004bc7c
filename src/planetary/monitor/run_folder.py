"""The files of a run, read back: the journal, the metrics, the baseline's metrics and the facts.

Events are read as plain mappings and only by the keys documented in `docs/glossary.md`, so a display also understands
the journal of a run that another version wrote.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from planetary.artifacts.jsonl import read_json_lines
from planetary.artifacts.store import write_atomically
from planetary.core import decoding
from planetary.core.errors import UserError
from planetary.fleet.protocol.kind_reader import KindReader, journal_kind, kind_reader
from planetary.machine.journal import Record
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runtime.host import usable_cores
from planetary.version import __version__

Event = Mapping[str, Any]
"""One line of `events.jsonl`: `event`, `t` (Unix time in seconds) and the event's own keys."""

EVENTS, METRICS, FACTS, BASELINE = "events.jsonl", "metrics.jsonl", "facts.json", "baseline"

# The software that decides the numbers of a run, besides the configuration.
_REPORTED_PACKAGES = (
    "numpy",
    "iree-base-runtime",
    "iree-base-compiler",
    "jax",
    "jaxlib",
    "msgspec",
    "pycapnp",
)


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts for a report that neither journal nor metrics have. Written once, as `facts.json`."""

    run: str
    params: int  # trained scalars
    inner_steps: int  # per round and worker
    config_hash: str
    seed: int
    bigram_loss: float | None = None  # held-out loss of a bigram model of the same tokens, in nats per token
    versions: Mapping[str, str] = msgspec.field(default_factory=dict)
    platform: str = ""
    cpus: int = 0


class RunHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known of a run afterwards, or so far."""

    name: str
    events: Sequence[Event]
    metrics: Sequence[RoundMetrics]  # each round once, ascending
    baseline: Sequence[RoundMetrics] = ()  # the same tokens on one worker without DiLoCo; empty: not trained
    facts: RunFacts | None = None

    @property
    def counts(self) -> str:
        """Unit of all numbers of tokens: `tokens`, `examples` or `targets`."""
        begun = (event.get("counts") for event in self.events if event.get("event") == "run_started")
        return next(begun, None) or "tokens"

    @property
    def loss_unit(self) -> str:
        """Unit of losses: a loss over examples is the author's own and has none."""
        return " (nats per token)" if self.counts == "tokens" else ""

    @property
    def reader(self) -> KindReader[Any] | None:
        """What is known of the kind of run; None before it began. Raises `UserError` for an unknown kind."""
        kinds = (event.get("kind", "") for event in self.events if event.get("event") == "run_started")
        kind = next(kinds, None)
        return None if kind is None else kind_reader(str(kind))

    @property
    def records(self) -> list[Record]:
        """The events as records of the run's kind; empty before it began.

        Raises:
            UserError: an event is no record of this kind.
        """
        if self.reader is None:
            return []
        try:
            return decoding.convert(self.events, list[self.reader.records])
        except msgspec.ValidationError as error:
            raise UserError(f"the journal of {self.name} is damaged: {error}") from error


def load_history(folder: str | os.PathLike[str]) -> RunHistory:
    """Read a run folder, of a run that ended or is under way.

    Raises:
        UserError: it is no run folder, of another version, or a file is damaged; the text names file and line.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"cannot read the run {folder}: there is no such folder{_runs_beside(folder)}")
    if not (folder / EVENTS).is_file():
        raise UserError(
            f"{folder} is not a run folder: expected {EVENTS} in it, as `planetary train` writes it"
            f"{_runs_beside(folder / 'x')}"
        )
    return RunHistory(
        name=folder.resolve().name,
        events=read_events(folder),
        metrics=read_metrics(folder),
        baseline=read_metrics(folder / BASELINE),
        facts=read_facts(folder),
    )


def newest_of_each_round(metrics: Sequence[RoundMetrics]) -> list[RoundMetrics]:
    """Return the last line of every round, ascending; the gateway itself removes rounds a resumed run repeats."""
    # Not in file order: the line of a round whose evaluation came late stands after newer ones.
    newest = {line.round: line for line in metrics}
    return [newest[number] for number in sorted(newest)]


def collect_facts(
    *, run: str, params: int, inner_steps: int, config_hash: str, seed: int, bigram_loss: float | None
) -> RunFacts:
    """Return the facts of a run on this machine: the arguments, the installed versions and the platform."""
    versions = {"planetary": __version__, "python": platform.python_version()}
    for package in _REPORTED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return RunFacts(
        run=run,
        params=params,
        inner_steps=inner_steps,
        config_hash=config_hash,
        seed=seed,
        bigram_loss=bigram_loss,
        versions=versions,
        platform=platform.platform(),
        cpus=usable_cores(),
    )


def write_facts(folder: str | os.PathLike[str], facts: RunFacts) -> None:
    """Write `facts.json`. Raises `ResourceError` when it cannot be written."""
    write_atomically(Path(folder) / FACTS, msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n")


def read_facts(folder: str | os.PathLike[str]) -> RunFacts | None:
    """Read `facts.json`; None when the run has none. Raises `UserError` when it is damaged."""
    path = Path(folder) / FACTS
    try:
        return decoding.from_json(path.read_bytes(), RunFacts)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def read_events(folder: Path) -> list[Event]:
    """Return the events of the run in `folder`, of a kind that is known here or not; none before it began.

    Raises:
        UserError: another version wrote the file, or it is damaged; the text names file and line.
    """
    path = folder / EVENTS
    return [] if journal_kind(path) is None else list(read_json_lines(path, dict[str, Any]))


def read_metrics(folder: Path) -> list[RoundMetrics]:
    """Return the metrics of each round of the run in `folder`, ascending; none before the first round ended.

    Raises:
        UserError: the file is damaged; the text names file and line.
    """
    path = folder / METRICS
    return newest_of_each_round(list(read_json_lines(path, RoundMetrics))) if path.exists() else []


def _runs_beside(folder: Path) -> str:
    """Name the runs that do exist next to a missing folder."""
    try:
        names = sorted(entry.name for entry in folder.parent.iterdir() if (entry / EVENTS).is_file())
    except OSError:
        return ""
    return f"; runs in {folder.parent} are: {', '.join(names[:8])}" if names else ""
