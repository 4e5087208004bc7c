"""Part c: a training step of ours, of `jax.jit` and of PyTorch, at 124 and 355 million parameters.

For each size and precision the contenders compile at the same time, in a process each, and then run in turns: the one
whose turn it is has the card's memory for itself, puts its parameters there, runs a few steps and ends. One that runs
out of memory gets a second turn with the smaller batch. In "f32" factors keep their 24 bits; "tf32" is the same with
factors rounded to TF32, which is XLA's default and not PyTorch's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from common import ARTIFACTS, BENCH, IREE, PJRT, REHEARSAL, TORCH, Process, Record, last_json, tail

# Contenders that compile at the same time: size, precision of products, batches from the larger, name.
_ALL = ("planetary", "jax", "torch", "torch-compile")
WAVES: list[list[tuple[str, str, tuple[int, ...], str]]] = [
    [
        *[("124M", "bf16", (16, 8), name) for name in _ALL],
        *[("124M", "tf32", (16, 8), name) for name in _ALL],
        *[("124M", "f32", (16, 8), name) for name in ("planetary", "jax", "torch")],
        ("124M", "f32", (4,), "planetary-iree"),
    ],
    [
        *[("355M", "bf16", (8, 4), name) for name in _ALL],
        *[("355M", "tf32", (8, 4), name) for name in ("planetary", "torch")],
    ],
]
LIMIT_S = float(os.environ.get("GPU_SPEED_S", "240"))
COMPILE_S = 90.0
TURN_S = 45.0
STEPS = 3 if REHEARSAL else 10
PEAKS = {"bf16": 989e12, "tf32": 494e12, "f32": 67e12}
"""Operations a second of an H100 or H200 (SXM) by the vendor's data sheet, dense."""


def operations(options: dict[str, int]) -> float:
    """Return the floating-point operations of one step, counted as PaLM's authors do (attention in full)."""
    width, layers, length = options["n_embd"], options["n_layer"], options["sequence_length"]
    products = layers * 12 * width**2 + options["vocab_size"] * width
    return options["batch_size"] * length * (6.0 * products + 12.0 * layers * width * length)


# --- in a contender's process -------------------------------------------------------------------------------


def contend(name: str, precision: str, folder: Path) -> None:
    """Compile, say so, wait for the turn, run, and print the findings."""
    import msgspec
    import numpy as np

    from planetary.core.step import StepSpec

    options = json.loads((folder / "options.json").read_text())
    spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=StepSpec)
    rng = np.random.default_rng(0)
    params = {p.name: np.float32(0.02) * rng.standard_normal(p.shape, np.float32) for p in spec.params}
    batch = [rng.integers(0, options["vocab_size"], one.shape, np.int32) for one in spec.batch]
    began = time.perf_counter()
    start = _MAKERS[name](folder, spec, options, params, batch, precision)
    print(json.dumps({"compiled_s": round(time.perf_counter() - began, 1)}), flush=True)
    sys.stdin.readline()
    step, peak = start()
    losses, times = [], []
    for index in range(STEPS + 2):
        began = time.perf_counter()
        losses.append(step(index))
        times.append(1e3 * (time.perf_counter() - began))
    milliseconds = float(np.median(times[2:]))
    tokens = options["batch_size"] * options["sequence_length"]
    found = {
        "batch": options["batch_size"],
        "step_ms": milliseconds,
        "first_step_ms": times[0],
        "tokens_per_s": 1e3 * tokens / milliseconds,
        "mfu": operations(options) / (1e-3 * milliseconds) / PEAKS[precision],
        "peak_gib": peak() / 2**30,
        "losses": losses[:4],
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # without taking the runtimes apart


def _planetary(folder: Path, spec: Any, _: Any, params: Any, batch: Any, precision: str) -> Any:
    from planetary.compiler.backends import xla
    from planetary.runtime.executor import open_executor

    if precision == "tf32":
        xla.exact_products = lambda module: 0
    executor = open_executor(folder / "step.mlirbc", spec, backend=PJRT)
    return lambda: _started(executor, params, batch)


def _planetary_iree(folder: Path, spec: Any, _: Any, params: Any, batch: Any, __: str) -> Any:
    from planetary.runtime.executor import open_executor

    executor = open_executor(folder / "step.vmfb", spec, backend=IREE)
    return lambda: _started(executor, params, batch)


def _started(executor: Any, params: Any, batch: Any) -> Any:
    executor.load(params, {}, None)
    return lambda index: executor.train_step(index, 1e-3, batch).loss, executor.peak_memory


def _jax(_: Path, __: Any, options: dict[str, int], params: Any, batch: Any, precision: str) -> Any:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.9"
    import jax
    import optax

    from planetary.models import nanochat
    from planetary.models.initial import flat_names

    jax.config.update("jax_platforms", PJRT.partition(":")[2])
    products = {"bf16": "BF16_BF16_F32", "tf32": "tensorfloat32", "f32": "highest"}[precision]
    jax.config.update("jax_default_matmul_precision", "highest" if REHEARSAL else products)
    model = {key: value for key, value in options.items() if key != "precision"}
    loss_fn, shapes = _loss_and_shapes(nanochat, model)
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.95, weight_decay=0.1))

    def step(params: Any, state: Any, tokens: Any, targets: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens, targets)
        updates, state = transform.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = jax.eval_shape(transform.init, shapes)
    run = jax.jit(step, donate_argnums=(0, 1)).lower(shapes, state, *batch).compile()

    def start() -> Any:
        names = list(flat_names(shapes))
        leaves = [jax.device_put(params[name]) for name in names]
        held = [jax.tree.unflatten(jax.tree.structure(shapes), leaves)]
        held.append(jax.jit(transform.init)(held[0]))

        def once(_: int) -> float:
            held[0], held[1], loss = run(*held, *batch)
            return float(loss)

        stats = lambda: (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)  # noqa: E731
        return once, stats

    return start


def _loss_and_shapes(nanochat: Any, model: dict[str, int]) -> tuple[Any, Any]:
    """Return the loss of a model and the shapes of its parameters, without making any."""
    import jax

    found = []

    def build() -> Any:
        loss_fn, params, _ = nanochat.build(**model)
        found.append(loss_fn)
        return params

    shapes = jax.eval_shape(build)
    return found[0], shapes


def _torch(_: Path, __: Any, options: dict[str, int], params: Any, batch: Any, precision: str) -> Any:
    return _torch_step(options, params, batch, precision, compiled=False)


def _torch_compile(_: Path, __: Any, options: dict[str, int], params: Any, batch: Any, precision: str) -> Any:
    return _torch_step(options, params, batch, precision, compiled=True)


def _torch_step(options: dict[str, int], params: Any, batch: Any, precision: str, *, compiled: bool) -> Any:
    import torch

    sys.path.insert(0, str(BENCH))
    import torch_nanochat

    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")

    def make() -> Any:
        return torch_nanochat.make_step(
            params, options["n_head"], batch, compiled=compiled, device=TORCH, bf16=precision == "bf16"
        )

    on_gpu = TORCH == "cuda"
    made = []
    if compiled:  # by its first step, whose activations go back to the driver
        made.append(make())
        made[0](0)
        if on_gpu:
            torch.cuda.empty_cache()

    def start() -> Any:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        return made[0] if made else make(), torch.cuda.max_memory_allocated if on_gpu else lambda: 0

    return start


_MAKERS = {
    "planetary": _planetary,
    "planetary-iree": _planetary_iree,
    "jax": _jax,
    "torch": _torch,
    "torch-compile": _torch_compile,
}


# --- in the process that compares ---------------------------------------------------------------------------


class Contender:
    """A contender's process."""

    def __init__(self, name: str, size: str, precision: str, batch: int) -> None:
        self.name, self.batch = name, batch
        self._log = ""
        self._process = Process([__file__, name, precision, _folder(size, precision, batch)])

    def ready(self, limit_s: float) -> bool:
        """Wait until it has compiled; return whether it has."""
        return self._read_until("compiled_s", limit_s)

    def take_turn(self, limit_s: float) -> dict[str, Any]:
        """Let it run; return its findings, or how it failed."""
        self._process.tell("go")
        if self._read_until("step_ms", limit_s):
            return last_json(self._log) or {}
        return self.failure("the limit" if self._process.alive else "ended")

    def failure(self, reason: str) -> dict[str, Any]:
        """Return the findings of a contender that has none."""
        text = self._log.lower()
        if not self._process.alive and ("out of memory" in text or "resource_exhausted" in text):
            reason = "out of memory"
        return {"batch": self.batch, "failed": reason, "output": tail(self._log, 6)}

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.alive

    @property
    def compiled(self) -> dict[str, Any]:
        """The seconds that it took to compile, where it has."""
        return next((json.loads(line) for line in self._log.splitlines() if '"compiled_s"' in line), {})

    def _read_until(self, word: str, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while True:  # what it said until now is read even when no time is left
            piece = self._process.read(0.05)
            self._log += piece or ""
            if f'"{word}"' in self._log and self._log.endswith("\n"):
                return True
            if piece is None or (not piece and time.monotonic() > end):
                return False

    def end(self) -> None:
        """Kill it."""
        self._process.end()


def main() -> None:
    """Record all waves, as far as the time goes."""
    record = Record("c-speed")
    record.put("peaks", PEAKS)
    until = time.monotonic() + LIMIT_S
    for wave in WAVES:
        remaining = [(size, precision, batches, name) for size, precision, batches, name in wave if batches]
        while remaining and until - time.monotonic() > 20:
            remaining = _wave(record, remaining, until)
        for size, precision, batches, name in remaining:
            record.put(f"{size} {precision} {name} batch {batches[0]}", {"failed": "no time left"})


def _folder(size: str, precision: str, batch: int) -> Path:
    return ARTIFACTS / f"{size}-{'bf16' if precision == 'bf16' else 'f32'}-{batch}"


def _wave(
    record: Record, wave: list[tuple[str, str, tuple[int, ...], str]], until: float
) -> list[tuple[str, str, tuple[int, ...], str]]:
    """Let contenders compile and run with the first of their batches; return those that need a smaller one."""
    there = [one for one in wave if _folder(one[0], one[1], one[2][0]).exists()]  # a rehearsal has few
    contenders = [Contender(name, size, precision, batches[0]) for size, precision, batches, name in there]
    deadline = min(until, time.monotonic() + COMPILE_S)
    again, late = [], []
    ready = [one.ready(deadline - time.monotonic()) for one in contenders]
    for (size, precision, batches, name), one, is_ready in zip(there, contenders, ready, strict=True):
        if not is_ready and one.alive:
            late.append((f"{size} {precision} {name} batch {batches[0]}", one))
            continue
        found = one.take_turn(min(TURN_S, until - time.monotonic())) if is_ready else one.failure("ended")
        one.end()
        record.put(f"{size} {precision} {name} batch {batches[0]}", found | one.compiled)
        if found.get("failed") == "out of memory" and batches[1:]:
            again.append((size, precision, batches[1:], name))
    for title, one in late:  # the others compiled while they were waited for, and are gone
        is_ready = one.ready(until - time.monotonic() - TURN_S)
        found = one.take_turn(min(TURN_S, until - time.monotonic())) if is_ready else one.failure("not compiled")
        one.end()
        record.put(title, found | one.compiled)
    return again


if __name__ == "__main__":
    if len(sys.argv) > 1:
        contend(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    main()
