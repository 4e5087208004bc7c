"""Targets that the compiler does not know by that name: taken as the nearest that it does, or refused with a list."""

from __future__ import annotations

import pytest

from planetary.cli.main import main
from planetary.compiler.backends.iree import run_compiler
from planetary.compiler.backends.targets import (
    CUDA_CHIPS,
    HIP_CHIPS,
    HIP_PRODUCTS,
    VULKAN_NAMES,
    Target,
    compiler_flags,
    nearest,
    parse_target,
)
from planetary.core.errors import CompileError, UserError


@pytest.mark.parametrize(
    ("asked", "flag", "note"),
    [
        ("cuda:sm_80", "--iree-cuda-target=sm_80", ""),
        ("cuda:sm_90", "--iree-cuda-target=sm_89", "cuda:sm_90 is compiled as sm_89"),
        ("cuda:sm_90a", "--iree-cuda-target=sm_89", "PTX for an older one runs on it"),
        ("cuda:sm_100", "--iree-cuda-target=sm_89", "the compiler does not know that chip"),
        ("cuda:sm_103f", "--iree-cuda-target=sm_89", "cuda:sm_103f is compiled as sm_89"),
        ("cuda:sm_120", "--iree-cuda-target=sm_120", ""),
        ("cuda:sm_120a", "--iree-cuda-target=sm_120", "uses no feature of that chip alone"),
        ("vulkan:sm_90", "--iree-vulkan-target=sm_89", "SPIR-V for an older one runs on it"),
        ("sm_90a", "--iree-cuda-target=sm_89", "cuda:sm_90a is compiled as sm_89"),
        ("gfx1100", "--iree-rocm-target=gfx1100", ""),
        ("mi300x", "--iree-rocm-target=mi300x", ""),
        ("rocm:gfx942", "--iree-rocm-target=gfx942", ""),
        ("rocm", "--iree-rocm-target=gfx942", ""),
        ("metal", "--iree-hal-target-device=metal", ""),
        ("metal:m3-max", "--iree-hal-target-device=metal", "takes the artifact of every Mac"),
    ],
)
def test_a_target_is_compiled_as_the_nearest_that_runs_on_it(asked: str, flag: str, note: str) -> None:
    target = parse_target(asked, "x86_64-0")
    assert flag in compiler_flags(target)
    said = nearest(target.backend, target.name)[1]
    assert note in said
    assert bool(said) == bool(note)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("cuda:sm_91", ["unknown cuda target 'sm_91'", "known: sm_60", "sm_90a"]),
        ("cuda:sm_80a", ["unknown cuda target 'sm_80a'"]),
        ("cuda:gfx942", ["unknown cuda target 'gfx942'", "sm_89"]),
        ("cuda:sm_52", ["'sm_52' is older than the compiler supports", "sm_60"]),
        ("hip:gfx1030", ["unknown hip target 'gfx1030'", "gfx942", "mi300x"]),
        ("vulkan:nonsense", ["unknown vulkan target 'nonsense'", "baseline", "rdna3"]),
        ("metal:sm_80", ["unknown metal target 'sm_80'", "macos"]),
        ("cpu:skylake", ["unknown cpu target 'skylake'", "host, baseline"]),
        ("tpu", ["unknown backend 'tpu'", "rocm"]),
    ],
)
def test_an_unknown_target_is_refused_with_the_known_ones(asked: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_target(asked, "x86_64-0")
    for word in words:
        assert word in str(caught.value)


def test_node_manager_refuses_an_unknown_target_before_connect(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["node-manager", "--host=h", "--plain-loopback", "--backend=rocm", "--target=sm_80"]
    assert main(arguments) == 2
    assert "unknown hip target 'sm_80'; known: gfx908" in " ".join(capsys.readouterr().err.split())


ADD = """
func.func @f(%a: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.add %a, %a : tensor<8xf32>
  return %0 : tensor<8xf32>
}
"""


@pytest.mark.compiles
def test_the_compiler_does_not_know_what_is_taken_as_another() -> None:
    """A newer compiler makes this fail, and `CUDA_CHIPS` longer."""
    assert run_compiler(ADD, compiler_flags(Target("cuda", "sm_90a")))
    assert run_compiler(ADD, compiler_flags(Target("cuda", "sm_120a")))
    for name in ("sm_90", "sm_100"):
        with pytest.raises(CompileError):
            run_compiler(ADD, ["--iree-hal-target-device=cuda", f"--iree-cuda-target={name}"])


@pytest.mark.soak
def test_the_compiler_knows_every_name_that_is_listed() -> None:
    cuda = [f"sm_{chip}" for chip in CUDA_CHIPS]
    for backend, names in {"cuda": cuda, "hip": [*HIP_CHIPS, *HIP_PRODUCTS], "vulkan": VULKAN_NAMES}.items():
        for name in names:
            assert run_compiler(ADD, compiler_flags(Target(backend, name))), f"{backend}:{name}"
