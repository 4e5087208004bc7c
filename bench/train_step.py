"""Compares the time and memory of a whole training step: ours, `jax.jit`, PyTorch.

    python bench/train_step.py                              # the two small sizes, every contender
    python bench/train_step.py --sizes 10M 30M --contenders iree torch --rounds 3 --no-write
    python bench/train_step.py --emulate avx2               # as on a CPU without AVX-512 and AMX

Every contender runs in a process of its own, with the same NanoChat, the same parameters and batch, AdamW and clipping
by global norm, in float32. They take turns: in each round every one runs a few steps while the others wait. What is
reported is the median over all steps but the first round's, the processor time of a step (less disturbed by other
programs than its duration), the peak resident memory of the process, and ratios.

`iree` has the default flags, `iree-tiled` those of `planetary tune`'s candidate "data-tiling".

`--emulate avx2` keeps every contender from newer instructions than AVX2: IREE compiles for `x86-64-v3`, XLA, PyTorch,
oneDNN and MKL are told by their environment. Clock rate, caches and memory stay those of this machine.
Writes bench/results/train_step.md, a table for each class of CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

BUILDER = "planetary.models.nanochat:build"
SIZES: dict[str, dict[str, int]] = {
    # "main" is what one of the two workers of examples/stdlib.toml runs, on one core.
    "main": {"n_layer": 4, "n_embd": 256, "n_head": 4, "batch_size": 2, "sequence_length": 128, "threads": 1},
    "3.2M": {"n_layer": 4, "n_embd": 256, "n_head": 4, "batch_size": 8, "sequence_length": 128},
    "10M": {"n_layer": 6, "n_embd": 384, "n_head": 6, "batch_size": 8, "sequence_length": 256},
    "30M": {"n_layer": 10, "n_embd": 512, "n_head": 8, "batch_size": 4, "sequence_length": 512},
}
# Class of CPU -> IREE's target, and the environment that limits the others to its instructions.
EMULATED: dict[str, tuple[str, dict[str, str]]] = {
    "avx2": (
        "x86-64-v3",
        {
            "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
    ),
}
CONTENDERS = ("iree", "iree-tiled", "pjrt", "jax", "torch", "torch-compile")
RESULTS = Path(__file__).parent / "results" / "train_step.md"


# --- in a contender's process -------------------------------------------------------------------------------


def _contend(name: str, folder: Path, threads: int) -> None:
    """Run as many steps as each line of standard input says, and answer with one JSON line each time."""
    options = json.loads((folder / "options.json").read_text())
    with np.load(folder / "params.npz") as file:
        params = dict(file)
    with np.load(folder / "batch.npz") as file:
        batch = [file["tokens"], file["targets"]]
    step = _MAKERS[name](folder, options, params, batch, threads)
    done = 0
    for line in sys.stdin:
        times, losses, used = [], [], time.process_time()
        for _ in range(int(line)):
            began = time.perf_counter()
            losses.append(step(done))
            times.append(1e3 * (time.perf_counter() - began))
            done += 1
        used = 1e3 * (time.process_time() - used) / max(1, int(line))
        peak = _peak_mib()
        print(json.dumps({"times": times, "cpu": used, "peak": peak, "losses": losses}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # without taking the runtimes apart


def _peak_mib() -> float:
    """Most memory that this process held. `getrusage` would count what its parent held when it was started."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def _executor(artifact: Path, params: Any, batch: Any, backend: str, threads: int) -> Callable[[int], float]:
    from planetary.core.step import StepSpec
    from planetary.runtime.executor import open_executor

    spec = msgspec.json.decode((artifact.parent / "spec.json").read_bytes(), type=StepSpec)
    executor = open_executor(artifact, spec, backend=backend, threads=threads)
    executor.load(params, {}, None)
    return lambda step: executor.train_step(step, 1e-3, batch).loss


def _iree(folder: Path, _: Any, params: Any, batch: Any, threads: int) -> Callable[[int], float]:
    return _executor(folder / "step.vmfb", params, batch, "cpu", threads)


def _iree_tiled(folder: Path, _: Any, params: Any, batch: Any, threads: int) -> Callable[[int], float]:
    return _executor(folder / "tiled.vmfb", params, batch, "cpu", threads)


def _pjrt(folder: Path, _: Any, params: Any, batch: Any, threads: int) -> Callable[[int], float]:
    return _executor(folder / "step.mlirbc", params, batch, "pjrt:cpu", threads)


def _jax(_: Path, options: dict[str, int], __: Any, batch: Any, threads: int) -> Callable[[int], float]:
    os.environ["NPROC"] = str(threads)
    import jax
    import optax

    from planetary.models import nanochat

    loss_fn, params, _example = nanochat.build(**options)
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.95, weight_decay=0.1))

    def step(params: Any, state: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = transform.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    run = jax.jit(step, donate_argnums=(0, 1))
    held = [jax.tree.map(jax.numpy.asarray, params)]
    held.append(transform.init(held[0]))

    def once(_: int) -> float:
        held[0], held[1], loss = run(*held)
        return float(loss.block_until_ready())

    return once


def _torch(_: Path, options: dict[str, int], params: Any, batch: Any, threads: int) -> Callable[[int], float]:
    import torch
    import torch_nanochat

    torch.set_num_threads(threads)
    return torch_nanochat.make_step(params, options["n_head"], batch, compiled=False)


def _torch_compile(_: Path, options: dict[str, int], params: Any, batch: Any, threads: int) -> Callable[[int], float]:
    import torch
    import torch_nanochat

    torch.set_num_threads(threads)
    return torch_nanochat.make_step(params, options["n_head"], batch, compiled=True)


_MAKERS = {
    "iree": _iree,
    "iree-tiled": _iree_tiled,
    "pjrt": _pjrt,
    "jax": _jax,
    "torch": _torch,
    "torch-compile": _torch_compile,
}


# --- in the process that compares ---------------------------------------------------------------------------


def _prepare(folder: Path, options: dict[str, int], emulate: str | None, *, tiled: bool) -> dict[str, float]:
    """Leave in `folder` what the contenders need; return the seconds of each stage."""
    from planetary.compiler.backends.flag_choice import CANDIDATES
    from planetary.compiler.backends.iree import compile_artifact
    from planetary.compiler.backends.targets import Target
    from planetary.compiler.frontend.export import export_model
    from planetary.compiler.step.train_step import StepOptions, build_train_step
    from planetary.runtime.host import architecture, host_features

    target = Target("cpu", EMULATED[emulate][0], architecture()) if emulate else Target("cpu", "host", host_features())
    seconds = {}
    began = time.perf_counter()
    model = export_model(BUILDER, options)
    seconds["export"] = time.perf_counter() - began
    began = time.perf_counter()
    step = build_train_step(model, StepOptions())
    seconds["differentiate"] = time.perf_counter() - began
    began = time.perf_counter()
    artifact = compile_artifact(step, target, further_flags=())
    seconds["compile"] = time.perf_counter() - began
    if tiled:
        tiling = next(candidate for candidate in CANDIDATES["cpu"] if candidate.name == "data-tiling")
        (folder / "tiled.vmfb").write_bytes(compile_artifact(step, target, further_flags=tiling.flags).data)
    rng = np.random.default_rng(0)
    shape = (options["batch_size"], options["sequence_length"])
    tokens, targets = (rng.integers(0, 256, shape).astype(np.int32) for _ in range(2))
    np.savez(folder / "batch.npz", tokens=tokens, targets=targets)
    np.savez(folder / "params.npz", allow_pickle=False, **model.initial("param"))
    (folder / "options.json").write_text(json.dumps(options))
    (folder / "spec.json").write_bytes(msgspec.json.encode(step.spec))
    (folder / "step.mlirbc").write_bytes(step.portable)
    (folder / "step.vmfb").write_bytes(artifact.data)
    return seconds


class _Contender:
    """A contender's process."""

    def __init__(self, name: str, folder: Path, threads: int, emulate: str | None) -> None:
        self.name = name
        self.times: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float] = []
        self.peak = 0.0
        command = [sys.executable, __file__, "--contend", name, str(folder), str(threads)]
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": str(threads)}
        environment |= EMULATED[emulate][1] if emulate else {}
        self.log = (folder / f"{name}.log").open("w+")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )

    def run(self, steps: int, *, warm: bool) -> bool:
        """Run steps, counting them only if `warm`; return whether the process still lives."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        line = self._process.stdout.readline()
        if not line:
            return False
        answer = json.loads(line)
        self.losses += answer["losses"]
        self.peak = answer["peak"]
        if warm:
            self.times += answer["times"]
            self.cpu.append(answer["cpu"])
        return True

    def end(self) -> str:
        """End the process; return the last line that it wrote to standard error."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended by itself
                self._process.stdin.close()
        self._process.wait(60)
        self.log.seek(0)
        lines = self.log.read().strip().splitlines()
        self.log.close()
        return lines[-1] if lines else ""


def _compare(name: str, contenders: list[str], rounds: int, steps: int, emulate: str | None) -> dict[str, Any]:
    options = dict(SIZES[name])
    threads = options.pop("threads", os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        seconds = _prepare(folder, options, emulate, tiled="iree-tiled" in contenders)
        print(f"{name}: " + ", ".join(f"{stage} {s:.1f} s" for stage, s in seconds.items()), flush=True)
        racing = [_Contender(contender, folder, threads, emulate) for contender in contenders]
        for round_ in range(rounds + 1):
            for one in list(racing):
                if not one.run(steps if round_ else 2, warm=round_ > 0):
                    racing.remove(one)
                    print(f"  {one.name} ended: {one.end()}", flush=True)
        found: dict[str, Any] = {}
        for one in racing:
            one.end()
            found[one.name] = {
                "ms": statistics.median(one.times),
                "fastest": min(one.times),
                "cpu": statistics.median(one.cpu),
                "peak": one.peak,
                "losses": one.losses[:3],
            }
            print(f"  {one.name}: {json.dumps(found[one.name])}", flush=True)
    return {"seconds": seconds, "threads": threads, "options": options, "contenders": found}


def _rows(name: str, found: dict[str, Any]) -> list[str]:
    by_name = found["contenders"]
    rows = []
    for contender, one in by_name.items():

        def ratio(other: str, key: str, one: dict[str, Any] = one) -> str:
            return f"{one[key] / by_name[other][key]:.2f}" if other in by_name else "-"

        rows.append(
            f"| {name} | {contender} | {one['ms']:.0f} | {one['fastest']:.0f} | {one['cpu']:.0f} | {one['peak']:.0f} | "
            f"{ratio('jax', 'ms')} | {ratio('jax', 'cpu')} | {ratio('torch', 'ms')} | {ratio('torch', 'cpu')} | "
            f"{ratio('torch', 'peak')} |"
        )
    return rows


def _write(results: dict[str, Any], load: float, emulate: str | None) -> None:
    """Put the measured table into the results page, between its markers; the rest of the page is written by hand."""
    begin = f"<!-- measured {emulate} -->" if emulate else "<!-- measured -->"
    lines = [
        f"`{' '.join(['python', 'bench/train_step.py', *sys.argv[1:]])}`, {datetime.date.today().isoformat()}, "
        f"{os.cpu_count()} shared cores ({_processor()}), load {load:.1f} before and {os.getloadavg()[0]:.1f} after",
        "",
        "| size | contender | ms, median | ms, least | CPU ms | peak MiB | ÷ jax | CPU ÷ jax | ÷ torch | CPU ÷ torch "
        "| peak ÷ torch |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(row for name, found in results.items() for row in _rows(name, found)),
    ]
    page = RESULTS.read_text()
    before, rest = page.split(begin)
    RESULTS.write_text(before + begin + "\n" + "\n".join(lines) + "\n" + _END + rest.split(_END, 1)[1])


_END = "<!-- end -->"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    """Parse the options, compare, and print what was found."""
    if "--contend" in sys.argv:
        name, folder, threads = sys.argv[2:]
        _contend(name, Path(folder), int(threads))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["main", "3.2M"], choices=list(SIZES))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each contender in each round")
    parser.add_argument(
        "--emulate", choices=list(EMULATED), help="a class of CPU with fewer instructions than this one"
    )
    parser.add_argument("--no-write", action="store_true", help="leave the results page as it is")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    results = {name: _compare(name, given.contenders, given.rounds, given.steps, given.emulate) for name in given.sizes}
    if not given.no_write:
        _write(results, load, given.emulate)
    for name, found in results.items():
        print("\n".join(_rows(name, found)))


if __name__ == "__main__":
    main()
