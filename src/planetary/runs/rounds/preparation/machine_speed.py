"""Measure the time of a training step and a round on this machine, and set the length of a local run.

The step is compiled and verified as the first worker would ask for it, so the artifact is in the cache when that worker
comes, and is timed by as many processes at once, with as many threads each, as the run will have.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from planetary.artifacts.store import BlobStore, write_atomically
from planetary.core import decoding
from planetary.core.configuration.schema import Config
from planetary.core.tensors import TensorSpec
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact, compile_apart
from planetary.runs.rounds.preparation.budget import KeptSpeed, MachineSpeed
from planetary.runs.rounds.preparation.step_timing import TimingRequest, time_steps, write_values
from planetary.runtime.backends import PJRT_TARGET, is_pjrt, runtime_identity
from planetary.runtime.host import target_features
from planetary.sync.contributions import Contribution
from planetary.sync.outer import initial_state, outer_step
from planetary.sync.outer_optimizers import AVERAGING

if TYPE_CHECKING:
    from planetary.runs.rounds.preparation.preparation import Prepared


from collections.abc import Awaitable

from planetary.data.fitting import fit_to_data, length_of
from planetary.runs.rounds.preparation.budget import fit, smaller, why_smaller
from planetary.runs.rounds.preparation.preparation import Prepared

TIMED_STEPS = 12

ROUND_FACTOR = 10.0
"""Time of a round beside inner steps, in outer steps of the same parameters: both are copies, conversions and sums over
them on one core. A round has four transfers of the parameters per pair of workers, each encrypted and decrypted, the
optimizer's state and a checkpoint to disk."""

FITS = "fits"
"""Folder in the cache that keeps measurements; without the file a machine is measured again."""


def local_target(config: Config) -> CompileTarget:
    """Return the target the workers of a local run ask for.

    With "auto", IREE's CPU backend is measured: the machine takes another one only if that is faster.
    """
    backend = "cpu" if config.fabric.backend == "auto" else config.fabric.backend
    name = config.fabric.target
    if is_pjrt(backend):
        name = PJRT_TARGET
    elif backend != "cpu" and name == "host":
        from planetary.compiler.backends.targets import DEFAULT_NAMES

        name = DEFAULT_NAMES[backend]
    return CompileTarget(backend, name, target_features(backend, name))


async def measure_speed(
    config: Config,
    prepared: Prepared,
    target: CompileTarget,
    *,
    threads: int,
    cache: Path,
    stage: Callable[[str], None],
) -> MachineSpeed:
    """Return the times of a step and a round here: as measured before, or measured now and kept in `cache`.

    A measurement that other programs disturbed is repeated by each run until it is settled (`KeptSpeed`), and the
    fastest counts. Another compiler or runtime makes another key.

    Args:
        config: for the number of workers.
        prepared: the step and the values it starts from.
        target: of the workers of this machine.
        threads: of each worker.
        cache: where compiled steps and measurements are kept.
        stage: called with the name of each activity.

    Raises:
        CompileError: the step cannot be compiled or run here.
    """
    workers = config.fabric.workers
    stage(f"compiling and verifying the training step for {target.backend}:{target.name}")
    published = await compile_apart(prepared, target, cache)
    kept = cache / FITS / f"{_key(published, target, workers, threads)}.json"
    known = _read(kept)
    if known is not None and known.is_settled:
        return known.speed
    stage(f"timing the training step with {workers} workers of {threads or 'all'} threads")
    request = TimingRequest(
        str(BlobStore(cache / "blobs").verified_path(published.digest)),
        prepared.step.spec,
        target.backend,
        threads,
        TIMED_STEPS,
    )
    with tempfile.TemporaryDirectory(prefix="planetary-fit-") as name:
        folders = [Path(name) / str(index) for index in range(workers)]
        for folder in folders:
            folder.mkdir()
            write_values(folder, prepared.params, prepared.buffer_values)
        times = await asyncio.gather(*(time_steps(folder, request) for folder in folders))
    # Another program that runs for a moment slows some of the steps down: the faster half counts.
    step_ms = statistics.quantiles([ms for one in times for ms in one.milliseconds], n=4)[0]
    outer_s = await asyncio.to_thread(_time_outer_step, prepared.step.spec.params, prepared.params, workers)
    speed = MachineSpeed(step_ms / 1e3, ROUND_FACTOR * outer_s, published.compile_s + published.verify_s)
    found = KeptSpeed(speed, min(one.busy for one in times))
    if known is not None:
        found = known.beside(found)
    if not found.is_settled:
        stage(f"other programs were busy ({found.busy:.0%} of the threads' time): the next run times the step again")
    write_atomically(kept, msgspec.json.encode(found))
    return found.speed


def _key(published: PublishedArtifact, target: CompileTarget, workers: int, threads: int) -> str:
    parts = f"{published.digest} {target.backend} {target.name} {target.features} {workers} {threads}"
    parts += f" {runtime_identity(target.backend)}"
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _read(path: Path) -> KeptSpeed | None:
    try:
        return decoding.from_json(path.read_bytes(), KeptSpeed)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _time_outer_step(specs: tuple[TensorSpec, ...], params: Mapping[str, np.ndarray], workers: int) -> float:
    """Return the seconds of the fastest of three outer steps over `params` with one contribution of each worker."""
    state = initial_state(specs, params)
    contributions = [Contribution(task, 1, params) for task in range(workers)]
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        outer_step(specs, state, contributions, AVERAGING)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


async def fit_run(
    config: Config,
    prepared: Prepared,
    measure: Callable[[Config, Prepared], Awaitable[MachineSpeed | None]],
    prepare: Callable[[Config], Awaitable[Prepared | None]],
    note: Callable[[str], None],
) -> tuple[Config, Prepared] | None:
    """Return the configuration that takes about `train.target_minutes` here, and the parts of the run.

    None when `measure`, which times a step, or `prepare`, which makes another model, was stopped. `note` gets decision
    and reason.
    """
    speed = await measure(config, prepared)
    if speed is None:
        return None
    spent_s = 0.0
    if (shrunk := smaller(config, speed)) is not None:
        note(why_smaller(config, speed))
        spent_s = speed.made_s
        found = await prepare(shrunk)
        if found is None:
            return None
        config, prepared = shrunk, found
        speed = await measure(config, prepared)
        if speed is None:
            return None
    chosen = fit(config, speed, spent_s=spent_s)
    config = fit_to_data(chosen.config, prepared.data)
    length = length_of(config, prepared.data.train.count)  # data.max_epochs may allow fewer rounds
    note(chosen.sentence(speed, length.expected_rounds))
    return config, prepared
