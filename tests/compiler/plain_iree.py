"""IREE as it is: compile a text without any rewrite, and run its `main`."""

from __future__ import annotations

import iree.runtime as iree
import numpy as np

from planetary.compiler.backends.iree import run_compiler
from planetary.compiler.backends.targets import compiler_flags, parse_target
from planetary.runtime.host import host_features


def compile_for(target: str, text: str, *flags: str) -> bytes:
    return run_compiler(text, [*compiler_flags(parse_target(target, host_features())), *flags])


def run_here(text: str, *arguments: np.ndarray, flags: tuple[str, ...] = ()) -> np.ndarray:
    module = compile_for("cpu:host", text, *flags)
    config = iree.Config(device=_device())
    loaded = iree.load_vm_module(iree.VmModule.copy_buffer(config.vm_instance, module), config)
    return np.array(loaded.main(*arguments).to_host())


def _device() -> iree.HalDevice:
    from planetary.runtime.iree_device import open_device

    return open_device("cpu", 0, None)
