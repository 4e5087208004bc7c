"""Makes the files that `bench/gpu.sh` carries to a machine with an NVIDIA GPU: `python bench/gpu/prepare.py FOLDER`.

Each training step is a folder with the portable StableHLO, its signature, and where IREE is to run it a module for the
chip of `--target`; the small ones have the reference of their check too. IREE's compiler is too large to carry, and
StableHLO is made here because exporting a model takes longer than the GPU needs for it. `--rehearse` makes tiny ones
for this machine's CPU instead.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import msgspec

from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.targets import Target, nearest
from planetary.compiler.check.verify import reference_digest
from planetary.compiler.frontend.export import export_model
from planetary.compiler.step.train_step import build_train_step
from planetary.core.configuration.step_options import StepOptions
from planetary.core.step import ProgramSpec
from planetary.fleet.preparation.compile_process import compile_and_verify
from planetary.fleet.preparation.compiling import CompileTarget
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.program.programs import expert_program
from planetary.runtime.host import host_features

BUILDER = "planetary.models.nanochat:build"
MAIN = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 256, "sequence_length": 128, "batch_size": 8}
# 25,600 words make the two sizes 124.3 and 354.4 million parameters, embedding and head being separate.
_124M = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 25600, "sequence_length": 1024}
_355M = {"n_layer": 24, "n_head": 16, "n_embd": 1024, "vocab_size": 25600, "sequence_length": 1024}
# Name -> options of the model, precision of its products, whether IREE gets a module, whether it is checked.
STEPS: dict[str, tuple[dict[str, int], str, bool, bool]] = {
    "main-f32": (MAIN, "f32", True, True),
    "main-bf16": (MAIN, "bf16", False, True),
    "124M-f32-4": (_124M | {"batch_size": 4}, "f32", True, False),
    "124M-bf16-16": (_124M | {"batch_size": 16}, "bf16", False, False),
    "124M-bf16-8": (_124M | {"batch_size": 8}, "bf16", False, False),
    "124M-f32-16": (_124M | {"batch_size": 16}, "f32", False, False),
    "124M-f32-8": (_124M | {"batch_size": 8}, "f32", False, False),
    "355M-bf16-8": (_355M | {"batch_size": 8}, "bf16", False, False),
    "355M-bf16-4": (_355M | {"batch_size": 4}, "bf16", False, False),
    "355M-f32-8": (_355M | {"batch_size": 8}, "f32", False, False),
    "355M-f32-4": (_355M | {"batch_size": 4}, "f32", False, False),
}
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 256, "sequence_length": 16}
REHEARSED: dict[str, tuple[dict[str, int], str, bool, bool]] = {
    "main-f32": (TINY | {"batch_size": 2}, "f32", True, True),
    "main-bf16": (TINY | {"batch_size": 2}, "bf16", False, True),
    "124M-f32-4": (TINY | {"batch_size": 2}, "f32", True, False),
    "124M-bf16-16": (TINY | {"batch_size": 4}, "bf16", False, False),
    "124M-f32-16": (TINY | {"batch_size": 4}, "f32", False, False),
}
_MIXTURE = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_kv_head": 2, "n_expert": 4, "n_active": 2, "n_latent": 8}


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="sm_90", help="chip of IREE's modules (default: sm_90)")
    parser.add_argument("--only", nargs="+", help="names of steps")
    parser.add_argument("--no-modules", action="store_true", help="nothing for IREE, whose compiler need not be here")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    compiled, note = nearest("cuda", given.target)
    if given.rehearse:
        target, note = Target("cpu", "host", host_features()), "made for this machine's CPU"
    else:
        target = Target("cuda", given.target)
    (given.folder / "about.json").write_text(json.dumps({"target": given.target, "compiled": compiled, "note": note}))
    cache = given.folder.with_name(given.folder.name + ".cache")
    steps = REHEARSED if given.rehearse else STEPS
    for name in given.only or ["mixture", *steps]:
        began = time.monotonic()
        out = given.folder / name
        out.mkdir(exist_ok=True)
        if name == "mixture":
            _mixture(out, None if given.no_modules else target, cache)
        else:
            _step(out, steps[name], None if given.no_modules else target, cache)
        size = sum(path.stat().st_size for path in out.iterdir()) / 1e6
        print(f"{name}: {size:.2f} MB, {time.monotonic() - began:.0f} s", flush=True)


def _step(out: Path, made: tuple[dict[str, int], Any, bool, bool], target: Target | None, cache: Path) -> None:
    from planetary.compiler.backends.iree import compile_artifact

    options, precision, module, checked = made
    model = export_model(BUILDER, options)
    step = build_train_step(model, StepOptions(precision=precision))
    (out / "step.mlirbc").write_bytes(step.portable)
    (out / "spec.json").write_bytes(msgspec.json.encode(step.spec))
    (out / "options.json").write_text(json.dumps(options | {"precision": precision}))
    store = BlobStore(cache / "blobs")
    if checked:
        cpu = CompileTarget("pjrt:cpu", "stablehlo", "")
        params, buffers = model.initial("param"), model.initial("buffer")
        compile_and_verify(step.portable, step.spec, cpu, params=params, buffers=buffers, cache=cache)
        digest = reference_digest(store, step.spec)
        assert digest is not None
        (out / "reference").write_bytes(store.get(digest))
    if module and target is not None:
        (out / "step.vmfb").write_bytes(compile_artifact(step, target, store).data)


def _mixture(out: Path, target: Target | None, cache: Path) -> None:
    from planetary.compiler.backends.iree import compile_program

    config = LatentMoeConfig(**_MIXTURE, n_hidden=16, vocab_size=64, sequence_length=8, batch_size=2)
    program = expert_program(config, 2, 16, StepOptions())
    spec = ProgramSpec("latent_moe", dict(program.functions), 64, program.digest)
    (out / "program.mlirbc").write_bytes(program.portable)
    (out / "spec.json").write_bytes(msgspec.json.encode(spec))
    if target is not None:
        artifact = compile_program(program.portable, spec, target, BlobStore(cache / "blobs"))
        (out / "program.vmfb").write_bytes(artifact.data)


if __name__ == "__main__":
    main()
