"""Models as torch-mlir exports them, from small to as large as this machine takes: time to differentiate, compile and
verify, and the loss over three rounds of ten steps.

    python examples/pcp/export_models.py nanochat nanochat-d4.mlir --depth 4 --width 256 --heads 8 --vocab 65536 ...
    python bench/pcp_shapes.py nanochat-d4.mlir ...

The export needs torch and torch-mlir, this script does not. Tokens are the bytes of Python's own library.
"""

from __future__ import annotations

import argparse
import os
import resource
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np

ROUNDS, STEPS = 3, 10


def tokens(count: int) -> np.ndarray:
    """The first bytes of Python's library."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) > count:
            return np.frombuffer(text, np.uint8)[:count].astype(np.int32)
    raise SystemExit("Python's library has too few bytes")


def row_of(file: Path, rate: float) -> str:
    from planetary.artifacts.store import BlobStore
    from planetary.compiler.backends.iree import compile_artifact
    from planetary.compiler.backends.targets import Target
    from planetary.compiler.check.verify import verify_artifact
    from planetary.compiler.frontend.export import load_model
    from planetary.compiler.step.train_step import StepOptions, build_train_step
    from planetary.core.errors import CompileError
    from planetary.core.schedules import Schedule
    from planetary.runtime.host import host_features
    from planetary.runtime.iree_executor import IreeExecutor

    clock = time.perf_counter
    began = clock()
    model = load_model(file)
    step = build_train_step(model, StepOptions(weight_decay=0))
    schedule = Schedule(kind="constant", peak=rate, warmup_steps=STEPS)
    differentiated = clock() - began
    shape = step.spec.batch[0].shape
    cells = [file.stem, f"{step.spec.param_count / 1e6:.2f}M", f"{shape[0]}×{shape[1]}", f"{differentiated:.1f}"]
    with tempfile.TemporaryDirectory() as folder:
        store, host = BlobStore(Path(folder)), Target("cpu", "host", host_features())
        params, buffers = model.initial("param"), model.initial("buffer")
        try:
            began = clock()
            artifact = compile_artifact(step, host, store)
            cells.append(f"{clock() - began:.1f}")
            report = verify_artifact(
                step,
                artifact,
                lambda made, spec: IreeExecutor(store.path(store.put(made.data)), spec),
                params=params,
                buffers=buffers,
                local=host,
                on_refusal=lambda text: print(text, flush=True),
            )
        except CompileError as error:
            return "| " + " | ".join([*cells, f"refused: {error}"]) + " |"
        cells += [f"{report.seconds:.1f}", f"{report.worst_error:.1%} ({report.against})"]
        run = IreeExecutor(store.path(artifact.digest), step.spec)
        losses, seconds = [], []
        stream = tokens(ROUNDS * STEPS * (shape[0] * shape[1] + 1))
        try:
            run.load(params, buffers, None)
            for index in range(ROUNDS * STEPS):
                size = shape[0] * shape[1]
                part = stream[index * size : (index + 1) * size + 1]
                began = clock()
                loss, _ = run.train_step(
                    index, schedule.rate(index), [part[:-1].reshape(shape), part[1:].reshape(shape)]
                )
                seconds.append(clock() - began)
                losses.append(loss)
        finally:
            run.close()
    cells.append(" → ".join(f"{np.mean(losses[i : i + STEPS]):.2f}" for i in range(0, len(losses), STEPS)))
    cells.append(f"{1000 * float(np.median(seconds)):.0f}")
    cells.append("yes" if any("float64" in note for note in step.notes) else "no")
    return "| " + " | ".join(cells) + " |"


def one_step(file: Path, rate: float) -> None:
    """Compile a model and take a step, telling each part as it ends: for one that its reference does not fit beside."""
    from planetary.artifacts.store import BlobStore
    from planetary.compiler.backends.iree import compile_artifact
    from planetary.compiler.backends.targets import Target
    from planetary.compiler.frontend.export import load_model
    from planetary.compiler.step.train_step import StepOptions, build_train_step
    from planetary.runtime.host import host_features
    from planetary.runtime.iree_executor import IreeExecutor

    began = time.perf_counter()

    def tell(what: str) -> None:
        peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        print(f"{file.stem}: {time.perf_counter() - began:.0f} s, peak {peak / 2**20:.1f} GiB: {what}", flush=True)

    model = load_model(file)
    step = build_train_step(model, StepOptions(weight_decay=0))
    shape = step.spec.batch[0].shape
    tell(f"{step.spec.param_count / 1e6:.0f}M parameters, batch {shape[0]}×{shape[1]}, differentiated")
    with tempfile.TemporaryDirectory() as folder:
        store = BlobStore(Path(folder))
        artifact = compile_artifact(step, Target("cpu", "host", host_features()), store)
        tell("compiled")
        run = IreeExecutor(store.path(artifact.digest), step.spec)
        run.load(model.initial("param"), model.initial("buffer"), None)
        tell("parameters are loaded")
        part = tokens(shape[0] * shape[1] + 1)
        for index in range(2):
            loss, norm = run.train_step(index, rate, [part[:-1].reshape(shape), part[1:].reshape(shape)])
            tell(f"step {index + 1}: loss {loss:.4f}, norm of the gradient {norm:.3f}")
        run.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--one-step", action="store_true", help="compile and take two steps on one batch; no reference")
    given = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if given.one_step:
        for file in given.files:
            one_step(file, given.rate)
        return
    print(
        "| model | parameters | batch | differentiate s | compile s | verify s | worst tensor, of the accepted error | "
        "loss, mean of rounds 1 → 2 → 3 | step ms | f64 demoted |\n|---|---|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    for file in given.files:
        print(row_of(file, given.rate), flush=True)


if __name__ == "__main__":
    main()
