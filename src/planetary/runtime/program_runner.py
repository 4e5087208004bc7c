"""Programs: several functions in one StableHLO module, and their runners on a device of this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from planetary.core.artifact_label import read_label
from planetary.core.errors import LocalProtocolError, UserError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.runtime.backends import is_pjrt, require_backend, runtime_version
from planetary.runtime.device_program import DeviceProgram, Handle, run_once
from planetary.runtime.host import host_features


@dataclass(frozen=True)
class Program:
    """Several functions in one StableHLO module.

    Attributes:
        portable: the module as a portable artifact.
        functions: signatures by name.
        weights: arguments that stay on a device for many calls, in the device's layout.
        digest: sha256 of `portable`.
    """

    portable: bytes = field(repr=False)
    functions: Mapping[str, FunctionSpec]
    weights: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 of the portable artifact."""
        return hashlib.sha256(self.portable).hexdigest()


def signature(program: Program, function: str) -> FunctionSpec:
    """Return the signature of a program's function."""
    if function not in program.functions:
        known = ", ".join(program.functions)
        raise LocalProtocolError(f"the program has no function {function!r}; it has: {known}")
    return program.functions[function]


class Runner(DeviceProgram, Protocol):
    """A program ready to run: function by function on tensors that stay on the device, or from host to host."""

    @property
    def program(self) -> Program: ...

    def __call__(self, function: str, tensors: Tensors) -> dict[str, np.ndarray]:
        """Return the results of a function by name; `tensors` has at least the arguments, and nothing stays there."""
        ...


class ProgramRunner(Runner):
    """Runs one program on one device.

    Args:
        program: the one to hold.
        device: the same, loaded.
    """

    def __init__(self, program: Program, device: DeviceProgram) -> None:
        self._program, self._device = program, device

    @property
    def program(self) -> Program:
        return self._program

    @property
    def device_name(self) -> str:
        return self._device.device_name

    def __call__(self, function: str, tensors: Tensors) -> dict[str, np.ndarray]:
        return run_once(self, function, tensors)

    def signature(self, function: str) -> FunctionSpec:
        return self._device.signature(function)

    def put(self, spec: TensorSpec, array: np.ndarray) -> Handle:
        return self._device.put(spec, array)

    def get(self, spec: TensorSpec, handle: Handle) -> np.ndarray:
        return self._device.get(spec, handle)

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        return self._device.invoke(function, arguments)


class XlaRunner(ProgramRunner):
    """Runs a program with XLA on this machine's CPU; each function is compiled when it is first called.

    Args:
        program: to run.
        optimise: False compiles faster and runs slower.
    """

    def __init__(self, program: Program, *, optimise: bool = True) -> None:
        from planetary.runtime.pjrt_functions import PjrtFunctions

        super().__init__(program, PjrtFunctions.on_this_cpu(program.portable, program.functions, optimise=optimise))


def open_program(
    artifact: bytes,
    program: Program,
    *,
    backend: str,
    threads: int | None = None,
    device_id: int = 0,
    island: int = 1,
) -> ProgramRunner:
    """Load a program's artifact on the device asked for.

    Args:
        artifact: for `backend`: a VMFB, or the portable StableHLO.
        program: description of the program.
        backend: e.g. `"cpu"`, `"vulkan"`, `"pjrt:cuda"`.
        threads: of a CPU device; None: all usable cores.
        device_id: which device of the backend.
        island: must be 1.

    Raises:
        UserError: the backend is unknown or not installed, an island was asked for, or this process computes with other
            threads or devices.
        ResourceError: the device is not there or cannot be opened, or the module not be loaded.
        TrustError: the module is for another compiler version or another CPU, or was not made by planetary.
    """
    require_backend(backend, island)
    if island != 1:
        raise UserError(
            f"a program computes on one device, found --island {island}: start one "
            "worker per device with --scale, and --island 1"
        )
    if is_pjrt(backend):
        from planetary.runtime.pjrt_executor import open_devices
        from planetary.runtime.pjrt_functions import PjrtFunctions

        (device,) = open_devices(backend, device_id, 1, threads)
        return ProgramRunner(program, PjrtFunctions(artifact, program.functions, device))
    from planetary.runtime.iree_executor import check_label
    from planetary.runtime.iree_functions import IreeFunctions

    label = read_label(artifact)
    check_label(label, runtime_version=runtime_version(backend), backend=backend, features=host_features())
    loaded = IreeFunctions(
        artifact, program.functions, backend=backend, threads=threads, device_id=device_id, blocks=label.blocks
    )
    return ProgramRunner(program, loaded)
