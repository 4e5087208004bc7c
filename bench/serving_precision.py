"""What parameters in fewer bits cost a served model, and what they save: `python bench/serving_precision.py RUN`.

Every precision is compiled, compared with its own whole forward pass as a worker does, and timed in turns with the
others, on this machine's CPU. Their texts are compared with float32's: the mean divergence of the next token on
held-out text, in nats.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import get_args

import jax
import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.iree import compile_program
from planetary.compiler.backends.targets import Target
from planetary.core.config import config_from_tables
from planetary.core.step import ProgramSpec
from planetary.models.context import WholeText
from planetary.run.model.served import load_traced
from planetary.runs.serve.messages import ComputeCall
from planetary.runs.serve.model_check import check_model
from planetary.runs.serve.program.weight_precision import Precision
from planetary.runs.serve.role import LoadedModel
from planetary.runtime.host import host_features
from planetary.runtime.program_runner import Program, open_program

REPEATS = 60


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    args = parser.parse_args()
    loaded, sizes, rows = {}, {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        for precision in get_args(Precision):
            serve = {"model": str(args.run.resolve()), "weights": precision, "batch": 8, "context": 128}
            config = config_from_tables({"serve": serve})
            model = load_traced(config)
            shape = model.shape(config.serve)
            program = model.program(shape)
            spec = ProgramSpec("bench", dict(program.functions), shape.integers_below, program.digest, program.weights)
            target = Target("cpu", "host", host_features())
            artifact = compile_program(program.portable, spec, target, BlobStore(Path(scratch) / precision))
            runner = open_program(artifact.data, Program(b"", program.functions), backend="cpu")
            loaded[precision] = LoadedModel(runner, shape, model.arrays())
            report = check_model(loaded[precision].compute, shape, model.trial(shape), runner.device_name)
            print(f"{precision}: {report.summary}", flush=True)
            sizes[precision] = sum(array.nbytes for array in model.arrays().values())
            text = np.frombuffer(Path(argparse.__file__).read_bytes()[: 8 * 128], np.uint8).reshape(8, 128)
            tokens = jax.numpy.asarray(text.astype(np.int32))
            rows[precision] = np.asarray(jax.nn.log_softmax(model.decode(model.params, tokens, WholeText(tokens))))
    calls = {"one text": _decode(1), "eight texts": _decode(8), "a chunk of 64": _prefill(64)}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(REPEATS):
        for precision, one in loaded.items():
            for name, call in calls.items():
                began = time.perf_counter()
                one.compute(call)
                times.setdefault((precision, name), []).append(time.perf_counter() - began)
    exact = rows["f32"]
    print("precision | bytes | " + " | ".join(calls) + " | divergence in nats")
    for precision in loaded:
        # The fastest quarter: other work on the machine makes the rest slow.
        ratios = [_fast(times[precision, name]) / _fast(times["f32", name]) for name in calls]
        divergence = float(np.mean(np.sum(np.exp(exact) * (exact - rows[precision]), axis=-1)))
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{precision} | {sizes[precision] / sizes['f32']:.2f} | {cells} | {divergence:.2g}")


def _fast(times: list[float]) -> float:
    return statistics.mean(sorted(times)[: len(times) // 4])


def _decode(batch: int) -> ComputeCall:
    pages = tuple(tuple(range(1 + 8 * row, 9 + 8 * row)) for row in range(batch))
    return ComputeCall(
        call=0,
        function=f"decode_b{batch}_p8",
        tokens=((97,),) * batch,
        starts=(100,) * batch,
        pages=pages,
        full=False,
    )


def _prefill(chunk: int) -> ComputeCall:
    name = f"prefill_s{chunk}_p8"
    return ComputeCall(
        call=0, function=name, tokens=((97,) * chunk,), starts=(0,), pages=(tuple(range(1, 9)),), full=False
    )


if __name__ == "__main__":
    main()
