"""The backends of this machine and their devices. No runtime is imported before it is chosen."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

from planetary.core.errors import UserError


class DeviceChoice(TypedDict):
    """The device of this machine that compiled code is loaded on."""

    backend: str  # e.g. "cpu", "vulkan", "pjrt:cuda"
    threads: int | None  # of a CPU device; None: all usable cores
    device_id: int  # of the backend's devices
    island: int  # devices that run every step together


PJRT_TARGET = "stablehlo"  # a PJRT worker gets the portable artifact, and compiles it itself
CPU_BACKENDS = ("cpu", "pjrt:cpu")  # backends whose workers share the cores of their machine
_LISTING_S = 30.0  # time for a driver to list devices
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def is_pjrt(backend: str) -> bool:
    """Whether `backend` executes StableHLO through PJRT (XLA), e.g. `"pjrt:cpu"`; all others are IREE's."""
    return backend.startswith("pjrt:")


def require_backend(backend: str, island: int = 1) -> None:
    """Raise `UserError` unless the packages of `backend` are installed and it can run on `island` devices at once."""
    if island < 1:
        raise UserError(f"an island has at least 1 device, found {island}")
    if not is_pjrt(backend):
        if island != 1:
            raise UserError(
                f"an island of {island} devices needs a PJRT backend (--backend pjrt:cuda), found {backend!r}: "
                "start one worker per device with --scale instead"
            )
        return
    if importlib.util.find_spec("jax") is None:
        raise UserError(f"backend {backend!r} needs JAX, which is not installed: pip install 'planetary-compute[pjrt]'")
    if backend == "pjrt:cuda" and not any(importlib.util.find_spec(plugin) for plugin in _CUDA_PLUGINS):
        raise UserError(
            f"backend {backend!r} needs JAX with its CUDA plugin, which is not installed: "
            "pip install 'planetary-compute[pjrt-cuda]'"
        )


def installed_backends() -> list[str]:
    """Return the backends that may run here, in order of preference where their steps take equally long.

    GPUs are found by the entries of their kernel drivers in the file system: opening a driver would take memory in a
    process without a step. Software Vulkan devices are left out; they stand for the CPU.
    """
    has_jax = importlib.util.find_spec("jax") is not None
    found = []
    if any(Path("/dev").glob("nvidia[0-9]*")):
        found.append("cuda")
        if has_jax and any(importlib.util.find_spec(plugin) for plugin in _CUDA_PLUGINS):
            found.append("pjrt:cuda")
    elif Path("/dev/kfd").exists():
        found.append("hip")
    elif platform.system() == "Darwin":
        found.append("metal")
    elif any(Path("/dev/dri").glob("renderD*")):
        found.append("vulkan")
    return [*found, "cpu", *(["pjrt:cpu"] if has_jax else [])]


def runtime_version(backend: str) -> str:
    """Return the version of the runtime that loads compiled modules; "" for PJRT, which loads StableHLO of any."""
    if is_pjrt(backend):
        return ""
    from planetary.runtime.iree_device import iree_version

    return iree_version()


def check_device(backend: str, device_id: int, threads: int | None) -> None:
    """Raise `UserError` for a device that cannot be, and for threads a device has no use for.

    Args:
        backend: e.g. `"cuda"`.
        device_id: number of the device, or of the worker on the machine.
        threads: of a CPU device; None: not given.
    """
    if device_id < 0:
        raise UserError(f"a device's number starts at 0, found {device_id}")
    if threads is None:
        return
    if backend not in CPU_BACKENDS:
        raise UserError(f"{threads} threads for backend {backend!r}: only CPU devices have threads; leave them out")
    if threads < 1:
        raise UserError(f"a worker needs at least 1 thread, found {threads}")


def list_devices(backend: str) -> list[str]:
    """Return the names of the devices of a backend of IREE, in the driver's order. Raises the driver's exceptions."""
    from planetary.runtime import iree_device

    return iree_device.list_devices(backend)


def count_devices(backend: str) -> int:
    """Return the number of devices of a GPU backend here; 0: unknown, because no driver lists them.

    A separate process asks the driver: this one may start workers, and an open driver holds memory of the device.
    """
    driver = backend.partition(":")[2] or backend  # PJRT's GPUs are those of the same driver
    script = f"from planetary.runtime.backends import list_devices; print(len(list_devices({driver!r})))"
    command = [sys.executable, "-c", script]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LISTING_S, check=True)
        return int(ended.stdout.split()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return 0


def runtime_identity(backend: str) -> str:
    """Return the versions of the runtime and of GPU drivers, which decide how a device executes an artifact."""
    from importlib.metadata import version

    parts = [version("jaxlib") if is_pjrt(backend) else runtime_version(backend)]
    if backend not in CPU_BACKENDS:
        for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
            with contextlib.suppress(OSError):
                parts.append(" ".join(Path(path).read_text().split()))
    return " ".join(parts)
