"""Part of the time in which workers train, over shaped lines, with real gateway and worker processes.

    python bench/utilisation.py                                        # all presets of `PRESETS` at 50 Mbit/s
    python bench/utilisation.py --mbit 1000 --presets eager-relay,rda-sign --rounds 6
    python bench/utilisation.py --presets eager-diloco --set sync.compression='"sign"'

A gateway and four workers, each a process of its own with the production shells, and a line of its own for every worker
(`planetary.testing.shaped_relay`: so many Mbit/s and half of the round trip each way; a limit of the worker's one
connection, as one that connections share lets 0.2 s of its rate pass at once after a rest). The training step is the
only part that is not real: its duration is pinned. A step sleeps until its time is over, and the last one of a lease
moves the 30.8 million parameters by seeded noise within that time, so that codecs have work. The link measurement that
this compares with (4 GPUs, 30.8M parameters, 3.9 s of compute a round, float32, blocking) published 11.6, 36.1 and
71.5 % at 50, 200 and 1,000 Mbit/s.

`--slower 8` divides lines and parameters by eight: transfers take as long, with an eighth of the work of codecs, for
machines with fewer cores than four workers and a gateway have. Bytes are given for all parameters. Codecs are compiled
whatever the size, as they are at full size.

Utilisation of a worker is its pinned time over the time on the clock, from its first step of the second round to
its first step of the last one. Where the rest goes is given as well: mean seconds of a call of the worker's
exchange (to encode a delta, to read a version, to form a start), and processor seconds a round of the worker's process
and of the gateway's. `plan` is the utilisation that `planetary plan` predicts, which counts neither.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planetary.compiler.step.step_module import TrainStep
from planetary.core.config import apply_overrides
from planetary.core.configuration.presets import PRESETS as KNOWN
from planetary.core.configuration.presets import Preset
from planetary.core.configuration.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    FabricConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    TrainConfig,
)
from planetary.core.step import StepSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.data.prepare import prepare
from planetary.fleet.gateway.gateway import GatewayOptions, Security
from planetary.fleet.gateway.run_files import METRICS
from planetary.fleet.preparation.compiling import PublishedArtifact
from planetary.fleet.shell.shell import Address
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.preparation.preparation import Prepared
from planetary.runs.rounds.preparation.prepared_steps import StepRecord
from planetary.runtime.executor import StepResult
from planetary.sync import payload
from planetary.sync.plan import Cluster, predict
from planetary.testing.shaped_relay import RelayRoute, ShapedRelay, Way

MBIT = 1e6 / 8  # bytes/s
STEP_S = 0.13  # 30 of them are the 3.9 s of the published measurement
WIDTH, LAYERS, VOCABULARY = 512, 8, 11_024
BATCH, LENGTH = 2, 8
LIMIT_S = 1500.0
PRESETS = (
    "diloco",
    "diloco-int4",
    "rda-sign",
    "rda-relay",
    "sparseloco",
    "streaming-diloco",
    "eager-diloco",
    "eager-relay",
)
SELDOM = 1_000_000  # rounds
NOISE = 1e-3  # standard deviation of a lease's move


def spec_of(slower: int) -> StepSpec:
    """Return the step of a small transformer, with 30.8 million numbers divided by 1, 2, 4 or 8."""
    shapes = [("embedding", (VOCABULARY // slower, WIDTH))]
    for layer in range(LAYERS // slower):
        shapes += [(f"layer{layer}.qkv", (WIDTH, 3 * WIDTH)), (f"layer{layer}.out", (WIDTH, WIDTH))]
        shapes += [(f"layer{layer}.up", (WIDTH, 4 * WIDTH)), (f"layer{layer}.down", (4 * WIDTH, WIDTH))]
    params = tuple(TensorSpec(name, "f32", shape) for name, shape in shapes)
    tokens = tuple(TensorSpec(name, "i32", (BATCH, LENGTH)) for name in ("inputs", "targets"))
    return StepSpec("pinned", params, (), (), tokens, "0" * 64)


class Log(msgspec.Struct):
    """A worker's times, monotonic.

    Attributes:
        leases: (first inner step of the run, when it began) of each lease.
        processor: seconds of the process until the lease began.
    """

    leases: list[tuple[int, float]] = []
    processor: list[float] = []


class PinnedExecutor:
    """Parameters whose steps last for `STEP_S`, whatever they cost here; see `Executor`."""

    device_name = "pinned"

    def __init__(self, spec: StepSpec, inner_steps: int, seed: int, log: Log) -> None:
        self.spec, self._steps, self._log = spec, inner_steps, log
        self._params: dict[str, np.ndarray] = {}
        longest = max(one.size for one in spec.params)
        self._noise = np.random.default_rng(seed).standard_normal(2 * longest, np.float32) * np.float32(NOISE)
        self._taken, self._due = 0, 0.0

    def peak_memory(self) -> int:
        return 0

    def load(self, params: Tensors, buffers: Tensors, opt_state: Tensors | None) -> None:
        self.set_params(params)

    def set_params(self, params: Tensors) -> None:
        for name, values in params.items():
            self._params.setdefault(name, np.empty_like(values))[...] = values

    def reset_opt_state(self) -> None:
        pass

    def train_step(self, step: int, rate: float, batch: Sequence[np.ndarray]) -> StepResult:
        began = time.monotonic()
        if step % self._steps == 0:
            self._log.leases.append((step, began))
            self._log.processor.append(time.process_time())
        # Sleeps that are a little too long do not add up; a pause in the midst of a lease begins anew.
        self._due = (self._due if began - self._due < STEP_S / 4 else began) + STEP_S
        self._taken += 1
        if step % self._steps == self._steps - 1:
            for number, values in enumerate(self._params.values()):
                at = (self._taken * 7919 + number * 104_729) % (len(self._noise) // 2)
                np.subtract(values, self._noise[at : at + values.size].reshape(values.shape), out=values)
        time.sleep(max(0.0, self._due - time.monotonic()))
        return StepResult(2.0, 1.0)

    def eval_step(self, batch: Sequence[np.ndarray]) -> float:
        return 2.0

    def read_params(self, into: Tensors | None = None) -> dict[str, np.ndarray]:
        return {name: values.copy() for name, values in self._params.items()}

    def read_opt_state(self) -> dict[str, np.ndarray]:
        return {}

    def close(self) -> None:
        pass


class TimedExchange:
    """An exchange that adds up its time, on the clock and of the processor; see `Exchange`."""

    def __init__(self, inner: Any, spent: dict[str, list[float]]) -> None:
        self.__dict__.update(_inner=inner, _spent=spent)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._timed(name, found) if name in ("take", "start", "mix", "give") else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began, processor = time.monotonic(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                entry = self._spent.setdefault(name, [0.0, 0.0, 0.0])
                entry[0] += 1
                entry[1] += time.monotonic() - began
                entry[2] += time.thread_time() - processor

        return timed


def settings(preset: Preset, workers: int, rounds: int, given: Sequence[str], source: Path) -> Config:
    """Return the configuration of a run."""
    config = Config(
        run=RunConfig(name="pinned"),
        data=DataConfig(source=str(source)),
        train=TrainConfig(rounds=rounds, batch_size=BATCH, sequence_length=LENGTH, inner_state="reset"),
        optimizer=OptimizerConfig(schedule="constant", warmup_steps=0),
        outer=OuterConfig(loss_rise=0.0),
        fabric=FabricConfig(workers=workers, abandon_after_s=600.0),
        checkpoint=CheckpointConfig(every=SELDOM),
        eval=EvalConfig(every=SELDOM, batches=workers),
    )
    return apply_overrides(config, [*preset.overrides(workers), *given])


def gateway_main(config: Config, spec: StepSpec, folder: Path, pipe: Any) -> None:
    """The gateway's process: sends its port, and the processor seconds of each round at the end."""
    from planetary.fleet.gateway.gateway import Gateway
    from planetary.runs.rounds.gateway.gateway import RoundsSetup
    from planetary.runtime.host_memory import keep_large_blocks

    keep_large_blocks()
    payload.LEAST_COMPILED = 0
    initial = np.random.default_rng(0)
    params = {one.name: 0.02 * initial.standard_normal(one.shape, np.float32) for one in spec.params}
    record = StepRecord(made_from="", environment="", sources={}, spec=spec, params="", buffers="")
    data = prepare(config, folder / "data")

    async def compile_for(prepared: Prepared, *_: object) -> PublishedArtifact:
        return PublishedArtifact(gateway.store.put(b"a step of pinned duration"), 1, "pinned")

    options = GatewayOptions(folder=folder / "run", cache=folder / "gateway", host="127.0.0.1", port=0, resume=False)
    setup = RoundsSetup(
        prepare=lambda fitted, *_: Prepared(fitted, data, TrainStep("", spec, b""), params, {}, record),
        compile_for=compile_for,
    )
    gateway = Gateway(config, options, Security(), setup)
    marks: list[float] = []

    class Follower:
        def write_metrics(self, line: object) -> None:
            marks.append(time.process_time())

        def write_event(self, record: object) -> None:
            pass

    async def serve() -> None:
        gateway.followers.append(Follower())
        await gateway.start()
        pipe.send(gateway.port)
        end = await gateway.run()
        if not end.ok:
            raise SystemExit(end.reason)

    asyncio.run(serve())
    pipe.send(marks)


def worker_main(worker: tuple[int, int], spec: StepSpec, inner_steps: int, folder: Path, pipe: Any) -> None:
    """The process of a worker, its number and its line's port: sends its log when the run has ended."""
    from planetary.fleet.worker.role import WorkerOptions
    from planetary.fleet.worker.worker import WorkerShell
    from planetary.runs.rounds.worker import role as training_role
    from planetary.runtime.host_memory import keep_large_blocks

    keep_large_blocks()
    payload.LEAST_COMPILED = 0
    number, port = worker
    log, spent = Log(), dict[str, list[float]]()
    exchange_of = training_role.exchange_of
    training_role.exchange_of = lambda *args, **more: TimedExchange(exchange_of(*args, **more), spent)
    loader = training_role.TrainingLoader(lambda *_, **__: PinnedExecutor(spec, inner_steps, number, log))
    options = WorkerOptions(
        address=Address("127.0.0.1", port, ""),
        name=f"node-{number}/0",
        node=f"node-{number}",
        backend="cpu",
        target="host",
        device_id=0,
        island=1,
        threads=1,
        cache=folder / f"worker-{number}",
        state=folder / f"worker-{number}" / "state",
        give_up_s=LIMIT_S,
    )
    asyncio.run(WorkerShell(options, rm.ROUNDS, {rm.TrainingJob: loader}).run())
    pipe.send((msgspec.to_builtins(log), spent))


def measure(preset: Preset, mbit: float, args: argparse.Namespace) -> dict[str, Any]:
    """Run one preset over lines of one rate."""
    context, workers = multiprocessing.get_context("spawn"), args.workers
    scratch = args.folder or ("/dev/shm" if Path("/dev/shm").is_dir() else None)
    processes: list[Any] = []

    def start(target: Callable[..., None], *arguments: Any) -> Any:
        here, there = context.Pipe()
        process = context.Process(target=target, args=(*arguments, there), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        return here

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="planetary-utilisation-", dir=scratch)))
        relay = stack.enter_context(ShapedRelay())
        source = folder / "tokens.u16"
        (np.arange(400_000, dtype=np.uint32) * 40_503 % 251).astype("<u2").tofile(source)
        config = settings(preset, workers, args.rounds, args.set, source)
        steps = config.train.inner_steps
        before = os.getloadavg()[0]
        try:
            spec = spec_of(args.slower)
            gateway = start(gateway_main, config, spec, folder)
            port = receive(gateway, processes)
            pipes = []
            for number in range(workers):
                way = Way(args.rtt_ms / 2e3, flow_bytes_per_s=mbit * MBIT / args.slower)
                line = relay.listen({"": RelayRoute(("127.0.0.1", port), way, way)})
                pipes.append(start(worker_main, (number, line), spec, steps, folder))
            marks = receive(gateway, processes)
            found = [receive(pipe, processes) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        lines = [json.loads(line) for line in (folder / "run" / METRICS).read_text().splitlines()]
    load = (before + os.getloadavg()[0]) / 2
    logs = [(msgspec.convert(log, Log), spent) for log, spent in found]
    return {
        **described(preset, config, mbit, args),
        **figures(config, args, logs, lines, marks),
        "load": round(load, 1),
    }


def described(preset: Preset, config: Config, mbit: float, args: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements, and the prediction of `planetary plan`."""
    cluster = Cluster(
        params=spec_of(1).param_count,
        workers=args.workers,
        bandwidth=mbit * MBIT,
        gateway_bandwidth=1e13,
        rtt_s=args.rtt_ms / 1e3,
        step_s=STEP_S,
    )
    given = {key: _value(value) for key, value in (one.split("=", 1) for one in args.set)}
    planned = msgspec.structs.replace(preset, settings={**preset.settings, **given})
    return {
        "preset": preset.name,
        "mbit": mbit,
        "slower": args.slower,
        "round_s": round(config.train.inner_steps * STEP_S, 2),
        "plan": round(predict(planned, cluster).utilisation, 4),
    }


def figures(
    config: Config,
    args: argparse.Namespace,
    found: list[tuple[Log, dict[str, list[float]]]],
    lines: list[dict[str, Any]],
    marks: list[float],
) -> dict[str, Any]:
    """Return the figures of a run from the workers' times, the lines of its metrics and the gateway's times."""
    steps, rounds = config.train.inner_steps, args.rounds
    used, processor = [], []
    for log, _ in found:
        firsts = {first // steps: at for first, at in log.leases}
        spent = {first // steps: at for (first, _), at in zip(log.leases, log.processor, strict=True)}
        used.append((rounds - 2) * steps * STEP_S / (firsts[rounds - 1] - firsts[1]))
        processor.append((spent[rounds - 1] - spent[1]) / (rounds - 2))
    calls = {
        name: [round(statistics.mean(s[name][part] / s[name][0] for _, s in found), 3) for part in (1, 2)]
        for name in sorted(set().union(*(s for _, s in found)))
    }
    steady = lines[1 : rounds - 1]
    moved = {
        f"MB_{way}": round(
            args.slower * statistics.mean(line[f"bytes_{way}"] for line in steady) / args.workers / 1e6, 2
        )
        for way in ("up", "down")
    }
    return {
        "utilisation": round(statistics.mean(used), 4),
        "by_worker": [round(one, 4) for one in used],
        **moved,  # of a worker and round, of all parameters
        "exchange_s": calls,  # a call: [on the clock, of the processor]
        "worker_processor_s": round(statistics.mean(processor), 2),
        "gateway_processor_s": round((marks[rounds - 2] - marks[0]) / (rounds - 2), 2),
    }


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def receive(pipe: Any, processes: Sequence[Any]) -> Any:
    """Return the next message of a process; end the bench when one of them failed."""
    deadline = time.monotonic() + LIMIT_S
    while not pipe.poll(0.5):
        if time.monotonic() > deadline or any(process.exitcode for process in processes):
            raise SystemExit(f"no answer; exit codes: {[process.exitcode for process in processes]}")
    return pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--mbit", type=float, nargs="*", default=[50.0], help="of each line, each way")
    parser.add_argument("--rtt-ms", type=float, default=80.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="the first and the last are not counted")
    parser.add_argument("--slower", type=int, choices=[1, 2, 4, 8], default=1, help="divides lines and parameters")
    parser.add_argument("--folder", help="of runs; default: in memory, so that no disk is measured")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="on top of each preset")
    args = parser.parse_args()
    for mbit in args.mbit:
        for name in args.presets.split(","):
            print(json.dumps(measure(KNOWN[name], mbit, args)), flush=True)


if __name__ == "__main__":
    main()
