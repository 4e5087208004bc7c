"""The vector unit of a CPU target, for the tiles of products."""

from __future__ import annotations

from pathlib import Path

from planetary.compiler.backends.targets import Target
from planetary.compiler.rewrites.weight_blocks import AVX2, AVX512, VectorUnit

_OF_LEVELS = {"x86-64-v3": AVX2, "x86-64-v4": AVX512}


def vector_unit(target: Target, cpuinfo: Path = Path("/proc/cpuinfo")) -> VectorUnit | None:
    """Return the vector unit of a CPU target; None for one whose tiles were not measured.

    `cpuinfo` describes this machine, for the target `"host"`, which is this machine.
    """
    if target.backend != "cpu":
        return None
    if target.name != "host":
        return _OF_LEVELS.get(target.name)
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return AVX512 if "avx512f" in flags else AVX2 if {"avx2", "fma"} <= set(flags) else None
