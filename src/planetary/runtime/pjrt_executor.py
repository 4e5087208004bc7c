"""Runs a training step with XLA through JAX's PJRT client, on one device or on an island of several.

The artifact is the portable StableHLO itself: XLA compiles it here, for exactly these devices. An island holds the
parameters whole on every device and splits each batch among them; XLA's partitioner adds the sums of the gradients.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planetary.core.errors import ClosedError, LocalProtocolError, ResourceError, TrustError, UserError
from planetary.core.step import RATE, STEP, StepSpec
from planetary.core.tensors import Tensors, TensorSpec, host_dtype
from planetary.runtime.backends import check_device
from planetary.runtime.executor import StepResult
from planetary.runtime.host import cpu_name
from planetary.runtime.host_arrays import checked_batch, in_order

PLATFORMS = {"pjrt:cpu": "cpu", "pjrt:cuda": "cuda"}

MEMORY_SHARE = "0.9"
"""Part of a GPU's memory a worker may take, as it needs it; the rest is for the driver, kernels and libraries."""


def _set_up_process(platform: str, first: int, count: int, threads: int | None) -> None:
    """Give JAX exactly the wanted devices and threads, or check a client which is open has them.

    Without it, a CPU worker would open the GPUs of the machine, and every GPU worker would take memory on all of them.

    Raises:
        UserError: JAX is in use in this process with other threads.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # the client lists the devices on the terminal otherwise
    import jax

    from planetary.compiler.backends import xla

    if xla.in_use():
        if platform == "cpu" and threads is not None and os.environ.get("NPROC") != str(threads):
            raise UserError(
                f"JAX is in use in this process with {os.environ.get('NPROC', 'all')} CPU threads and cannot change "
                f"to {threads}; start another process"
            )
        return
    if platform == "cpu":
        if threads is not None:
            os.environ["NPROC"] = str(threads)  # the only way to tell XLA's CPU client
        jax.config.update("jax_platforms", "cpu")
        if count > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            jax.config.update("jax_num_cpu_devices", count)
        return
    # By default JAX takes three quarters of a GPU at once, and nothing is left for a second worker on it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the older name; JAX refuses both at once
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", MEMORY_SHARE)
    jax.config.update("jax_platforms", f"{platform},cpu")
    jax.config.update("jax_cuda_visible_devices", ",".join(str(i) for i in range(first, first + count)))


def open_devices(backend: str, device_id: int = 0, island: int = 1, threads: int | None = None) -> list[Any]:
    """Return JAX's devices for a worker: exactly those asked for.

    Args:
        backend: one of `PLATFORMS`.
        device_id: which GPU, or which island of neighbouring GPUs; a CPU worker's devices are the process's own.
        island: how many.
        threads: of the CPU client; None: as it is.

    Raises:
        UserError: the backend is unknown, or JAX is in use in this process with other devices or threads.
        ResourceError: the devices are not there.
    """
    platform = PLATFORMS.get(backend)
    if platform is None:
        raise UserError(f"unknown backend {backend!r}; known: {', '.join(PLATFORMS)}")
    check_device(backend, device_id, threads)
    import jax

    from planetary.compiler.backends import xla

    first = device_id * island
    _set_up_process(platform, first, island, threads)
    try:
        devices = list(jax.devices(platform))
    except RuntimeError as error:
        raise ResourceError(f"cannot open the {backend} devices: {error}") from error
    if platform != "cpu":
        visible = xla.visible_gpus()
        by_number = dict(zip(range(len(devices)) if visible is None else visible, devices, strict=False))
        devices = [by_number[i] for i in range(first, first + island) if i in by_number]
    if len(devices) < island:
        raise ResourceError(
            f"worker {device_id} wants {island} {backend} devices, starting with number {first}: JAX lists "
            f"{len(devices)} for it ({', '.join(str(device) for device in devices)})"
        )
    return devices[:island]


def name_of_device(device: Any) -> str:
    """Return the driver's name of a device of JAX."""
    return cpu_name() if device.platform == "cpu" else device.device_kind


class PjrtExecutor:
    """A training step on one PJRT device or on an island of several.

    Args:
        artifact: file with the portable StableHLO of the training step.
        spec: signature of the step.
        backend: one of `PLATFORMS`.
        threads: of the CPU client of this process; None: all usable cores. Fixed by the first executor.
        device_id: which GPU; with an island, which group of `island` neighbouring GPUs. CPU devices are the
            process's own, so it has no meaning there.
        island: devices that run every step together; divides the batch size.

    Raises:
        TrustError: the file is not the StableHLO the job is about.
        ResourceError: the file cannot be read, or the devices are not there.
        UserError: the batch cannot be divided among the devices.
        CompileError: XLA refuses the training step.
    """

    def __init__(
        self,
        artifact: Path | str,
        spec: StepSpec,
        *,
        backend: str = "pjrt:cpu",
        threads: int | None = None,
        device_id: int = 0,
        island: int = 1,
    ) -> None:
        path = Path(artifact)
        try:
            portable = path.read_bytes()
        except OSError as error:
            raise ResourceError(f"cannot read the StableHLO {path}: {error.strerror or error}") from error
        found = hashlib.sha256(portable).hexdigest()
        if found != spec.stablehlo_digest:
            raise TrustError(
                f"{path} has the digest {found[:12]}…, the job is about StableHLO {spec.stablehlo_digest[:12]}…; "
                "nothing of it was loaded"
            )
        self.spec = spec
        self._backend = backend
        devices = open_devices(backend, device_id, island, threads)
        kind = name_of_device(devices[0])
        self.device_name = kind if island == 1 else f"{island} × {kind}"
        import jax

        from planetary.compiler.backends import xla

        self._xla = xla
        self._join: Any = jax.make_array_from_single_device_arrays
        mesh = jax.sharding.Mesh(np.array(devices), ("island",))
        self._whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("island"))
        model, state, batch = len(spec.params) + len(spec.buffers), len(spec.opt_state), len(spec.batch)
        first = model + state + 2  # after the number of the step and the rate
        replaced = [*range(len(spec.params)), *range(model, model + state)]
        self._train = self._compile(portable, "train_step", devices, range(first, first + batch), replaced)
        self._eval = self._compile(portable, "eval_step", devices, range(model, model + batch))
        self._params: list[Any] | None = None
        self._buffers: list[Any] = []
        self._opt_state: list[Any] | None = None
        self._closed = False

    def _compile(
        self, portable: bytes, name: str, devices: Sequence[Any], split: Sequence[int], replaced: Sequence[int] = ()
    ) -> Any:
        text, _ = self._xla.as_main(
            portable, name, replaced=replaced, split=split, devices=len(devices), platform=devices[0].platform
        )
        return self._xla.compile_main(text, devices)

    def peak_memory(self) -> int:
        """Return the most bytes on one device at once; 0 on CPUs, where XLA does not count."""
        self._check_open()
        counted = [device.memory_stats() or {} for device in self._whole.device_set]
        return max(int(stats.get("peak_bytes_in_use", 0)) for stats in counted)

    # --- state on the device --------------------------------------------------------------------------------

    def load(self, params: Tensors, buffers: Tensors, opt_state: Tensors | None) -> None:
        """Put parameters, buffers and optimizer state (None: zeros) on the device. See `Executor.load`."""
        self._check_open()
        self._buffers = self._upload_all(self.spec.buffers, in_order(self.spec.buffers, buffers))
        self.set_params(params)
        if opt_state is None:
            self.reset_opt_state()
        else:
            self._opt_state = None
            self._opt_state = self._upload_all(self.spec.opt_state, in_order(self.spec.opt_state, opt_state))

    def set_params(self, params: Tensors) -> None:
        """Replace the parameters on the device. See `Executor.set_params`."""
        self._check_open()
        self._params = None  # frees the old ones first: a device may not hold both
        self._params = self._upload_all(self.spec.params, in_order(self.spec.params, params))

    def reset_opt_state(self) -> None:
        """Set the optimizer state to zeros. See `Executor.reset_opt_state`."""
        self._check_open()
        self._opt_state = None
        self._opt_state = self._upload_all(self.spec.opt_state, [s.zeros() for s in self.spec.opt_state], copy=False)

    def read_params(self, into: Tensors | None = None) -> dict[str, np.ndarray]:
        """Return host copies of the parameters. See `Executor.read_params`."""
        return self._read_all(self.spec.params, self._loaded(self._params), into)

    def read_opt_state(self) -> dict[str, np.ndarray]:
        """Return host copies of the optimizer state. See `Executor.read_opt_state`."""
        return self._read_all(self.spec.opt_state, self._loaded(self._opt_state), None)

    # --- execution ------------------------------------------------------------------------------------------

    def train_step(self, step: int, rate: float, batch: Sequence[np.ndarray]) -> StepResult:
        """Run one inner step in place. See `Executor.train_step`."""
        params, state = self._loaded(self._params), self._loaded(self._opt_state)
        data = self._upload_batch(self.spec.train_batch, batch)
        number = self._place(STEP, np.array(step, np.int32), self._whole)
        given = self._place(RATE, np.array(rate, np.float32), self._whole)
        arguments = [*params, *self._buffers, *state, number, given, *data]
        self._params = self._opt_state = None  # their memory is written over: after a failure they are gone
        try:
            results = self._xla.run(self._train, arguments)
            loss, norm = (float(np.asarray(parts[0])) for parts in results[-2:])
        except Exception as error:
            raise self._failed("train_step", error) from error
        new = [
            self._join(old.shape, self._whole, parts)
            for old, parts in zip((*params, *state), results[:-2], strict=True)
        ]
        self._params, self._opt_state = new[: len(params)], new[len(params) :]
        return StepResult(loss, norm)

    def eval_step(self, batch: Sequence[np.ndarray]) -> float:
        """Return the mean loss of one batch. See `Executor.eval_step`."""
        arguments = [*self._loaded(self._params), *self._buffers, *self._upload_batch(self.spec.batch, batch)]
        try:
            return float(np.asarray(self._xla.run(self._eval, arguments)[0][0]))
        except Exception as error:
            raise self._failed("eval_step", error) from error

    def state_arrays(self) -> list[Any]:
        """Return JAX's arrays of the parameters and the optimizer state on the devices, until the next step."""
        return [*self._loaded(self._params), *self._loaded(self._opt_state)]

    def train_program(self) -> str:
        """Return the text of the training step as XLA compiled it."""
        self._check_open()
        return self._train.hlo_modules()[0].to_string()

    def close(self) -> None:
        """Release the tensors on the device."""
        if self._closed:
            return
        self._closed = True
        self._params, self._buffers, self._opt_state = None, [], None
        del self._train, self._eval

    # --- details --------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the executor is closed")

    def _loaded(self, tensors: list[Any] | None) -> list[Any]:
        self._check_open()
        if tensors is None:
            raise LocalProtocolError("the executor was asked to run or read before `load`, or after a step that failed")
        return tensors

    def _failed(self, function: str, error: Exception) -> ResourceError:
        return ResourceError(f"{function} failed on the {self._backend} device: {error}")

    def _upload_all(self, specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray], copy: bool = True) -> list[Any]:
        # XLA's CPU devices use host memory as it is, and the caller may write to the arrays later.
        given = [array.copy() if copy else array for array in arrays]
        return [self._place(spec, array, self._whole) for spec, array in zip(specs, given, strict=True)]

    def _upload_batch(self, specs: Sequence[TensorSpec], batch: Sequence[np.ndarray]) -> list[Any]:
        # Needs no copy: a step has ended, and with it all reading, before the caller gets the arrays back.
        arrays, whole = checked_batch(specs, batch), self.spec.keys  # every device of an island has all keys
        return [
            self._place(spec, array, self._whole if spec in whole else self._split)
            for spec, array in zip(specs, arrays, strict=True)
        ]

    def _place(self, spec: TensorSpec, array: np.ndarray, where: Any) -> Any:
        try:
            return self._xla.place(array, spec.dtype, where)
        except (RuntimeError, ValueError) as error:
            raise ResourceError(
                f"cannot put tensor {spec.name!r} ({spec.nbytes} bytes) on the {self._backend} device: {error}"
            ) from error

    def _read_all(
        self, specs: Sequence[TensorSpec], arrays: Sequence[Any], into: Tensors | None
    ) -> dict[str, np.ndarray]:
        found = {}
        for spec, array in zip(specs, arrays, strict=True):
            target = spec.empty() if into is None else into[spec.name]
            # A shard's own array, dropped at once: one that was read keeps a view of the device's memory, and then
            # the next step could not write over it.
            raw = np.asarray(array.addressable_shards[0].data)
            np.copyto(target, raw.view(host_dtype(spec.dtype)), casting="no")
            found[spec.name] = target
        return found
