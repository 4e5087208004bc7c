"""What a training step can be compiled for, and with which flags of IREE's compiler."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from planetary.core.errors import UserError

PJRT_BACKENDS = ("pjrt:cpu", "pjrt:cuda")

# CPU names that LLVM knows as levels of the x86-64 architecture, beside "host" and "baseline".
_X86_LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
_TRIPLES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}
_BASELINE_CPUS = {"x86_64": "x86-64", "aarch64": "generic"}
# This build of the compiler knows no newer NVIDIA chip; PTX for an older one runs on newer ones.
_NEWEST_CUDA = 89


class Target(msgspec.Struct, frozen=True):
    """Where a compiled module runs.

    Attributes:
        backend: `"cpu"`, `"cuda"`, `"hip"`, `"vulkan"` or `"metal"` of IREE; `"pjrt:cpu"` or `"pjrt:cuda"` of XLA.
        name: `"host"` (tuned for one CPU), `"baseline"` (any CPU of the architecture), an x86-64 level such
            as `"x86-64-v3"`, or a chip such as `"sm_80"`, `"gfx942"`, `"rdna3"`, `"macos"`; `"stablehlo"` for XLA.
        features: for a CPU, what the worker reported: its CPU's digest (`"host"`) or its architecture.
    """

    backend: str
    name: str
    features: str = ""

    @property
    def is_pjrt(self) -> bool:
        """Whether its artifact is the portable StableHLO itself, which XLA compiles on the worker."""
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

    `BACKEND` or `BACKEND:NAME`, e.g. `cuda:sm_86`, `vulkan`, `cpu:host`, `pjrt:cpu`. For a CPU other than this
    machine's kind, the architecture follows: `cpu:baseline:aarch64`.

    Args:
        text: the target.
        here: what identifies this machine's CPU, as `host_features()` of `planetary.runtime.host` returns it.

    Raises:
        UserError: there is no such target.
    """
    if text in PJRT_BACKENDS:
        return Target(text, DEFAULT_NAMES[text])
    backend, _, rest = text.partition(":")
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


def compiler_flags(target: Target) -> list[str]:
    """Return the flags of `iree-compile` for `target`, or raise `UserError` for an unknown one.

    Measured on the default model (3.3 million parameters, two cores): tuning for the host's CPU is what matters.
    Further flags help on some machines and shapes and crash on others; `planetary tune` finds them by measurement.
    """
    make = _FLAGS.get(target.backend)
    if make is None:
        raise UserError(f"unknown backend {target.backend!r}; known: {', '.join((*_FLAGS, *PJRT_BACKENDS))}")
    return make(target)


def _cpu(target: Target) -> list[str]:
    flags = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"]
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
    found = re.fullmatch(r"sm_(\d+)", target.name)
    if found is None:
        raise UserError(f"unknown cuda target {target.name!r}; expected e.g. sm_80")
    chip = min(int(found.group(1)), _NEWEST_CUDA)
    return ["--iree-hal-target-device=cuda", f"--iree-cuda-target=sm_{chip}"]


def _hip(target: Target) -> list[str]:
    return ["--iree-hal-target-device=hip", f"--iree-rocm-target={_word(target)}"]


def _vulkan(target: Target) -> list[str]:
    flags = ["--iree-hal-target-device=vulkan"]
    return flags if target.name in {"", "baseline"} else [*flags, f"--iree-vulkan-target={_word(target)}"]


def _metal(target: Target) -> list[str]:
    # The runtime compiles the shader source itself, so no Apple tools are needed here.
    return ["--iree-hal-target-device=metal", "--iree-metal-compile-to-metallib=false"]


def _word(target: Target) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", target.name):
        raise UserError(f"unknown {target.backend} target {target.name!r}")
    return target.name


_FLAGS: dict[str, Callable[[Target], list[str]]] = {
    "cpu": _cpu,
    "cuda": _cuda,
    "hip": _hip,
    "vulkan": _vulkan,
    "metal": _metal,
}
