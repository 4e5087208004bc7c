"""A module's functions on a device, and the named tensors that stay there between two calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from planetary.core.errors import LocalProtocolError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.runtime.host_arrays import checked

_NOTHING: Mapping[str, Any] = MappingProxyType({})

Handle = Any
"""A tensor in a device's memory; the backend's own object."""


class DeviceProgram(Protocol):
    """A module loaded on a device. Used by one thread at a time.

    A function overwrites an argument with the name of one of its first results (`FunctionSpec.replaced`): the handle
    must not be used again.
    """

    @property
    def device_name(self) -> str:
        """The device, as the driver names it."""
        ...

    def put(self, spec: TensorSpec, array: np.ndarray) -> Handle:
        """Return a copy of a checked host array on the device. Raises `ResourceError`."""
        ...

    def get(self, spec: TensorSpec, handle: Handle) -> np.ndarray:
        """Return a separate host array. Raises `ResourceError`."""
        ...

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        """Run a function. Raises `LocalProtocolError` if the module has none of this name, `ResourceError`."""
        ...

    def signature(self, function: str) -> FunctionSpec:
        """Return the signature of a function. Raises `LocalProtocolError` if the module has none of this name."""
        ...


def run_once(program: DeviceProgram, function: str, tensors: Tensors) -> dict[str, np.ndarray]:
    """Return all results of a function by name; `tensors` has at least the arguments, and nothing stays there.

    Raises:
        LocalProtocolError: there is no such function, or an argument is missing or of another shape or type.
        ResourceError: the device fails.
    """
    resident = ResidentTensors(program)
    spec = program.signature(function)
    resident.call(function, arrays={s.name: tensors[s.name] for s in spec.arguments if s.name in tensors})
    return resident.get(s.name for s in spec.results)


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

    def place(self, specs: Iterable[TensorSpec], tensors: Tensors) -> None:
        """Send tensors at once, and keep no host array of them. Raises `LocalProtocolError`, `ResourceError`."""
        for spec in specs:
            self._host.pop(spec.name, None)
            self._device[spec.name] = spec, self._program.put(spec, checked(spec, tensors[spec.name]))

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
