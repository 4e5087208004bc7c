"""Calls single functions of a compiled IREE module with host arrays; nothing stays on the device between calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import iree.runtime as iree
import numpy as np

from planetary.core.errors import LocalProtocolError, ResourceError
from planetary.core.tensors import TensorSpec, host_dtype
from planetary.runtime.iree_executor import ELEMENTS, open_device


class IreeFunctions:
    """A loaded module.

    Args:
        module: bytes of a VMFB for this machine.
        backend: what it was compiled for, e.g. `"cpu"`.
        threads: of a CPU device; None: all usable cores.
        device_id: which device of the backend.

    Raises:
        ResourceError: the device cannot be opened or the module not be loaded.
    """

    def __init__(self, module: bytes, *, backend: str, threads: int | None = None, device_id: int = 0) -> None:
        self._backend = backend
        self._device = open_device(backend, device_id, threads)
        usage = iree.BufferUsage.DEFAULT
        self._usage = int(usage | iree.BufferUsage.MAPPING) if backend == "cpu" else int(usage)
        try:
            instance = iree.VmInstance()
            self._modules = [
                iree.create_hal_module(instance, self._device),
                iree.VmModule.copy_buffer(instance, module),
            ]
            self._context = iree.VmContext(instance, self._modules)
        except (RuntimeError, ValueError) as error:
            raise ResourceError(f"cannot load a compiled module on the {backend} device: {error}") from error

    def call(
        self,
        function: str,
        arguments: Sequence[TensorSpec],
        arrays: Sequence[np.ndarray],
        results: Sequence[TensorSpec],
    ) -> list[np.ndarray]:
        """Return the results of a function as host arrays of their own.

        Raises:
            LocalProtocolError: the module has no such function.
            ResourceError: the device fails.
        """
        found = self._modules[1].lookup_function(function)
        if found is None:
            raise LocalProtocolError(f"the compiled module has no function {function!r}")
        inputs, outputs = iree.VmVariantList(len(arrays)), iree.VmVariantList(len(results))
        try:
            for spec, array in zip(arguments, arrays, strict=True):
                inputs.push_ref(self._upload(spec, array).ref)
            self._context.invoke(found, inputs, outputs)
            return [self._read(spec, outputs.get_as_object(i, iree.HalBufferView)) for i, spec in enumerate(results)]
        except (RuntimeError, ValueError) as error:
            raise ResourceError(f"{function} failed on the {self._backend} device: {error}") from error

    def _upload(self, spec: TensorSpec, array: np.ndarray) -> Any:
        return self._device.allocator.allocate_buffer_copy(
            memory_type=int(iree.MemoryType.DEVICE_LOCAL),
            allowed_usage=self._usage,
            device=self._device,
            buffer=array,
            element_type=ELEMENTS[spec.dtype],
        )

    def _read(self, spec: TensorSpec, view: Any) -> np.ndarray:
        raw = iree.DeviceArray(self._device, view).to_host()
        return np.array(raw.view(host_dtype(spec.dtype)) if raw.dtype != host_dtype(spec.dtype) else raw)
