"""A training step in StableHLO to the artifact for a target: a VMFB by IREE's compiler, through a cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from planetary.compiler import ir
from planetary.compiler.backends.artifact_manifest import ArtifactCache, ArtifactManifest, read_manifest, write_manifest
from planetary.compiler.backends.flag_choice import flag_key, read_choice
from planetary.compiler.backends.pipeline import PIPELINE_VERSION, compiler_version
from planetary.compiler.backends.targets import Target, compiler_flags, nearest
from planetary.compiler.rewrites import normalise
from planetary.compiler.rewrites.stages import into_stages
from planetary.compiler.rewrites.weight_blocks import AVX2, AVX512, VectorUnit, store_in_blocks
from planetary.compiler.step.step_module import TrainStep, replaced_arguments
from planetary.core.artifact_label import ArtifactLabel
from planetary.core.errors import CompileError, TrustError
from planetary.core.step import FunctionSpec, ProgramSpec, StepSpec
from planetary.core.tensors import WeightBlocks

_KEEP_CONSTANTS = "--iree-opt-const-expr-hoisting=false"
"""For a step that draws random numbers: the keys of an evaluation are constants, and IREE 3.13 loads the parts of one
that is split from a buffer that is not bound."""
MOST_RESULTS = 256
"""Of a training step that is compiled as one function. Above, IREE takes far longer than for stages; with 225 results
stages saved 12 % of its time (bench/results/start.md)."""
COMPILE_TIMEOUT_S = 1800.0
_SAVE_MEMORY = "--iree-stream-partitioning-favor=min-peak-memory"
"""For a step that recomputes activations: IREE would otherwise start some recomputation as soon as the inputs exist."""


@dataclass(frozen=True)
class Artifact:
    """A compiled training step.

    Attributes:
        data: a VMFB, or the portable StableHLO itself for the PJRT backends.
        digest: their sha256.
        key: key of the inputs: StableHLO digest, compiler version, target and flags.
        target: that it was made for.
        cached: whether it came from the cache.
    """

    data: bytes = field(repr=False)
    digest: str
    key: str
    target: Target
    cached: bool


def artifact_key(
    stablehlo_digest: str, target: Target, further_flags: Sequence[str] = (), weights: Sequence[str] = ()
) -> str:
    """Return the cache key of a target's artifact, as readable JSON; `weights` are a program's."""
    key: dict[str, object] = {
        "stablehlo": stablehlo_digest,
        "iree": compiler_version(),
        "backend": target.backend,
        "target": target.name,
        "features": target.features,
        "flags": [*compiler_flags(target), *further_flags],
        "pipeline": PIPELINE_VERSION,
    }
    if weights:
        key["weights"] = hashlib.sha256("\n".join(weights).encode()).hexdigest()
    return "vmfb " + json.dumps(key, sort_keys=True)


def choice_key(train_step: TrainStep, target: Target) -> str:
    """Return the key under which the flags are kept chosen for a step and a target."""
    return flag_key(
        train_step.portable,
        compiler=compiler_version(),
        backend=target.backend,
        target=target.name,
        features=target.features,
    )


def compile_artifact(
    train_step: TrainStep,
    target: Target,
    cache: ArtifactCache | None = None,
    *,
    further_flags: Sequence[str] | None = None,
) -> Artifact:
    """Compile a training step for `target`, or return the cached artifact.

    For the PJRT backends the artifact is the portable StableHLO itself: XLA compiles it where it runs.

    Args:
        train_step: to compile.
        target: to compile for.
        cache: where compiled steps are kept.
        further_flags: of IREE's compiler, beside the target's own. None: those chosen for this step and target by
            measurement (`planetary tune`), if the cache knows a choice.

    Raises:
        UserError: the target is unknown.
        CompileError: IREE refuses the module; the text has the first complaint.
    """
    if target.is_pjrt:
        entry = _portable_entry(train_step.portable, train_step.spec, target, cache, train_step.notes)
        return entry.made(train_step.portable)
    if further_flags is None:
        choice = None if cache is None else read_choice(cache, choice_key(train_step, target))
        further_flags = () if choice is None else choice.flags.flags
    flags = [*compiler_flags(target), *further_flags]
    key = artifact_key(train_step.spec.stablehlo_digest, target, further_flags)
    entry = _Entry(cache, train_step.portable, train_step.spec, target, key, flags, train_step.notes)
    known = entry.known()
    if known is not None:
        return known
    label, replaced = _label(target, train_step.spec.stablehlo_digest), replaced_arguments(train_step.spec)
    with ir.new_context():
        module = ir.parse_module(train_step.portable)
        recomputes = ir.contains(module, "stablehlo.optimization_barrier")  # asked now: `for_target` adds barriers
        if len(replaced) > MOST_RESULTS:
            staged = into_stages(module, "train_step", replaced)
            normalise.rewrite_for_iree(module)
            first = ir.functions(module)[staged.stages[0].function]
            normalise.bake_label(first, msgspec.structs.replace(label, staged=(staged,)))
        else:
            normalise.for_target(module, label, replaced)
        text = ir.to_text(module)
    if recomputes:
        flags = [*flags, _SAVE_MEMORY]
    if train_step.spec.keys:
        flags = [*flags, _KEEP_CONSTANTS]
    return replace(entry, flags=flags).made(run_compiler(text, flags))


def _label(target: Target, stablehlo_digest: str, blocks: tuple[WeightBlocks, ...] = ()) -> ArtifactLabel:
    return ArtifactLabel(
        iree=compiler_version(),
        backend=target.backend,
        target=target.name,
        features=target.features,
        stablehlo=stablehlo_digest,
        blocks=blocks,
    )


def compile_program(portable: bytes, spec: ProgramSpec, target: Target, cache: ArtifactCache) -> Artifact:
    """Compile all functions of a module for `target` into one labelled artifact, or return the cached one.

    For programs of several functions that are called one by one; a training step is compiled by `compile_artifact`. A
    function writes over the arguments replaced by results (`FunctionSpec.replaced`). A CPU's functions take weights in
    blocks, of which the label tells. The PJRT backends take the module as it is.

    Args:
        portable: the module.
        spec: functions, for the artifact's manifest.
        target: to compile for.
        cache: where compiled programs are kept.

    Raises:
        UserError: the target is unknown.
        CompileError: IREE refuses the module; the text has the first complaint.
    """
    digest = spec.stablehlo_digest
    if target.is_pjrt:
        return _portable_entry(portable, spec, target, cache).made(portable)
    flags = compiler_flags(target)
    entry = _Entry(cache, portable, spec, target, artifact_key(digest, target, weights=spec.weights), flags)
    known = entry.known()
    if known is not None:
        return known
    with ir.new_context():
        module = ir.parse_module(portable)
        blocks: tuple[WeightBlocks, ...] = ()
        if target.backend == "cpu":
            blocks = store_in_blocks(module, spec.functions, spec.weights, vector_unit(target))
        prepare_functions(module, spec.functions)
        normalise.bake_label(next(iter(ir.functions(module).values())), _label(target, digest, blocks))
        text = ir.to_text(module)
    return entry.made(run_compiler(text, flags))


def _portable_entry(
    portable: bytes,
    spec: StepSpec | ProgramSpec,
    target: Target,
    cache: ArtifactCache | None,
    notes: tuple[str, ...] = (),
) -> _Entry:
    return _Entry(cache, portable, spec, target, f"stablehlo {spec.stablehlo_digest}", (), notes)


@dataclass(frozen=True)
class _Entry:
    """One artifact's place in a cache, beside manifest and source."""

    cache: ArtifactCache | None
    portable: bytes
    spec: StepSpec | ProgramSpec
    target: Target
    key: str
    flags: Sequence[str]
    notes: tuple[str, ...] = ()

    def known(self) -> Artifact | None:
        """Return the cached artifact; None without one."""
        digest = self.cache.resolve(self.key) if self.cache is not None else None
        if self.cache is None or digest is None:
            return None
        # A damaged entry was removed by the cache that found it so; the artifact is then built again.
        with contextlib.suppress(TrustError):
            found = Artifact(self.cache.get(digest), digest, self.key, self.target, cached=True)
            if read_manifest(self.cache, digest) is None:
                self.keep(found)
            return found
        return None

    def made(self, data: bytes) -> Artifact:
        """Return the new artifact of `data`, and put it into the cache."""
        found = Artifact(data, hashlib.sha256(data).hexdigest(), self.key, self.target, cached=False)
        self.keep(found)
        if self.cache is not None and not self.target.is_pjrt:
            self.cache.link(self.key, found.digest)
        return found

    def keep(self, artifact: Artifact) -> None:
        """Put an artifact with manifest and source into the cache."""
        if self.cache is None:
            return
        self.cache.put(self.portable)
        self.cache.put(artifact.data)
        target, spec = self.target, self.spec
        manifest = ArtifactManifest(
            artifact=artifact.digest,
            nbytes=len(artifact.data),
            backend="pjrt" if target.is_pjrt else target.backend,
            target=target.name,
            features=target.features,
            compiler="" if target.is_pjrt else compiler_version(),
            flags=tuple(self.flags),
            notes=(*self.notes, *filter(None, [nearest(target.backend, target.name)[1]])),
            spec=spec if isinstance(spec, StepSpec) else None,
            program=spec if isinstance(spec, ProgramSpec) else None,
        )
        write_manifest(self.cache, manifest)


def prepare_functions(module: ir.Module, functions: Mapping[str, FunctionSpec]) -> None:
    """Rewrite, in place, the functions of a module for IREE."""
    normalise.rewrite_for_iree(module)
    for name, function in ir.functions(module).items():
        normalise.mark_in_place(function, functions[name].replaced)


def run_compiler(text: str, flags: list[str]) -> bytes:
    """Return the VMFB of a module, made by a separate process so that a crash of the compiler stays there.

    Raises:
        CompileError: the compiler fails, crashes or takes longer than `COMPILE_TIMEOUT_S`.
    """
    if not compiler_version():
        raise CompileError(
            "iree-base-compiler is not installed on this machine, so no artifact can be compiled for IREE: "
            "pip install 'planetary-compute[compile]', or use a PJRT backend (pjrt:cpu, pjrt:cuda)"
        )
    from iree.compiler.tools.binaries import find_tool

    with tempfile.TemporaryDirectory(prefix="planetary-compile-") as folder:
        source, output = Path(folder) / "step.mlir", Path(folder) / "step.vmfb"
        source.write_text(text)
        command = [
            find_tool("iree-compile"),
            str(source),
            "--iree-input-type=stablehlo",
            *flags,
            "-o",
            str(output),
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise CompileError(
                f"IREE's compiler did not finish within {COMPILE_TIMEOUT_S:.0f} s with flags {' '.join(flags)}"
            ) from None
        if done.returncode != 0 or not output.is_file():
            end = f"exit status {done.returncode}" if done.returncode >= 0 else f"killed by signal {-done.returncode}"
            raise CompileError(
                f"IREE {compiler_version()} cannot compile the training step with flags {' '.join(flags)} "
                f"({end}): {first_complaint(done.stderr.decode(errors='replace'))}{_advice(text, flags)}"
            )
        return output.read_bytes()


_SHADERS = {"--iree-hal-target-device=vulkan": "Vulkan", "--iree-hal-target-device=metal": "Metal"}


def _advice(text: str, flags: Sequence[str]) -> str:
    """Return the known defect behind a failed compilation, as the end of a sentence; "" if none."""
    device = next((name for flag, name in _SHADERS.items() if flag in flags), None)
    low = [element for element in ("bf16", "f16") if re.search(rf"(?<!b){element}>", text)]
    if device is None or not low:
        return ""
    return (
        f". The module computes with {' and '.join(low)}, which this compiler cannot lower for {device} in general: "
        'export the model in float32 and train it with precision = "f32", or use another backend'
    )


def first_complaint(stderr: str) -> str:
    """Return the first error line of the compiler's output, shortened, without the input's path."""
    lines = [line for line in stderr.splitlines() if "error:" in line] or stderr.strip().splitlines()[-1:]
    if not lines:
        return "no message"
    _, mark, message = lines[0].partition("error:")
    return (message.strip() if mark else lines[0].strip())[:500]


_UNIT_OF_LEVEL = {"x86-64-v3": AVX2, "x86-64-v4": AVX512}


def vector_unit(target: Target, cpuinfo: Path = Path("/proc/cpuinfo")) -> VectorUnit | None:
    """Return the vector unit of a CPU target; None for one whose tiles were not measured.

    `cpuinfo` describes this machine, for the target `"host"`, which is this machine.
    """
    if target.backend != "cpu":
        return None
    if target.name != "host":
        return _UNIT_OF_LEVEL.get(target.name)
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return AVX512 if "avx512f" in flags else AVX2 if {"avx2", "fma"} <= set(flags) else None
