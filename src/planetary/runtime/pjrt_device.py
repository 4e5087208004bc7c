"""Devices of JAX's PJRT client for a worker, with the memory and threads the worker was given."""

from __future__ import annotations

import os
from typing import Any

from planetary.core.errors import ResourceError, UserError
from planetary.runtime.backends import check_device
from planetary.runtime.host import cpu_name

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
