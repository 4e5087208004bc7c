"""`planetary.simulate`: a whole run in this process, in simulated time, with the real training step."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from planetary.core.configuration.presets import preset_of
from planetary.core.configuration.ranges import Index, Positive, check_argument, check_instance
from planetary.core.configuration.schema import Config
from planetary.core.errors import PeerError, UserError
from planetary.core.places import cache_folder
from planetary.monitor.report import Report, build_report
from planetary.monitor.run_folder import Event, RunHistory
from planetary.run.choice import ConfigSource, read_config, settings
from planetary.run.kinds import RunKind, kind_of
from planetary.run.metrics import Metrics
from planetary.run.simulations import Simulation
from planetary.runs.rounds.preparation.model_shapes import with_model_shapes
from planetary.simulation.faults import Fault, draw_plan
from planetary.simulation.node import STEP_S
from planetary.simulation.simulated_cluster import SimMachine, SimulatedCluster
from planetary.simulation.simulated_network import SimulatedLink

TINY: Mapping[str, Any] = {
    "run": {"name": "simulated"},
    "model": {"options": {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 256}},
    "train": {"rounds": 5, "inner_steps": 5, "batch_size": 4, "sequence_length": 32},
    "optimizer": {"learning_rate": 0.003, "warmup_steps": 5},
    "eval": {"every": 1, "batches": 8},
}
"""The default of a simulated run: a small transformer on the standard library's own text."""

START_S = 6.0  # simulated: until workers have joined and the step is compiled
LINK_PATIENCE_S = 60.0  # the same of a round whose bytes travel over links
PATIENCE = 50  # limit in multiples of the fault-free duration


class Point(NamedTuple):
    """Where a simulated run was at the end of a round.

    Attributes:
        seconds: simulated, since the first round began.
        moved_bytes: of all workers so far, in both directions, as the gateway counted them; of a ring, the payloads.
        tokens: trained so far.
        loss: held out, in nats per token.
    """

    seconds: float
    moved_bytes: int
    tokens: int
    loss: float


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a simulated run.

    Attributes:
        outcome: "finished", or "stopped: " and the reason.
        metrics: the records of all finished rounds; times in them are simulated.
        events: the journal, oldest first; `t` is in simulated seconds from the start.
        params: the parameters after the last outer step, float32, by dotted names; of a mixture, those of the last
            checkpoint, with all experts.
        faults: kinds of the faults that hit something, in the order in which they did.
        seconds: simulated, until the end.
        config: the configuration, fitted to the data.
    """

    outcome: str
    metrics: Metrics
    events: Sequence[Event]
    params: Mapping[str, np.ndarray]
    faults: Sequence[str]
    seconds: float
    config: Config

    def __repr__(self) -> str:
        length = f"{self.seconds:.1f} simulated s"
        return f"Simulated: {self.outcome} after {length}, {len(self.faults)} faults. {self.metrics!r}"

    @property
    def losses(self) -> list[float]:
        """Mean training loss of each round, in nats per token."""
        return [line.loss for line in self.metrics]

    @property
    def curve(self) -> list[Point]:
        """Loss against time and traffic: a point for each round with a held-out loss."""
        started = next((event["t"] for event in self.events if event["event"] == "round_started"), 0.0)
        ended = {event["round"]: event["t"] - started for event in self.events if event["event"] == "round_finished"}
        moved, found = 0, list[Point]()
        for line in self.metrics:
            moved += line.bytes_up + line.bytes_down + line.bytes_ring
            if line.eval_loss is not None:
                found.append(Point(ended[line.round], moved, line.tokens_total, line.eval_loss))
        return found

    @property
    def eval_losses(self) -> list[tuple[int, float]]:
        """Round and held-out loss, where it was evaluated."""
        return [(line.round, line.eval_loss) for line in self.metrics if line.eval_loss is not None]

    def report(self) -> Report:
        """Return quality, speed and faults of the run, as `Run.report` does."""
        return build_report(RunHistory(name=self.config.run.name, events=self.events, metrics=self.metrics))


def simulate(
    config: ConfigSource | None = None,
    *,
    workers: int | None = None,
    rounds: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    links: SimulatedLink | Sequence[SimulatedLink] | None = None,
    speeds: Sequence[float] = (),
    step_s: float = STEP_S,
    faults: Sequence[Fault] | int = (),
    seed: int = 0,
    cache: str | os.PathLike[str] | None = None,
) -> Simulated:
    """Train in this process, in simulated time, with the run's real compiled functions, data and merges.

    Gateway, supervisors and workers are those of a real run, with journal and checkpoints in a temporary folder;
    connections, processes, the clock and disk faults are simulated, and a step takes a time drawn for each worker. A
    mixture has composers, expert workers and payloads, too. Steps run on XLA's CPU backend, so the losses are real, and
    hours of faults pass in seconds. Equal arguments give equal bits.

    Args:
        config: as of `planetary.train`; None: a small transformer on the standard library's own text.
        workers: in place of `fabric.workers`; each is on a separate node.
        rounds: in place of `train.rounds`.
        overrides: other keys, such as `{"outer.learning_rate": 1.0}`.
        preset: a way to synchronise, as of `planetary train --preset`; `overrides` are on top of it.
        links: of the workers, `planetary.SimulatedLink(bandwidth=12.5e6, rtt_s=0.08)`: one for all, or one each. None:
            bytes are fast, and delays drawn. The gateway's own link is not limited.
        speeds: of the workers, relative to the others'; by default 1 each.
        step_s: of a worker of speed 1, on average; each process is up to a quarter faster or slower.
        faults: injected faults: `planetary.Fault(at_s=12.0, kind="kill_worker", worker=3)` …, or how many are drawn
            at most, from `seed`.
        seed: of all that is random in the simulated world: delays, speeds, drawn faults. The model's is `run.seed`.
        cache: of prepared data and training steps; by default `$PLANETARY_CACHE`, else `~/.cache/planetary`.

    Raises:
        UserError: the configuration, the model or the data is wrong; a fault names a worker that is not there; or the
            configuration asks for another kind of run than one in rounds or a mixture.
        NumericsError: an outer step gave parameters that are not finite.
        PeerError: the run does not end, in simulated time; the text names the condition that it waits for.

    Example:
        >>> kill = planetary.Fault(at_s=5.0, kind="kill_worker", worker=3)
        >>> done = planetary.simulate(workers=8, rounds=3, faults=[kill])
        >>> done.outcome, done.faults, done.losses[-1] < done.losses[0]
        ('finished', ('kill_worker',), True)
    """
    check_argument("seed", seed, int)
    check_argument("step_s", step_s, Positive)
    source = TINY if config is None else config
    given = settings(workers=workers, rounds=rounds)
    if preset is not None:
        given += preset_of(preset).overrides(read_config(source, given).fabric.workers)
    given += settings(overrides)
    resolved = with_model_shapes(read_config(source, given))
    machines = _machines(resolved.fabric.workers, links, speeds)
    _check_faults(resolved.fabric.workers, faults)
    place = cache_folder(cache)
    kind = kind_of(resolved)
    simulation = simulation_of(kind, resolved, place)
    for warning in kind.check(resolved):
        warnings.warn(warning, stacklevel=2)
    plan = _plan(simulation.config, faults, seed)
    horizon = _horizon(simulation.config, step_s / min(machine.speed for machine in machines))
    horizon += LINK_PATIENCE_S * resolved.train.rounds if links is not None else 0.0
    limit = PATIENCE * (horizon + sum(fault.seconds for fault in plan))
    with _ONE_AT_A_TIME:
        cluster = simulation.cluster(seed, plan, machines, step_s)
        ended = cluster.run(limit)
    if not ended:
        why = cluster.waits_for
        raise PeerError(f"the simulated run did not end within {limit:.0f} simulated seconds: {why}")
    return _result(simulation, cluster)


_ONE_AT_A_TIME = threading.Lock()  # workers share the compiled functions


def _horizon(config: Config, step_s: float = STEP_S) -> float:
    """Return about how many simulated seconds the run takes without faults, and with links that take no time."""
    return START_S + config.total_inner_steps * step_s


def simulation_of(kind: RunKind, config: Config, cache: Path) -> Simulation:
    """Prepare a run for the simulator; `cache`: of prepared data and functions.

    Raises:
        UserError: this kind is not simulated, or the configuration is wrong.
    """
    if not kind.simulated:
        raise UserError(
            f'simulate: expected a configuration of a run in rounds or of a mixture, found the kind "{kind.name}"'
        )
    module, _, name = kind.simulated.partition(":")
    return getattr(importlib.import_module(module), name)(config, cache)


def _machines(
    workers: int, links: SimulatedLink | Sequence[SimulatedLink] | None, speeds: Sequence[float]
) -> list[SimMachine]:
    """Return the workers' machines. Raises `UserError` for too many or too few."""
    if links is not None and not isinstance(links, SimulatedLink):
        wanted = "a planetary.SimulatedLink(bandwidth=12.5e6, rtt_s=0.08), or one for each worker"
        check_instance("links", links, (list, tuple), wanted)
        for link in links:
            check_instance("links", link, SimulatedLink, wanted)
    check_instance("speeds", speeds, (list, tuple, np.ndarray), "a number for each worker, such as [1.0, 0.5]")
    for speed in speeds:
        check_argument("speeds", speed, Positive)
    each = [links] * workers if links is None or isinstance(links, SimulatedLink) else list(links)
    fast = [float(speed) for speed in speeds] or [1.0] * workers
    for name, given in (("links", each), ("speeds", fast)):
        if len(given) != workers:
            raise UserError(f"simulate: expected {workers} {name}, one for each worker, found {len(given)}")
    return [SimMachine(speed=speed, link=link) for speed, link in zip(fast, each, strict=True)]


def _check_faults(workers: int, faults: Sequence[Fault] | int) -> None:
    """Raise `UserError` for faults that cannot be injected."""
    if isinstance(faults, int):
        check_argument("faults", faults, Index)
        return
    wanted = 'how many are drawn at most, or faults such as planetary.Fault(at_s=12.0, kind="kill_worker", worker=3)'
    check_instance("faults", faults, (list, tuple), wanted)
    for fault in faults:
        check_instance("faults", fault, Fault, wanted)
        if not 0 <= fault.worker < workers:
            raise UserError(f"simulate: {fault} names worker {fault.worker}; expected 0 to {workers - 1}")


def _plan(config: Config, faults: Sequence[Fault] | int, seed: int) -> Sequence[Fault]:
    if isinstance(faults, int):
        return draw_plan(seed, workers=config.fabric.workers, horizon_s=_horizon(config), most=faults)
    return sorted(faults, key=lambda fault: fault.at_s)


def _result(simulation: Simulation, cluster: SimulatedCluster[Any]) -> Simulated:
    end, metrics = cluster.finished, cluster.metrics
    assert end is not None
    return Simulated(
        outcome="finished" if end.ok else f"stopped: {end.reason}",
        metrics=Metrics(metrics[round_] for round_ in sorted(metrics)),
        events=[msgspec.to_builtins(record) for record in cluster.journal],
        params=simulation.params(cluster),
        faults=tuple(cluster.struck),
        seconds=cluster.world.now,
        config=cluster.config,
    )
