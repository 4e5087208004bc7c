"""What the check of a mixture's program costs: making the reference, its bytes, and every worker's own comparison.

    python bench/program_trial.py examples/parallax-tiny.toml [--set KEY=VALUE ...] [--backends cpu,pjrt:cpu]

A second comparison in the same process shows what is compilation and what is the trial itself; a worker that starts
again on the same device makes none. Times are also given as multiples of one `composer_gradients`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.iree import compile_program
from planetary.compiler.backends.targets import parse_target
from planetary.core.config import load_config
from planetary.core.step import ProgramSpec
from planetary.core.trials.program import FunctionTrial, encode_program_reference
from planetary.fleet.preparation.program_compiling import reference_from_xla
from planetary.runs.mixture.preparation import prepare_mixture
from planetary.runtime.device_check import check_program
from planetary.runtime.device_program import open_program
from planetary.runtime.host import host_features


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--backends", default="cpu,pjrt:cpu")
    args = parser.parse_args()
    config = load_config(args.config, overrides=args.set)
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_mixture(config, Path(folder), lambda _: None)
        program = prepared.program
        vocabulary = prepared.plan.model.vocab_size
        spec = ProgramSpec("latent_moe", dict(program.functions), vocabulary, program.digest)
        print(f"{prepared.param_count / 1e6:.2f}M parameters, {len(spec.functions)} functions")
        made_s, reference = timed(lambda: reference_from_xla(program.portable, spec))
        nbytes = len(encode_program_reference(reference))
        spared = sum(result.accepted.spared for results in reference.functions.values() for result in results)
        print(f"reference: {made_s:.1f} s, {nbytes / 2**20:.2f} MiB, {spared} numbers spared")
        trial = FunctionTrial(spec.stablehlo_digest, "composer_gradients", spec.functions["composer_gradients"])
        given = trial.arguments(vocabulary)
        for backend in args.backends.split(","):
            target = parse_target(backend, host_features())
            store = BlobStore(Path(folder) / "blobs")
            compile_s, artifact = timed(lambda: compile_program(program.portable, spec, target, store))  # noqa: B023
            open_s, loaded = timed(lambda: open_program(artifact.data, program, backend=backend))  # noqa: B023
            check = lambda: check_program(loaded, reference, spec.functions)  # noqa: B023, E731
            first_s, report = timed(check)
            again_s, _ = timed(check)
            one = statistics.median(timed(lambda: loaded("composer_gradients", given))[0] for _ in range(5))  # noqa: B023
            print(
                f"{backend}: compiled in {compile_s:.1f} s, opened in {open_s:.2f} s, checked in {first_s:.2f} s, "
                f"again in {again_s:.2f} s = {again_s / one:.1f} × composer_gradients ({1e3 * one:.0f} ms); worst "
                f"{report.worst_tensor} at {report.worst_error:.2g} of the accepted error"
            )


if __name__ == "__main__":
    main()
