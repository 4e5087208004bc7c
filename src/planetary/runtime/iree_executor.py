"""Runs a compiled training step with IREE: the parameters never leave the device between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import iree.runtime as iree
import numpy as np

from planetary.core.artifact_label import ArtifactLabel, read_label
from planetary.core.errors import ClosedError, LocalProtocolError, ResourceError, TrustError, UserError
from planetary.core.step import RATE, STEP, StepSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.runtime.backends import check_device
from planetary.runtime.executor import StepResult
from planetary.runtime.host import cpu_name, host_features, usable_cores
from planetary.runtime.host_arrays import checked_batch, in_order
from planetary.runtime.host_memory import keep_large_blocks
from planetary.runtime.iree_memory import IreeMemory

DRIVERS = {"cpu": "local-task", "cuda": "cuda", "hip": "hip", "vulkan": "vulkan", "metal": "metal"}

_INLINE = "local-sync"
"""The CPU driver that computes in the calling thread. For one thread: handing each dispatch over to another took half
of the processor time of a small call (bench/results/serving.md)."""

_SCALAR = TensorSpec(name="scalar", dtype="f32", shape=())


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


class IreeExecutor:
    """A training step on an IREE device. One per process on a CPU, because the threads of a process are shared.

    Args:
        artifact: file with the compiled module.
        spec: signature of the training step.
        backend: one of `DRIVERS`.
        threads: threads of a CPU device; None: all usable cores. Fixed for the process by the first executor.
        device_id: which GPU, in the driver's order.

    Raises:
        TrustError: the module is not for this runtime version, backend or CPU.
        ResourceError: the device cannot be opened or the module not be loaded.
    """

    def __init__(
        self,
        artifact: Path | str,
        spec: StepSpec,
        *,
        backend: str = "cpu",
        threads: int | None = None,
        device_id: int = 0,
    ) -> None:
        path = Path(artifact)
        self.spec = spec
        try:
            module = path.read_bytes()
        except OSError as error:
            raise ResourceError(f"cannot read the compiled module {path}: {error.strerror or error}") from error
        self.label = read_label(module)
        check_label(self.label, runtime_version=iree_version(), backend=backend, features=host_features())
        if self.label.stablehlo != spec.stablehlo_digest:
            raise TrustError(
                f"the compiled module was made from StableHLO {self.label.stablehlo[:12]}…, the job is about "
                f"{spec.stablehlo_digest[:12]}…"
            )
        self._backend = backend
        self._device = open_device(backend, device_id, threads)
        self.device_name = name_of_device(backend, device_id)
        self._memory = IreeMemory(self._device, backend)
        try:
            instance = iree.VmInstance()
            self._modules = [
                iree.create_hal_module(instance, self._device),
                iree.VmModule.copy_buffer(instance, module),  # a few hundred KB; the file may go away
            ]
            self._context = iree.VmContext(instance, self._modules)
            self._train = self._modules[1].lookup_function("train_step")
            self._eval = self._modules[1].lookup_function("eval_step")
        except (RuntimeError, ValueError) as error:
            raise ResourceError(f"cannot load the compiled module {path}: {error}") from error
        if self._train is None or self._eval is None:
            raise TrustError(f"the compiled module {path} lacks train_step or eval_step")
        self._params: list[Any] | None = None
        self._buffers: list[Any] = []
        self._opt_state: list[Any] | None = None
        self._closed = False

    def peak_memory(self) -> int:
        """Return the most bytes allocated on the device at once. See `Executor.peak_memory`."""
        self._check_open()
        counted = self._device.allocator.statistics
        return int(counted["device_bytes_peak"] + counted["host_bytes_peak"])

    # --- state on the device --------------------------------------------------------------------------------

    def load(self, params: Tensors, buffers: Tensors, opt_state: Tensors | None) -> None:
        """Put parameters, buffers and optimizer state (None: zeros) on the device. See `Executor.load`."""
        self._check_open()
        self._buffers = self._upload_all(self.spec.buffers, buffers)
        self.set_params(params)
        if opt_state is None:
            self.reset_opt_state()
        else:
            self._opt_state = None
            self._opt_state = self._upload_all(self.spec.opt_state, opt_state)

    def set_params(self, params: Tensors) -> None:
        """Replace the parameters on the device. See `Executor.set_params`."""
        self._check_open()
        self._params = None  # frees the old ones first: a device may not hold both
        self._params = self._upload_all(self.spec.params, params)

    def reset_opt_state(self) -> None:
        """Set the optimizer state to zeros. See `Executor.reset_opt_state`."""
        self._check_open()
        self._opt_state = None
        self._opt_state = [self._memory.upload(spec, spec.zeros()) for spec in self.spec.opt_state]

    def read_params(self, into: Tensors | None = None) -> dict[str, np.ndarray]:
        """Return host copies of the parameters. See `Executor.read_params`."""
        return self._read_all(self.spec.params, self._loaded(self._params), into)

    def read_opt_state(self) -> dict[str, np.ndarray]:
        """Return host copies of the optimizer state. See `Executor.read_opt_state`."""
        return self._read_all(self.spec.opt_state, self._loaded(self._opt_state), None)

    # --- execution ------------------------------------------------------------------------------------------

    def train_step(self, step: int, rate: float, batch: Sequence[np.ndarray]) -> StepResult:
        """Run one inner step in place. See `Executor.train_step`."""
        state = [*self._loaded(self._params), *self._buffers, *self._loaded(self._opt_state)]
        scalars = [
            self._memory.upload(STEP, np.array(step, np.int32)),
            self._memory.upload(RATE, np.array(rate, np.float32)),
        ]
        outputs = self._invoke(self._train, [*state, *scalars, *self._upload_batch(self.spec.train_batch, batch)])
        # The module writes parameters and optimizer state into the buffers they came from; only scalars are
        # new.
        loss = self._memory.read(_SCALAR, outputs.get_as_object(len(outputs) - 2, iree.HalBufferView))
        norm = self._memory.read(_SCALAR, outputs.get_as_object(len(outputs) - 1, iree.HalBufferView))
        return StepResult(float(loss), float(norm))

    def eval_step(self, batch: Sequence[np.ndarray]) -> float:
        """Return the mean loss of one batch. See `Executor.eval_step`."""
        arguments = [*self._loaded(self._params), *self._buffers, *self._upload_batch(self.spec.batch, batch)]
        outputs = self._invoke(self._eval, arguments)
        return float(self._memory.read(_SCALAR, outputs.get_as_object(0, iree.HalBufferView)))

    def close(self) -> None:
        """Release the tensors on the device; the device itself stays open, see `open_device`."""
        if self._closed:
            return
        self._closed = True
        # The bindings crash if a buffer outlives the device: drop them from the inside out.
        self._params, self._buffers, self._opt_state = None, [], None
        del self._train, self._eval, self._context, self._modules, self._memory, self._device

    # --- details --------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the executor is closed")

    def _loaded(self, tensors: list[Any] | None) -> list[Any]:
        self._check_open()
        if tensors is None:
            raise LocalProtocolError("the executor was asked to run or read before `load`")
        return tensors

    def _invoke(self, function: Any, arguments: Sequence[Any]) -> Any:
        inputs, outputs = iree.VmVariantList(len(arguments)), iree.VmVariantList(len(arguments))
        for argument in arguments:
            inputs.push_ref(argument.ref)
        try:
            self._context.invoke(function, inputs, outputs)  # releases the interpreter lock
        except (RuntimeError, ValueError) as error:
            raise ResourceError(f"{function.name} failed on the {self._backend} device: {error}") from error
        return outputs

    def _upload_batch(self, specs: Sequence[TensorSpec], batch: Sequence[np.ndarray]) -> list[Any]:
        arrays = checked_batch(specs, batch)
        return [self._memory.upload(spec, array) for spec, array in zip(specs, arrays, strict=True)]

    def _upload_all(self, specs: Sequence[TensorSpec], tensors: Tensors) -> list[Any]:
        arrays = in_order(specs, tensors)
        return [self._memory.upload(spec, array) for spec, array in zip(specs, arrays, strict=True)]

    def _read_all(
        self, specs: Sequence[TensorSpec], views: Sequence[Any], into: Tensors | None
    ) -> dict[str, np.ndarray]:
        found = {}
        for spec, view in zip(specs, views, strict=True):
            target = spec.empty() if into is None else into[spec.name]
            np.copyto(target, self._memory.read(spec, view), casting="no")
            found[spec.name] = target
        return found
