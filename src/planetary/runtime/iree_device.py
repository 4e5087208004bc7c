"""Devices of IREE: how one is opened, whether a module may be loaded there, host arrays to buffers and back."""

from __future__ import annotations

from typing import Any

import iree.runtime as iree
import numpy as np

from planetary.core.artifact_label import ArtifactLabel
from planetary.core.errors import ResourceError, TrustError, UserError
from planetary.core.tensors import TensorSpec, host_dtype
from planetary.runtime.backends import check_device
from planetary.runtime.host import cpu_name, usable_cores
from planetary.runtime.host_memory import keep_large_blocks

DRIVERS = {"cpu": "local-task", "cuda": "cuda", "hip": "hip", "vulkan": "vulkan", "metal": "metal"}

_INLINE = "local-sync"
"""The CPU driver that computes in the calling thread. For one thread: handing each dispatch over to another took half
of the processor time of a small call (bench/results/serving.md)."""


def iree_version() -> str:
    """Return the version of the IREE runtime in this process, e.g. `"3.13.0"`."""
    from importlib.metadata import version

    return version("iree-base-runtime")


def check_label(label: ArtifactLabel, *, runtime_version: str, backend: str, features: str) -> None:
    """Raise `TrustError` if a module with this label must not be loaded here.

    Args:
        label: of the compiled module.
        runtime_version: version of the IREE runtime that would load it.
        backend: the backend it would run on.
        features: this CPU, as `host_features()` names it; matters for `"host"` and `"baseline"` modules only.
    """
    if label.iree != runtime_version:
        raise TrustError(
            f"the compiled module needs iree-base-runtime {label.iree}, this process has {runtime_version}; "
            "install the same version of iree-base-compiler on the gateway and iree-base-runtime on every "
            "worker"
        )
    if label.backend != backend:
        raise TrustError(f"the compiled module is for backend {label.backend!r}, this worker runs {backend!r}")
    if label.backend != "cpu":
        return
    if label.target == "host" and label.features != features:
        raise TrustError(
            f"binary for another CPU: the compiled module is tuned for {label.features}, this machine is "
            f"{features}; "
            "run the worker with --target baseline, or let the gateway compile for this machine"
        )
    if label.target != "host" and label.features != features.partition("-")[0]:
        raise TrustError(
            f"binary for another CPU: the compiled module is for {label.features}, this machine is "
            f"{features.partition('-')[0]}"
        )


class _Threads:
    """The CPU driver of a process has one pool of threads, made once; remember the size."""

    count: int | None = None


_devices: dict[tuple[str, int], Any] = {}  # devices by driver and number
_names: dict[tuple[str, int], str] = {}  # drivers' names of the same devices


def open_device(backend: str, device_id: int, threads: int | None) -> Any:
    """Return the device, opened once per process and never closed.

    Destroying a device waits for the threads while the interpreter lock is held. A thread still clearing up after the
    last task wants this lock to release references of the bindings, so both wait forever: about one close in five hung
    (IREE 3.13). Modules and buffers are released as usual; the end of the process closes the device.
    """
    driver = DRIVERS.get(backend)
    if driver is None:
        raise UserError(f"unknown backend {backend!r}; known: {', '.join(DRIVERS)}")
    if backend == "cpu" and (usable_cores() if threads is None else threads) == 1:
        driver = _INLINE
    key = (driver, device_id)
    pooled = driver == DRIVERS["cpu"] and threads is not None
    if key not in _devices or (pooled and threads != _Threads.count):
        _devices[key] = _make_device(backend, driver, device_id, threads)
    return _devices[key]


def name_of_device(backend: str, device_id: int) -> str:
    """Return the driver's name of an open device."""
    return _names[backend, device_id]


def list_devices(backend: str) -> list[str]:
    """Return the names of the devices the driver of a backend lists. Opens the driver; raises the driver's errors."""
    if backend == "cpu":
        return [cpu_name()]
    return [str(found.get("name") or "?") for found in iree.get_driver(DRIVERS[backend]).query_available_devices()]


def _make_device(backend: str, driver_name: str, device_id: int, threads: int | None) -> Any:
    check_device(backend, device_id, threads)
    if backend == "cpu":
        keep_large_blocks()
    if driver_name == DRIVERS["cpu"]:
        wanted = usable_cores() if threads is None else threads
        if _Threads.count is None:
            iree.flags.parse_flags(f"--task_topology_group_count={wanted}")
            _Threads.count = wanted
        elif threads is not None and threads != _Threads.count:
            raise UserError(
                f"this process runs its CPU device with {_Threads.count} threads and cannot change to "
                f"{threads}; "
                "start another process"
            )
    try:
        driver = iree.get_driver(driver_name)
        if backend == "cpu":
            _names[backend, device_id] = cpu_name()
            return driver.create_default_device()
        devices = driver.query_available_devices()
        if device_id >= len(devices):
            raise ResourceError(
                f"no {backend} device {device_id}: the driver lists {len(devices)} "
                f"({', '.join(str(d.get('name', '?')) for d in devices) or 'none'})"
            )
        _names[backend, device_id] = str(devices[device_id].get("name") or f"{backend} device {device_id}")
        return driver.create_device(devices[device_id], None)
    except (RuntimeError, ValueError) as error:
        raise ResourceError(f"cannot open the {backend} device {device_id}: {error}") from error


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
        device: as `open_device` returns it.
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
