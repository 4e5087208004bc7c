"""Runs single functions of a portable StableHLO module with XLA; see `DeviceProgram`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planetary.core.errors import LocalProtocolError, ResourceError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec, host_dtype
from planetary.runtime.device_program import Handle
from planetary.runtime.pjrt_executor import name_of_device


class PjrtFunctions:
    """A module on one device; each function is compiled when it is first called.

    Args:
        portable: the module as a portable artifact.
        functions: signatures by name.
        device: of JAX, as `pjrt_executor.open_devices` returns it.
        optimise: False compiles faster and runs slower.
    """

    def __init__(
        self, portable: bytes, functions: Mapping[str, FunctionSpec], device: Any, *, optimise: bool = True
    ) -> None:
        from planetary.compiler.backends import xla

        self._xla, self._portable, self._signatures = xla, portable, functions
        self._device, self._optimise = device, optimise
        self.device_name = name_of_device(device)
        self._compiled: dict[str, Any] = {}

    @staticmethod
    def on_this_cpu(portable: bytes, functions: Mapping[str, FunctionSpec], *, optimise: bool = True) -> PjrtFunctions:
        """Return a module on this machine's CPU, with as many threads as JAX has in this process."""
        from planetary.compiler.backends import xla

        return PjrtFunctions(portable, functions, xla.host_device(), optimise=optimise)

    def signature(self, function: str) -> FunctionSpec:
        if function not in self._signatures:
            known = ", ".join(self._signatures)
            raise LocalProtocolError(f"the program has no function {function!r}; it has: {known}")
        return self._signatures[function]

    def put(self, spec: TensorSpec, array: np.ndarray) -> Handle:
        try:
            # XLA's CPU device uses host memory as it is, and a function may write over it.
            return self._xla.place(array.copy(), spec.dtype, self._device)
        except (RuntimeError, ValueError) as error:
            raise ResourceError(
                f"cannot put tensor {spec.name!r} ({spec.nbytes} bytes) on {self._device}: {error}"
            ) from error

    def get(self, spec: TensorSpec, handle: Handle) -> np.ndarray:
        try:
            # A shard's own array, dropped at once: one that was read keeps a view of the device's memory, and then no
            # function could write over it.
            raw = np.asarray(handle.addressable_shards[0].data)
            return np.array(raw.view(host_dtype(spec.dtype)))
        except Exception as error:  # XLA's own class: a failed computation raises when it is read
            raise ResourceError(f"cannot read tensor {spec.name!r} from {self._device}: {error}") from error

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        """Also raises `CompileError` if XLA refuses the function."""
        spec = self.signature(function)
        if function not in self._compiled:
            text, _ = self._xla.as_main(
                self._portable, function, replaced=spec.replaced, platform=self._device.platform
            )
            self._compiled[function] = self._xla.compile_main(text, [self._device], optimise=self._optimise)
        try:
            results = self._xla.run(self._compiled[function], arguments)
        except Exception as error:
            raise ResourceError(f"{function} failed on {self._device}: {error}") from error
        return [parts[0] for parts in results]
