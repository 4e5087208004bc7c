"""Programs: several functions in one StableHLO module, on a device where named tensors stay between two calls."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from planetary.core.artifact_label import read_label
from planetary.core.errors import LocalProtocolError, UserError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.runtime.backends import is_pjrt, require_backend, runtime_version
from planetary.runtime.host import host_features
from planetary.runtime.host_arrays import checked

_NOTHING: Mapping[str, Any] = MappingProxyType({})

Handle = Any
"""A tensor in a device's memory; the backend's own object."""


@dataclass(frozen=True)
class Program:
    """Several functions in one StableHLO module: those of a training step, of a served model or of a mixture.

    Attributes:
        portable: the module as a portable artifact; b"" where only a compiled one is here.
        functions: signatures by name.
        weights: arguments that stay on a device for many calls, in the device's layout.
        split: arguments of which every device of an island gets an equal part, along the first dimension.
        digest: sha256 of `portable`.
    """

    portable: bytes = field(repr=False)
    functions: Mapping[str, FunctionSpec]
    weights: tuple[str, ...] = ()
    split: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 of the portable artifact."""
        return hashlib.sha256(self.portable).hexdigest()


def signature(program: Program, function: str) -> FunctionSpec:
    """Return the signature of a program's function. Raises `LocalProtocolError` if there is none of this name."""
    if function not in program.functions:
        known = ", ".join(program.functions)
        raise LocalProtocolError(f"the program has no function {function!r}; it has: {known}")
    return program.functions[function]


class DeviceProgram(ABC):
    """A program loaded on a device. Used by one thread at a time.

    A function overwrites an argument with the name of one of its first results (`FunctionSpec.replaced`): the handle
    must not be used again. The interpreter is free while a function runs.

    Attributes:
        program: description of the program.
        device_name: the device, as the driver names it.
    """

    def __init__(self, program: Program, device_name: str) -> None:
        self.program, self.device_name = program, device_name

    def signature(self, function: str) -> FunctionSpec:
        """Return the signature of a function. Raises `LocalProtocolError` if the program has none of this name."""
        return signature(self.program, function)

    @abstractmethod
    def put(self, spec: TensorSpec, array: np.ndarray) -> Handle:
        """Return a copy of a checked host array on the device. Raises `ResourceError`."""

    @abstractmethod
    def get(self, spec: TensorSpec, handle: Handle, into: np.ndarray | None = None) -> np.ndarray:
        """Return a separate host array, `into` where given. Raises `ResourceError`."""

    @abstractmethod
    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        """Run a function. Raises `LocalProtocolError` if the program has none of this name, `ResourceError`."""

    def __call__(self, function: str, tensors: Tensors) -> dict[str, np.ndarray]:
        """Return all results of a function by name; `tensors` has at least the arguments, and nothing stays there.

        Raises:
            LocalProtocolError: there is no such function, or an argument is missing or of another shape or type.
            ResourceError: the device fails.
        """
        resident = ResidentTensors(self)
        spec = self.signature(function)
        resident.call(function, arrays={s.name: tensors[s.name] for s in spec.arguments if s.name in tensors})
        return resident.get(s.name for s in spec.results)

    def prepare(self, function: str) -> None:
        """Do now what the first call of a function would, such as compiling it."""

    def peak_memory(self) -> int:
        """Return the most bytes allocated on the device at once; 0 where the runtime does not count."""
        return 0

    def close(self) -> None:
        """Release the module; handles must be gone. The device itself stays open for others of this process."""


class WrappedProgram(DeviceProgram):
    """A program around another one, whose device it uses."""

    def __init__(self, inner: DeviceProgram, program: Program | None = None) -> None:
        """`program`: description in place of the inner one's."""
        super().__init__(program or inner.program, inner.device_name)
        self._inner = inner

    def put(self, spec: TensorSpec, array: np.ndarray) -> Handle:
        return self._inner.put(spec, array)

    def get(self, spec: TensorSpec, handle: Handle, into: np.ndarray | None = None) -> np.ndarray:
        return self._inner.get(spec, handle, into)

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        return self._inner.invoke(function, arguments)


def copied(array: np.ndarray, into: np.ndarray | None) -> np.ndarray:
    """Return a copy of a host array, written into another one where given."""
    if into is None:
        return np.array(array)
    np.copyto(into, array, casting="no")
    return into


class ResidentTensors:
    """Named tensors on the device of a program. Used by one thread at a time.

    An array put here is sent when a function first takes it. Results of functions stay on the device under their
    names; `get` copies one to the host. A host array that was put or got is kept while it equals the device's
    tensor; it must not be changed.
    """

    def __init__(self, program: DeviceProgram) -> None:
        self._program = program
        self._device: dict[str, tuple[TensorSpec, Handle]] = {}
        self._host: dict[str, np.ndarray] = {}
        self._signatures: dict[str, tuple[FunctionSpec, tuple[int, ...]]] = {}  # signatures with the arguments replaced

    def put(self, tensors: Tensors) -> None:
        """Replace tensors. An array that is here already is not sent again."""
        for name, array in tensors.items():
            if self._host.get(name) is not array:
                self._host[name] = array
                self._device.pop(name, None)

    def place(self, specs: Iterable[TensorSpec], tensors: Tensors, names: Mapping[str, str] = _NOTHING) -> None:
        """Send tensors at once, and keep no host array of them. Raises `LocalProtocolError`, `ResourceError`.

        `names`: under which a tensor is here, if other than its own.
        """
        for spec in specs:
            name = names.get(spec.name, spec.name)
            self._host.pop(name, None)
            self._device[name] = spec, self._program.put(spec, checked(spec, tensors[spec.name]))

    def get(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Return host arrays. Raises `LocalProtocolError` for a name that is not here, `ResourceError`."""
        found = {}
        for name in names:
            if name not in self._host:
                if name not in self._device:
                    raise LocalProtocolError(f"no tensor {name!r} is on the device, nor was one put there")
                self._host[name] = self._program.get(*self._device[name])
            found[name] = self._host[name]
        return found

    def drop(self, names: Iterable[str]) -> None:
        """Forget tensors and free their memory; a name that is not here is passed over."""
        for name in names:
            self._host.pop(name, None)
            self._device.pop(name, None)

    def call(
        self, function: str, names: Mapping[str, str] = _NOTHING, *, arrays: Tensors = _NOTHING
    ) -> tuple[str, ...]:
        """Run a function; results stay on the device.

        Args:
            function: of the program.
            names: under which an argument or a result is here, if other than its own.
            arrays: arguments missing here, or replaced for this call.

        Returns:
            the names under which the results are here.

        Raises:
            LocalProtocolError: there is no such function, or an argument is missing or of another shape or type.
            ResourceError: the device fails. Arguments it was to overwrite then have the host's values, or are gone.
        """
        spec, replaced = self._signature(function)
        missing = [s.name for s in spec.arguments if s.name not in arrays and not self._has(names.get(s.name, s.name))]
        if missing:
            raise LocalProtocolError(
                f"{len(missing)} arguments of {function} are missing, the first is {missing[0]!r}; "
                f"here are {len(self._host.keys() | self._device.keys())} tensors"
            )
        handles = [
            self._program.put(one, checked(one, arrays[one.name]))
            if one.name in arrays
            else self._handle(names.get(one.name, one.name), one)
            for one in spec.arguments
        ]
        for index in replaced:
            self._device.pop(names.get(spec.arguments[index].name, spec.arguments[index].name), None)
        results = self._program.invoke(function, handles)
        kept = tuple(names.get(one.name, one.name) for one in spec.results)
        for name, one, handle in zip(kept, spec.results, results, strict=True):
            self._host.pop(name, None)
            self._device[name] = one, handle
        return kept

    def _has(self, name: str) -> bool:
        return name in self._device or name in self._host

    def _signature(self, function: str) -> tuple[FunctionSpec, tuple[int, ...]]:
        if function not in self._signatures:
            spec = self._program.signature(function)
            self._signatures[function] = spec, spec.replaced
        return self._signatures[function]

    def _handle(self, name: str, spec: TensorSpec) -> Handle:
        if name not in self._device:
            self._device[name] = spec, self._program.put(spec, checked(spec, self._host[name]))
        held, handle = self._device[name]
        if held is not spec and (held.dtype, held.shape) != (spec.dtype, spec.shape):
            raise LocalProtocolError(
                f"argument {spec.name!r} must be {spec.dtype}{list(spec.shape)}; tensor {name!r} on the device is "
                f"{held.dtype}{list(held.shape)}"
            )
        return handle


def open_program(
    artifact: bytes,
    program: Program,
    *,
    backend: str,
    threads: int | None = None,
    device_id: int = 0,
    island: int = 1,
) -> DeviceProgram:
    """Load a program's artifact on the device asked for.

    Args:
        artifact: for `backend`: a VMFB, or the portable StableHLO.
        program: description of the program.
        backend: e.g. `"cpu"`, `"vulkan"`, `"pjrt:cuda"`.
        threads: of a CPU device; None: all usable cores.
        device_id: which device of the backend.
        island: devices that run every function together; 1 for a program that splits no argument.

    Raises:
        UserError: the backend is unknown or not installed, an island was asked for, or this process computes with other
            threads or devices.
        ResourceError: the device is not there or cannot be opened, or the module not be loaded.
        TrustError: the module is for another compiler version or another CPU, or was not made by planetary.
    """
    require_backend(backend, island)
    if island != 1 and not program.split:
        raise UserError(
            f"a program computes on one device, found --island {island}: start one "
            "worker per device with --scale, and --island 1"
        )
    if is_pjrt(backend):
        from planetary.runtime.pjrt_device import open_devices
        from planetary.runtime.pjrt_program import PjrtProgram

        return PjrtProgram(artifact, program, open_devices(backend, device_id, island, threads), backend)
    from planetary.runtime.iree_device import check_label
    from planetary.runtime.iree_program import IreeProgram

    label = read_label(artifact)
    check_label(label, runtime_version=runtime_version(backend), backend=backend, features=host_features())
    return IreeProgram(
        artifact,
        program,
        backend=backend,
        threads=threads,
        device_id=device_id,
        blocks=label.blocks,
        staged=label.staged,
    )


def open_on_xla(program: Program, *, optimise: bool = True) -> DeviceProgram:
    """Return a program on this machine's CPU, run by XLA; each function is compiled when it is first called.

    Args:
        program: to run.
        optimise: False compiles faster and runs slower.
    """
    from planetary.compiler.backends import xla
    from planetary.runtime.pjrt_program import PjrtProgram

    return PjrtProgram(program.portable, program, [xla.host_device()], "pjrt:cpu", optimise=optimise)
