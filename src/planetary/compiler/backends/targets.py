"""Targets of a training step, and their flags of IREE's compiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from planetary.core.configuration.schema import BACKEND_ALIASES
from planetary.core.errors import UserError

PJRT_BACKENDS = ("pjrt:cpu", "pjrt:cuda")

# CPU names that LLVM knows as levels of the x86-64 architecture, beside "host" and "baseline".
_X86_LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
_TRIPLES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}
_BASELINE_CPUS = {"x86_64": "x86-64", "aarch64": "generic"}

# Chips known to this build of the compiler (IREE 3.13); `tests/compiler/backends/test_target_names.py` asks it.
CUDA_CHIPS = (60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 120, 121)
_NEWER_CUDA_CHIPS = (88, 90, 100, 101, 103, 110)  # existing chips unknown to the compiler
_OLDER_CUDA_CHIPS = (50, 52, 53)
HIP_CHIPS = tuple(
    f"gfx{chip}" for chip in ("908", "90a", "942", "950", "1100", "1101", "1103", "1150", "1151", "1200", "1201")
)
HIP_PRODUCTS = (
    *("mi100", "mi210", "mi250", "mi250x", "mi300a", "mi300x", "mi308x", "mi325x", "mi350x", "mi355x"),
    *("rx7700xt", "rx7800xt", "rx7900xt", "rx7900xtx", "rx9060xt", "rx9070", "rx9070xt", "r9700", "v710", "w7800"),
    "w7900",
)
VULKAN_NAMES = (
    *("pascal", "volta", "turing", "ampere", "ada", "rdna1", "rdna2", "rdna3", "rdna4", "cdna1", "cdna2", "cdna3"),
    *("cdna4", "valhall", "valhall1", "valhall2", "valhall3", "valhall4", "adreno", "vp_android_baseline_2022"),
    *("a100", "rtx3080", "rtx3090", "rtx4090", "rx7900xtx", "gfx1010", "gfx1030", *HIP_CHIPS),
)
_METAL_NAME = "macos"


class Target(msgspec.Struct, frozen=True):
    """Where a compiled module runs.

    Attributes:
        backend: `"cpu"`, `"cuda"`, `"hip"`, `"vulkan"` or `"metal"` of IREE; `"pjrt:cpu"` or `"pjrt:cuda"` of XLA.
        name: `"host"` (tuned for one CPU), `"baseline"` (any CPU of the architecture), an x86-64 level such
            as `"x86-64-v3"`, or a chip such as `"sm_80"`, `"gfx942"`, `"rdna3"`, `"macos"`; `"stablehlo"` for XLA.
        features: for a CPU, the worker's report: the CPU's digest (`"host"`) or the architecture.
    """

    backend: str
    name: str
    features: str = ""

    @property
    def is_pjrt(self) -> bool:
        """Whether artifacts are the portable StableHLO itself, which XLA compiles on the worker."""
        return self.backend in PJRT_BACKENDS


DEFAULT_NAMES = {
    "cpu": "host",
    "cuda": "sm_80",
    "hip": "gfx942",
    "vulkan": "baseline",
    "metal": "macos",
    **dict.fromkeys(PJRT_BACKENDS, "stablehlo"),
}


def parse_target(text: str, here: str) -> Target:
    """Read a target as people write it.

    `BACKEND` or `BACKEND:NAME`, e.g. `cuda:sm_86`, `vulkan`, `cpu:host`, `pjrt:cpu`; a chip such as `sm_90a` or
    `gfx942` implies the backend. For a CPU other than this machine's kind, the architecture follows:
    `cpu:baseline:aarch64`.

    Args:
        text: the target.
        here: the identity of this machine's CPU, as `host_features()` of `planetary.runtime.host` returns it.

    Raises:
        UserError: there is no such target.
    """
    if text in PJRT_BACKENDS:
        return Target(text, DEFAULT_NAMES[text])
    backend, _, rest = (_of_chip(text) or text).partition(":")
    backend = BACKEND_ALIASES.get(backend, backend)
    name, _, features = rest.partition(":")
    name = name or DEFAULT_NAMES.get(backend, "")
    if backend == "cpu":
        features = features or (here if name == "host" else here.partition("-")[0])
    elif features:
        raise UserError(f"unknown target {text!r}: only a CPU's has a third part, e.g. cpu:baseline:aarch64")
    if backend == "cpu" and name == "host" and features != here:
        raise UserError(f"cannot compile {text!r}: host is this machine; for another one take baseline")
    target = Target(backend, name, features)
    compiler_flags(target)  # raises for an unknown one
    return target


def _of_chip(text: str) -> str | None:
    """Return the full name of a target written as a chip alone; None for anything else."""
    if re.fullmatch(r"sm_\d+[af]?", text):
        return f"cuda:{text}"
    return f"hip:{text}" if re.fullmatch(r"gfx[0-9a-f]+", text) or text in HIP_PRODUCTS else None


def nearest(backend: str, name: str) -> tuple[str, str]:
    """Return the compiled target, by the compiler's own name for it, and a note; "" if it is the one asked for.

    A CUDA artifact holds PTX of a virtual architecture, which the driver compiles for the chip. PTX for compute
    capability X.Y runs on every chip of the same or a later one; only PTX for targets with the suffix a or f is for one
    chip or family, and it is never made here (CUDA C++ Programming Guide, "Application Compatibility" and "Feature Set
    Compiler Targets"). So a chip the compiler does not know takes the newest older one. AMD's binaries are for one chip
    each and have no such substitute. Metal artifacts hold shader source, which every Mac compiles for its own GPU.

    Raises:
        UserError: there is no such target, or none that runs on it; the text lists the known ones.
    """
    if backend == "cpu" and name not in ("host", "baseline", *_X86_LEVELS):
        raise _unknown(backend, name, ("host", "baseline", *_X86_LEVELS))
    if backend == "metal":
        if name in {_METAL_NAME, "baseline", "host"} or re.fullmatch(r"(apple-)?m\d(-?(pro|max|ultra))?", name.lower()):
            note = "" if name == _METAL_NAME else f"metal:{name} takes the artifact of every Mac ({_METAL_NAME})"
            return _METAL_NAME, note
        raise _unknown(backend, name, (_METAL_NAME, "baseline", "m1, m2, …"))
    if backend == "hip":
        if name not in (*HIP_CHIPS, *HIP_PRODUCTS):
            raise _unknown(backend, name, (*HIP_CHIPS, *HIP_PRODUCTS))
        return name, ""
    if backend == "vulkan" and (name in {"", "baseline"} or name in VULKAN_NAMES):
        return name, ""
    if backend in {"cuda", "vulkan"}:
        others = ("baseline", *VULKAN_NAMES) if backend == "vulkan" else ()
        return _nearest_nvidia(backend, name, others)
    return name, ""


def _nearest_nvidia(backend: str, name: str, others: tuple[str, ...]) -> tuple[str, str]:
    known = (*(f"sm_{chip}" for chip in sorted({*CUDA_CHIPS, *_NEWER_CUDA_CHIPS})), "sm_90a, sm_100a, …", *others)
    found = re.fullmatch(r"sm_(\d+)([af]?)", name)
    chip = int(found[1]) if found is not None else 0
    if found is None or chip not in (*CUDA_CHIPS, *_NEWER_CUDA_CHIPS, *_OLDER_CUDA_CHIPS) or (found[2] and chip < 90):
        raise _unknown(backend, name, known)
    if chip in _OLDER_CUDA_CHIPS:
        raise UserError(f"{backend} target {name!r} is older than the compiler supports; known: {', '.join(known)}")
    taken = max(older for older in CUDA_CHIPS if older <= chip)
    if taken == chip and not found[2]:
        return name, ""
    why = "the compiler does not know that chip" if taken != chip else "the compiler uses no feature of that chip alone"
    code = "PTX" if backend == "cuda" else "SPIR-V"
    return f"sm_{taken}", f"{backend}:{name} is compiled as sm_{taken}: {why}, and {code} for an older one runs on it"


def _unknown(backend: str, name: str, known: Sequence[str]) -> UserError:
    return UserError(f"unknown {backend} target {name!r}; known: {', '.join(known)}")


def compiler_flags(target: Target) -> list[str]:
    """Return the flags of `iree-compile` for `target`, or raise `UserError` for an unknown one.

    Measured on the default model (3.3 million parameters, two cores): tuning for the host's CPU matters most.
    Further flags help on some machines and shapes and crash on others; `planetary tune` finds them by measurement.
    """
    make = _FLAGS.get(target.backend)
    if make is None:
        known = (*_FLAGS, *BACKEND_ALIASES, *PJRT_BACKENDS)
        raise UserError(f"unknown backend {target.backend!r}; known: {', '.join(known)}")
    return make(target)


_LOAD_CONSTANTS = "--iree-opt-const-eval=false"
"""Tables of constants, such as those of rotary positions, are computed when an artifact is loaded. To compute them
while compiling, IREE compiles them apart from the rest, for a fifth of a small step's processor time."""


def _cpu(target: Target) -> list[str]:
    flags = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu", _LOAD_CONSTANTS]
    if target.name == "host":
        return [*flags, "--iree-llvmcpu-target-cpu=host"]
    triple = _TRIPLES.get(target.features)
    if triple is None:
        raise UserError(
            f"cannot compile {target.name!r} for architecture {target.features!r}; known: {', '.join(_TRIPLES)}"
        )
    if target.name == "baseline":
        cpu = _BASELINE_CPUS[target.features]
    elif target.name in _X86_LEVELS and target.features == "x86_64":
        cpu = target.name
    else:
        raise UserError(
            f"unknown cpu target {target.name!r} for {target.features}; known: host, baseline"
            + (f", {', '.join(_X86_LEVELS)}" if target.features == "x86_64" else "")
        )
    return [*flags, f"--iree-llvmcpu-target-triple={triple}", f"--iree-llvmcpu-target-cpu={cpu}"]


def _cuda(target: Target) -> list[str]:
    return ["--iree-hal-target-device=cuda", f"--iree-cuda-target={nearest('cuda', target.name)[0]}"]


def _hip(target: Target) -> list[str]:
    return ["--iree-hal-target-device=hip", f"--iree-rocm-target={nearest('hip', target.name)[0]}"]


def _vulkan(target: Target) -> list[str]:
    name, _ = nearest("vulkan", target.name)
    flags = ["--iree-hal-target-device=vulkan"]
    return flags if name in {"", "baseline"} else [*flags, f"--iree-vulkan-target={name}"]


def _metal(target: Target) -> list[str]:
    nearest("metal", target.name)
    # The runtime compiles the shader source itself, so no Apple tools are needed here.
    return ["--iree-hal-target-device=metal", "--iree-metal-compile-to-metallib=false"]


_FLAGS: dict[str, Callable[[Target], list[str]]] = {
    "cpu": _cpu,
    "cuda": _cuda,
    "hip": _hip,
    "vulkan": _vulkan,
    "metal": _metal,
}
