"""Several workers on one GPU, and a GPU's products and memory, without a GPU: drivers and clients are stand-ins."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from planetary.cli.commands.roles import node_manager
from planetary.cli.main import main
from planetary.compiler import ir
from planetary.compiler.backends import pipeline, xla
from planetary.compiler.backends.iree import run_compiler
from planetary.core.errors import CompileError, ResourceError
from planetary.runtime import backends, pjrt_device

DOT = "stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]"
F32 = "(tensor<2x3xf32>, tensor<3x2xf32>) -> tensor<2x2xf32>"
MODULE = f"""
func.func @main(%a: tensor<2x3xf32>, %b: tensor<3x2xf32>) -> tensor<2x2xf32> {{
  %0 = {DOT}, precision = [DEFAULT, DEFAULT] : {F32}
  %1 = {DOT} : {F32}
  %2 = stablehlo.convert %a : (tensor<2x3xf32>) -> tensor<2x3xbf16>
  %3 = stablehlo.convert %b : (tensor<3x2xf32>) -> tensor<3x2xbf16>
  %4 = stablehlo.dot_general %2, %3, contracting_dims = [1] x [0] : (tensor<2x3xbf16>, tensor<3x2xbf16>)
    -> tensor<2x2xf32>
  %5 = stablehlo.add %0, %1 : tensor<2x2xf32>
  %6 = stablehlo.add %4, %5 : tensor<2x2xf32>
  return %6 : tensor<2x2xf32>
}}
"""


class FakeGpu:
    """A device of JAX whose client compiles nothing."""

    platform = "gpu"

    def __init__(self, failure: str = "") -> None:
        self.client, self._failure, self.options = self, failure, None

    def __str__(self) -> str:
        return "cuda:0"

    def compile_and_load(self, _text: bytes, _devices: Any, options: Any) -> str:
        """As XLA's client does."""
        self.options = options
        if self._failure:
            raise RuntimeError(self._failure)
        return "executable"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla.xla_client, "DeviceList", tuple)


# --- devices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "island", "present", "expected"),
    [
        (2, 1, 1, (0, 0)),
        (5, 1, 2, (0, 1, 0, 1, 0)),
        (2, 1, 4, (0, 1)),
        (3, 2, 4, (0, 1, 0)),
        (2, 1, 0, (0, 1)),  # unknown
    ],
)
def test_workers_share_devices_if_there_are_too_few(
    scale: int, island: int, present: int, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "count_devices", lambda backend: present)
    given = argparse.Namespace(backend="pjrt:cuda", island=island)
    assert node_manager._devices_of(given, scale) == expected


def test_workers_of_a_cpu_keep_their_numbers() -> None:
    assert node_manager._devices_of(argparse.Namespace(backend="pjrt:cpu", island=1), 3) == (0, 1, 2)


def test_devices_are_counted_and_no_driver_counts_as_none() -> None:
    assert backends.count_devices("pjrt:cpu") == 1
    assert backends.count_devices("metal") == 0


def test_commands_leave_the_gpus_of_jax_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    main([])
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize("own", ["", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_worker_takes_gpu_memory_as_it_needs_it(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    for name in names:  # set first, so that the end of the test restores each
        monkeypatch.setenv(name, "0.5")
        if name != own:
            monkeypatch.delenv(name)
    monkeypatch.setattr(xla, "in_use", lambda: False)
    monkeypatch.setattr(jax, "config", SimpleNamespace(update=lambda *_: None))
    pjrt_device._set_up_process("cuda", 0, 1, None)
    found = {name: os.environ[name] for name in names if name in os.environ}
    share = {own: "0.5"} if own else {"XLA_CLIENT_MEM_FRACTION": pjrt_device.MEMORY_SHARE}
    assert found == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **share}


# --- products -----------------------------------------------------------------------------------------------


def test_f32_products_keep_their_digits_on_a_gpu() -> None:
    on_gpu, on_cpu = (xla.as_main(MODULE, "main", platform=platform)[0] for platform in ("gpu", "cpu"))
    assert on_gpu.count("precision = [HIGHEST, HIGHEST]") == 2
    assert "HIGHEST" not in on_cpu
    with ir.new_context():
        ir.verify(ir.parse_module(on_gpu))


def test_f32_products_of_a_gpu_are_the_librarys(compiled: None) -> None:
    device = FakeGpu()
    xla.compile_main(xla.as_main(MODULE, "main", platform="gpu")[0], [device])
    assert ("xla_gpu_enable_triton_gemm", False) in device.options.env_option_overrides  # type: ignore[attr-defined]
    xla.compile_main("bf16 alone", [device])
    assert not device.options.env_option_overrides  # type: ignore[attr-defined]


# --- failures -----------------------------------------------------------------------------------------------


def test_too_little_memory_to_compile_is_no_wrong_step(compiled: None) -> None:
    failure = "NOT_FOUND: no config.\nFailures (8):\n RESOURCE_EXHAUSTED: Out of memory, 80.00MiB\n RESOURCE_EXHAUSTED"
    with pytest.raises(ResourceError, match=r"memory of cuda:0 .* 80.00MiB\. End other programs") as found:
        xla.compile_main("", [FakeGpu(failure)])
    assert "\n" not in str(found.value)
    with pytest.raises(CompileError, match="cannot compile the module for gpu: bad operation"):
        xla.compile_main("", [FakeGpu("bad operation")])


def test_without_irees_compiler_only_its_own_targets_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert not pipeline.compiler_version()
    with pytest.raises(CompileError, match="iree-base-compiler is not installed"):
        run_compiler("", [])
