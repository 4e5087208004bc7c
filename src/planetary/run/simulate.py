"""`planetary.simulate`: a whole run in this process, in simulated time, with its real training step."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.core.config import Config
from planetary.core.configuration.toml import toml_value
from planetary.core.errors import PeerError, UserError
from planetary.core.step import StepSpec
from planetary.fabric.gateway.rounds_start import policy_of
from planetary.fabric.gateway.topology import ring_policy
from planetary.fabric.preparation.model_shapes import with_model_shapes
from planetary.fabric.preparation.preparation import Prepared, prepare_run, schedule_of
from planetary.fabric.protocol.policy import ControllerPolicy
from planetary.monitor.report import Report, build_report
from planetary.monitor.run_folder import Event, RunHistory
from planetary.run.choice import ConfigSource, read_config
from planetary.run.kinds import kind_of
from planetary.run.metrics import Metrics
from planetary.run.places import cache_folder
from planetary.runtime.executor import Executor
from planetary.simulation.cluster import SimCluster
from planetary.simulation.faults import Fault, draw_plan
from planetary.simulation.numerics import StepNumerics
from planetary.simulation.worker import STEP_S

TINY: Mapping[str, Any] = {
    "run": {"name": "simulated"},
    "model": {"options": {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 256}},
    "train": {"rounds": 5, "inner_steps": 5, "batch_size": 4, "sequence_length": 32},
    "optimizer": {"learning_rate": 0.003, "warmup_steps": 5},
    "eval": {"every": 1, "batches": 8},
}
"""What is simulated without a configuration: a small transformer on the standard library's own text."""

START_S = 6.0  # simulated: until workers have joined and the step is compiled
PATIENCE = 50  # a simulation that takes so many times its fault-free duration does not end


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated run came to.

    Attributes:
        outcome: "finished", or "stopped: " and the reason.
        metrics: the records of all finished rounds; times in them are simulated.
        events: the journal, oldest first; `t` is in simulated seconds from the start.
        params: the parameters after the last outer step, float32, by their dotted names.
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

    @property
    def losses(self) -> list[float]:
        """Mean training loss of each round, in nats per token."""
        return [line.loss for line in self.metrics]

    @property
    def eval_losses(self) -> list[tuple[int, float]]:
        """Round and held-out loss, where it was evaluated."""
        return [(line.round, line.eval_loss) for line in self.metrics if line.eval_loss is not None]

    def report(self) -> Report:
        """Return quality, speed and faults of the run, as `Run.report` does; traffic is not simulated."""
        return build_report(RunHistory(name=self.config.run.name, events=self.events, metrics=self.metrics))


def simulate(
    config: ConfigSource | None = None,
    *,
    workers: int | None = None,
    rounds: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    faults: Sequence[Fault] | int = (),
    seed: int = 0,
    cache: str | os.PathLike[str] | None = None,
) -> Simulated:
    """Train in this process, in simulated time, with the run's real training step, data and outer steps.

    Controller, workers and supervisors are the machines of a real run; connections, processes, disks and the clock
    are simulated, and a step takes a time drawn for each worker. The step runs on XLA's CPU backend, so the losses are
    real, and hours of faults pass in seconds. Equal arguments give equal bits.

    Args:
        config: as of `planetary.train`; None: a small transformer on the standard library's own text.
        workers: in place of `fabric.workers`; each is on a node of its own.
        rounds: in place of `train.rounds`.
        overrides: other keys, such as `{"outer.learning_rate": 1.0}`.
        faults: what goes wrong: `planetary.Fault(at_s=12.0, kind="kill_worker", worker=3)` …, or how many are drawn
            at most, from `seed`.
        seed: of all that is random in the simulated world: delays, speeds, drawn faults. The model's is `run.seed`.
        cache: of prepared data and training steps; by default `$PLANETARY_CACHE`, else `~/.cache/planetary`.

    Raises:
        UserError: the configuration, the model or the data is wrong; a fault names a worker that is not there; or the
            configuration makes a mixture over composers, which is not simulated.
        NumericsError: an outer step gave parameters that are not finite.
        PeerError: the run does not end, in simulated time; the text says what it waits for.

    Example:
        >>> kill = planetary.Fault(at_s=5.0, kind="kill_worker", worker=3)
        >>> done = planetary.simulate(workers=8, rounds=3, faults=[kill])
        >>> done.outcome, done.faults, done.losses[-1] < done.losses[0]
        ('finished', ('kill_worker',), True)
    """
    given = [f"{key}={toml_value(value)}" for key, value in (overrides or {}).items()]
    given += [f"fabric.workers={workers}"] if workers is not None else []
    given += [f"train.rounds={rounds}"] if rounds is not None else []
    resolved = with_model_shapes(read_config(TINY if config is None else config, given))
    kind_of(resolved).check_simulated(resolved)
    place = cache_folder(Path(cache) if cache is not None else None)
    prepared = prepare_run(resolved, place, lambda stage: None)
    plan = _plan(prepared.config, faults, seed)
    limit = PATIENCE * (_horizon(prepared.config) + sum(fault.seconds for fault in plan))
    with _ONE_AT_A_TIME:
        numerics = _numerics(prepared, BlobStore(place / "blobs"))
        cluster = SimCluster(seed, _policy(prepared, numerics), prepared.config.fabric.workers, plan, numerics)
        ended = cluster.run(limit)
    if not ended:
        stall = cluster.gateway.controller.stalls.why if cluster.gateway is not None else "the gateway is down"
        raise PeerError(f"the simulated run did not end within {limit:.0f} simulated seconds: {stall}")
    return _result(cluster, prepared.config)


_ONE_AT_A_TIME = threading.Lock()  # the executor is shared


@functools.lru_cache(maxsize=1)  # compiling it takes longer than many a simulation
def _executor(artifact: Path, spec: StepSpec) -> Executor:
    from planetary.runtime.pjrt_executor import PjrtExecutor

    return PjrtExecutor(artifact, spec)


def _numerics(prepared: Prepared, store: BlobStore) -> StepNumerics:
    spec, outer = prepared.step.spec, prepared.config.outer
    return StepNumerics(
        _executor(store.path(spec.stablehlo_digest), spec),
        prepared.params,
        prepared.buffer_values,
        schedule_of(prepared.config),
        learning_rate=outer.learning_rate,
        momentum=outer.momentum,
    )


def _policy(prepared: Prepared, numerics: StepNumerics) -> ControllerPolicy:
    policy = policy_of(prepared.config, prepared)
    if prepared.config.sync.topology != "ring":
        return policy
    ring = ring_policy(prepared.config, policy.spec.params, numerics.initial(), port=1)
    return msgspec.structs.replace(policy, ring=ring)


def _horizon(config: Config) -> float:
    """Return about how many simulated seconds the run takes without faults."""
    return START_S + config.total_inner_steps * STEP_S


def _plan(config: Config, faults: Sequence[Fault] | int, seed: int) -> Sequence[Fault]:
    workers = config.fabric.workers
    if isinstance(faults, int):
        return draw_plan(seed, workers=workers, horizon_s=_horizon(config), most=faults)
    for fault in faults:
        if not 0 <= fault.worker < workers:
            raise UserError(f"simulate: {fault} names worker {fault.worker}; expected 0 to {workers - 1}")
    return sorted(faults, key=lambda fault: fault.at_s)


def _result(cluster: SimCluster, config: Config) -> Simulated:
    gateway, disk = cluster.gateway, cluster.disk
    assert gateway is not None, "a run that ended has a gateway"
    assert gateway.finished is not None
    journal = zip(disk.journal, disk.times, strict=True)
    return Simulated(
        outcome="finished" if gateway.finished.ok else f"stopped: {gateway.finished.reason}",
        metrics=Metrics(disk.metrics[round_] for round_ in sorted(disk.metrics)),
        events=[{**msgspec.to_builtins(record), "t": time} for record, time in journal],
        params=gateway.parameters.state.params,
        faults=tuple(cluster.struck),
        seconds=cluster.world.now,
        config=config,
    )
