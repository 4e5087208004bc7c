"""Times the way from a model to a running training step, and the step itself.

    python bench/train_step.py                    # every stage, then one process with all cores
    python bench/train_step.py --workers 2        # two processes of one thread each, at the same time
    python bench/train_step.py --with-jax         # XLA on the same cores, for comparison

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.core.step import StepSpec
from planetary.runtime.host import host_features, usable_cores
from planetary.runtime.iree_executor import IreeExecutor

BUILDER = "planetary.models.nanochat:build"


def _timed(stages: dict[str, float], name: str, call: Any) -> Any:
    start = time.perf_counter()
    result = call()
    stages[name] = round(time.perf_counter() - start, 3)
    return result


def _batch(spec: StepSpec, vocabulary: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocabulary, tensor.shape).astype(np.int32) for tensor in spec.batch]


def prepare(folder: Path, options: dict[str, int]) -> dict[str, Any]:
    """Export, build, compile and check the model; leave what a worker needs in `folder`."""
    from planetary.compiler import (
        StepOptions,
        Target,
        build_train_step,
        compile_artifact,
        export_model,
        verify_artifact,
    )

    stages: dict[str, float] = {}
    store = BlobStore(folder)
    local = Target("cpu", "host", host_features())
    model = _timed(stages, "export_s", lambda: export_model(BUILDER, options))
    step = _timed(stages, "build_s", lambda: build_train_step(model, StepOptions()))
    artifact = _timed(stages, "compile_s", lambda: compile_artifact(step, local, store))
    report = _timed(
        stages,
        "verify_s",
        lambda: verify_artifact(
            step,
            artifact,
            lambda a, spec: IreeExecutor(store.verified_path(a.digest), spec),
            params=model.initial("param"),
            buffers=model.initial("buffer"),
            local=local,
            cache=store,
        ),
    )
    (folder / "spec.json").write_bytes(msgspec.json.encode(step.spec))
    (folder / "digest").write_text(artifact.digest)
    np.savez(folder / "params.npz", **model.initial("param"))
    return {"parameters": step.spec.param_count, **stages, "verify": report.summary}


def work(folder: Path, threads: int, steps: int, vocabulary: int) -> None:
    """Run steps in this process and print their times: what `--workers` starts."""
    spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=StepSpec)
    path = BlobStore(folder).path((folder / "digest").read_text())
    executor = IreeExecutor(path, spec, threads=threads)
    with np.load(folder / "params.npz") as params:
        executor.load(params, {}, None)
    batch = _batch(spec, vocabulary)
    executor.train_step(0, batch)
    times, used = [], time.process_time()
    for step in range(1, steps + 1):
        start = time.perf_counter()
        executor.train_step(step, batch)
        times.append(1e3 * (time.perf_counter() - start))
    used = time.process_time() - used
    executor.close()
    print(json.dumps({"times": times, "cpu_ms": 1e3 * used / steps}))


def run_workers(folder: Path, workers: int, threads: int, steps: int, vocabulary: int) -> dict[str, Any]:
    """Run `workers` processes at once and sum up their step times."""
    command = [sys.executable, __file__, "--work", str(folder), str(threads), str(steps), str(vocabulary)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(workers)]
    answers = [json.loads(child.communicate(timeout=600)[0]) for child in children]
    times = [t for answer in answers for t in answer["times"]]
    return {
        "workers": workers,
        "threads_each": threads,
        "ms_per_step_median": round(statistics.median(times), 1),
        "ms_per_step_min": round(min(times), 1),
        # Of all threads of one worker; says what a step costs when other programs share the machine.
        "cpu_ms_per_step": round(statistics.mean(answer["cpu_ms"] for answer in answers), 1),
    }


def time_jax(options: dict[str, int], steps: int) -> dict[str, Any]:
    """Time the same step as `jax.jit` runs it, with optax."""
    import jax
    import optax

    from planetary.models import nanochat

    loss_fn, params, example = nanochat.build(**options)
    rng = np.random.default_rng(0)
    vocabulary = nanochat.configure(options).vocab_size
    batch = [rng.integers(0, vocabulary, array.shape).astype(np.int32) for array in example]
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))

    def step(params: Any, state: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = transform.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    run = jax.jit(step, donate_argnums=(0, 1))
    params, state = jax.tree.map(jax.numpy.asarray, params), transform.init(params)
    times = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        params, state, loss = run(params, state)
        loss.block_until_ready()
        times.append(1e3 * (time.perf_counter() - start))
    return {"jax_ms_per_step_median": round(statistics.median(times[2:]), 1)}


def main() -> None:
    """Parse the options and print the figures."""
    if "--work" in sys.argv:
        folder, threads, steps, vocabulary = sys.argv[2:]
        work(Path(folder), int(threads), int(steps), int(vocabulary))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="per worker; default: an equal share of the cores")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--with-jax", action="store_true")
    parser.add_argument("--option", action="append", default=[], help="of the model, e.g. n_layer=2")
    given = parser.parse_args()
    options = {name: int(value) for name, _, value in (item.partition("=") for item in given.option)}
    vocabulary = options.get("vocab_size", 256)
    threads = given.threads or max(1, usable_cores() // given.workers)
    with tempfile.TemporaryDirectory() as folder:
        result = prepare(Path(folder), options)
        result |= run_workers(Path(folder), given.workers, threads, given.steps, vocabulary)
    if given.with_jax:
        result |= time_jax(options, given.steps)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
