"""The vector unit of a CPU target."""

from __future__ import annotations

from pathlib import Path

import pytest

from planetary.compiler.backends.iree import vector_unit
from planetary.compiler.backends.targets import Target
from planetary.compiler.rewrites.weight_blocks import AVX2, AVX512, VectorUnit


@pytest.mark.parametrize(
    ("flags", "unit"), [("fpu avx2 fma avx512f", AVX512), ("fpu avx2 fma", AVX2), ("fpu avx", None)]
)
def test_the_host_is_described_by_its_flags(tmp_path: Path, flags: str, unit: VectorUnit | None) -> None:
    described = tmp_path / "cpuinfo"
    described.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert vector_unit(Target("cpu", "host", "x86_64-0"), described) is unit
    assert vector_unit(Target("cpu", "host", "x86_64-0"), tmp_path / "none") is None


def test_a_level_has_its_own_unit() -> None:
    assert vector_unit(Target("cpu", "x86-64-v3", "x86_64")) is AVX2
    assert vector_unit(Target("cpu", "baseline", "aarch64")) is None
    assert vector_unit(Target("cuda", "sm_80")) is None
