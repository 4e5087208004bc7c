"""Runs single functions of a compiled IREE module; see `DeviceProgram`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import iree.runtime as iree
import numpy as np

from planetary.core.errors import LocalProtocolError, ResourceError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec, WeightBlocks
from planetary.runtime.device_program import Handle
from planetary.runtime.iree_executor import name_of_device, open_device
from planetary.runtime.iree_memory import IreeMemory


class IreeFunctions:
    """A loaded module.

    Args:
        module: bytes of a VMFB for this machine.
        functions: signatures by name.
        backend: it was compiled for, e.g. `"cpu"`.
        threads: of a CPU device; None: all usable cores.
        device_id: which device of the backend.
        blocks: layouts of the arguments the functions take in blocks; here they have their own shapes.

    Raises:
        ResourceError: the device cannot be opened or the module not be loaded.
    """

    def __init__(
        self,
        module: bytes,
        functions: Mapping[str, FunctionSpec],
        *,
        backend: str,
        threads: int | None = None,
        device_id: int = 0,
        blocks: Sequence[WeightBlocks] = (),
    ) -> None:
        self._backend, self._signatures = backend, functions
        self._blocks = {layout.name: layout for layout in blocks}
        self._device = open_device(backend, device_id, threads)
        self.device_name = name_of_device(backend, device_id)
        self._memory = IreeMemory(self._device, backend)
        try:
            instance = iree.VmInstance()
            self._modules = [
                iree.create_hal_module(instance, self._device),
                iree.VmModule.copy_buffer(instance, module),
            ]
            self._context = iree.VmContext(instance, self._modules)
        except (RuntimeError, ValueError) as error:
            raise ResourceError(f"cannot load a compiled module on the {backend} device: {error}") from error
        self._found: dict[str, Any] = {}

    def signature(self, function: str) -> FunctionSpec:
        if function not in self._signatures:
            known = ", ".join(self._signatures)
            raise LocalProtocolError(f"the compiled module has no function {function!r}; it has: {known}")
        return self._signatures[function]

    def put(self, spec: TensorSpec, array: np.ndarray) -> Handle:
        layout = self._blocks.get(spec.name)
        return self._memory.upload(spec, array if layout is None else layout.store(array))

    def get(self, spec: TensorSpec, handle: Handle) -> np.ndarray:
        layout = self._blocks.get(spec.name)
        if layout is None:
            return np.array(self._memory.read(spec, handle))
        stored = TensorSpec(spec.name, spec.dtype, layout.stored_shape(spec.shape))
        return layout.restore(self._memory.read(stored, handle), spec.shape)

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        if function not in self._found:
            found = self._modules[1].lookup_function(function)
            if found is None:
                raise LocalProtocolError(f"the compiled module has no function {function!r}")
            self._found[function] = found
        count = len(self.signature(function).results)
        inputs, outputs = iree.VmVariantList(len(arguments)), iree.VmVariantList(count)
        try:
            for argument in arguments:
                inputs.push_ref(argument.ref)
            self._context.invoke(self._found[function], inputs, outputs)  # releases the interpreter lock
            return [outputs.get_as_object(i, iree.HalBufferView) for i in range(count)]
        except (RuntimeError, ValueError) as error:
            raise ResourceError(f"{function} failed on the {self._backend} device: {error}") from error
