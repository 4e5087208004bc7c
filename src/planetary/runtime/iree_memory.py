"""Host arrays to buffers of an IREE device and back; every user of a device shares these two ways."""

from __future__ import annotations

from typing import Any

import iree.runtime as iree
import numpy as np

from planetary.core.errors import ResourceError
from planetary.core.tensors import TensorSpec, host_dtype

ELEMENTS = {
    "f64": iree.HalElementType.FLOAT_64,
    "f32": iree.HalElementType.FLOAT_32,
    "f16": iree.HalElementType.FLOAT_16,
    "bf16": iree.HalElementType.BFLOAT_16,
    "i64": iree.HalElementType.SINT_64,
    "i32": iree.HalElementType.SINT_32,
    "i16": iree.HalElementType.SINT_16,
    "i8": iree.HalElementType.SINT_8,
    "ui64": iree.HalElementType.UINT_64,
    "ui32": iree.HalElementType.UINT_32,
    "ui16": iree.HalElementType.UINT_16,
    "ui8": iree.HalElementType.UINT_8,
    "i1": iree.HalElementType.BOOL_8,
    "complex<f32>": iree.HalElementType.COMPLEX_64,
    "complex<f64>": iree.HalElementType.COMPLEX_128,
}


class IreeMemory:
    """The memory of one device.

    Args:
        device: as `iree_executor.open_device` returns it.
        backend: of the device, e.g. `"vulkan"`.
    """

    def __init__(self, device: Any, backend: str) -> None:
        self._device, self._backend = device, backend
        usage = iree.BufferUsage.DEFAULT
        self._usage = int(usage | iree.BufferUsage.MAPPING) if backend == "cpu" else int(usage)

    def upload(self, spec: TensorSpec, array: np.ndarray) -> Any:
        """Return a buffer view with a copy of a C-contiguous array. Raises `ResourceError`."""
        if array.dtype == np.bool_:
            array = array.view(np.int8)
        try:
            return self._device.allocator.allocate_buffer_copy(
                memory_type=int(iree.MemoryType.DEVICE_LOCAL),
                allowed_usage=self._usage,
                device=self._device,
                buffer=array,
                element_type=ELEMENTS[spec.dtype],
            )
        except (RuntimeError, ValueError) as error:
            raise ResourceError(
                f"cannot put tensor {spec.name!r} ({spec.nbytes} bytes) on the {self._backend} device: {error}"
            ) from error

    def read(self, spec: TensorSpec, view: Any) -> np.ndarray:
        """Return the bytes of a buffer view as a host array.

        It may be a view of device memory: copy it before the next function runs. Raises `ResourceError`.
        """
        try:
            if self._backend == "vulkan":
                return np.frombuffer(self._staged(view), host_dtype(spec.dtype), spec.size).reshape(spec.shape)
            if self._backend == "cpu" and spec.dtype != "i1":  # as `DeviceArray` does, in a third of the time
                return view.map().asarray(spec.shape, host_dtype(spec.dtype))
            raw = iree.DeviceArray(self._device, view).to_host()
        except (RuntimeError, ValueError) as error:
            raise ResourceError(
                f"cannot read tensor {spec.name!r} ({spec.nbytes} bytes) from the {self._backend} device: {error}"
            ) from error
        return raw.view(host_dtype(spec.dtype)) if raw.dtype != host_dtype(spec.dtype) else raw

    def _staged(self, view: Any) -> np.ndarray:
        """Return the bytes of a buffer by way of one the host sees.

        IREE's own way (3.13) has Vulkan write into a numpy array, and Vulkan takes host memory at addresses that
        are multiples of 4096 only, which numpy's are not.
        """
        source = view.get_buffer()
        length = source.byte_length()
        staging = self._device.allocator.allocate_buffer(
            memory_type=int(iree.MemoryType.HOST_LOCAL | iree.MemoryType.DEVICE_VISIBLE),
            allowed_usage=int(iree.BufferUsage.TRANSFER_TARGET | iree.BufferUsage.MAPPING_SCOPED),
            allocation_size=length,
        )
        done = self._device.create_semaphore(0)
        self._device.queue_copy(
            source,
            staging,
            wait_semaphores=iree.HalFence.create_at(done, 0),
            signal_semaphores=iree.HalFence.create_at(done, 1),
        )
        iree.HalFence.create_at(done, 1).wait()
        return staging.map().asarray((length,), np.dtype(np.uint8)).copy()
