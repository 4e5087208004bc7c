"""Programs on IREE's devices: tensors stay on the device between two calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import iree.runtime as iree
import numpy as np

from planetary.core.artifact_label import StagedFunction
from planetary.core.errors import LocalProtocolError, ResourceError
from planetary.core.tensors import TensorSpec, WeightBlocks
from planetary.runtime.device_program import DeviceProgram, Handle, Program, copied
from planetary.runtime.iree_device import IreeMemory, name_of_device, open_device


class IreeProgram(DeviceProgram):
    """A loaded module. On a CPU all modules of a process share its threads.

    Args:
        module: bytes of a VMFB for this machine.
        program: description of the module.
        backend: one of `iree_device.DRIVERS`, which it was compiled for.
        threads: of a CPU device; None: all usable cores. Fixed for the process by the first module.
        device_id: which device of the backend, in the driver's order.
        blocks: layouts of the arguments the functions take in blocks; here they have their own shapes.
        staged: functions of the program that the module has as several.

    Raises:
        ResourceError: the device cannot be opened or the module not be loaded.
    """

    def __init__(
        self,
        module: bytes,
        program: Program,
        *,
        backend: str,
        threads: int | None = None,
        device_id: int = 0,
        blocks: Sequence[WeightBlocks] = (),
        staged: Sequence[StagedFunction] = (),
    ) -> None:
        self._backend = backend
        self._blocks = {layout.name: layout for layout in blocks}
        self._staged = {function.name: function for function in staged}
        self._device = open_device(backend, device_id, threads)
        super().__init__(program, name_of_device(backend, device_id))
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

    def put(self, spec: TensorSpec, array: np.ndarray) -> Handle:
        layout = self._blocks.get(spec.name)
        return self._memory.upload(spec, array if layout is None else layout.store(array))

    def get(self, spec: TensorSpec, handle: Handle, into: np.ndarray | None = None) -> np.ndarray:
        layout = self._blocks.get(spec.name)
        if layout is None:
            return copied(self._memory.read(spec, handle), into)
        stored = TensorSpec(spec.name, spec.dtype, layout.stored_shape(spec.shape))
        return layout.restore(self._memory.read(stored, handle), spec.shape)

    def prepare(self, function: str) -> None:
        for name in [s.function for s in self._staged[function].stages] if function in self._staged else [function]:
            found = self._modules[1].lookup_function(name)
            if found is None:
                raise LocalProtocolError(f"the compiled module has no function {name!r}")
            self._found[name] = found

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        staged = self._staged.get(function)
        if staged is None:
            return self._call(function, arguments, len(self.signature(function).results))
        values, count = dict(enumerate(arguments)), len(arguments)
        for stage in staged.stages:
            results = self._call(stage.function, [values[i] for i in stage.arguments], stage.results)
            values.update(enumerate(results, count))
            count += len(results)
            del results
            for i in stage.released:
                del values[i]
        return [values[i] for i in staged.results]

    def _call(self, function: str, arguments: Sequence[Handle], count: int) -> list[Handle]:
        if function not in self._found:
            self.prepare(function)
        inputs, outputs = iree.VmVariantList(len(arguments)), iree.VmVariantList(count)
        try:
            for argument in arguments:
                inputs.push_ref(argument.ref)
            self._context.invoke(self._found[function], inputs, outputs)  # releases the interpreter lock
            return [outputs.get_as_object(i, iree.HalBufferView) for i in range(count)]
        except (RuntimeError, ValueError) as error:
            raise ResourceError(f"{function} failed on the {self._backend} device: {error}") from error

    def peak_memory(self) -> int:
        counted = self._device.allocator.statistics
        return int(counted["device_bytes_peak"] + counted["host_bytes_peak"])

    def close(self) -> None:
        # The bindings crash if a buffer outlives the device: drop them from the inside out.
        del self._found, self._context, self._modules, self._memory, self._device
