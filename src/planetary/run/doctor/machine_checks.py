"""Examine this machine: packages, clock, disk, memory, open files, ports, and the devices of each backend."""

from __future__ import annotations

import datetime
import importlib.metadata
import queue
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

from planetary import version
from planetary.core.errors import PlanetaryError
from planetary.fleet.shell.system import System
from planetary.net.addresses import listening_socket
from planetary.run.doctor import findings as f
from planetary.runtime.backends import is_pjrt, list_devices, require_backend
from planetary.runtime.host import available_memory
from planetary.version import __version__

_PACKAGES = ("iree-base-runtime", "iree-base-compiler", "jax", "numpy")
_DRIVER_S = 30.0  # a driver may hang


def installed(package: str) -> str:
    """Return the installed version of a package, "" where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def examine_machine(
    folders: Sequence[Path], backends: Sequence[str], gateway_ports: Sequence[int], system: System
) -> list[f.Finding]:
    """Return the findings on this machine.

    Args:
        folders: that runs write to; each is examined once per disk.
        backends: that a worker is to have.
        gateway_ports: that a gateway listens on, examined without a gateway's address.
        system: the machine.
    """
    versions = {"planetary": __version__} | {name: installed(name) for name in _PACKAGES}
    found = f.judge_packages(versions)
    now = system.clock.wall()
    shown = datetime.datetime.fromtimestamp(now, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    found.append(f.judge_own_clock(now, Path(version.__file__).stat().st_mtime, shown))
    found += _disks(folders)
    if (memory := available_memory()) is not None:
        found.append(f.judge_memory(memory))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found.append(f.judge_open_files(-1 if limit == resource.RLIM_INFINITY else limit))
    found += [f.judge_port(port, _why_not_listening(port)) for port in (0, *gateway_ports)]
    found += [f.judge_device(backend, *_devices(backend, system)) for backend in backends]
    return found


def _disks(folders: Sequence[Path]) -> list[f.Finding]:
    found: dict[int, f.Finding] = {}
    for folder in folders:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        found.setdefault(there.stat().st_dev, f.judge_disk(str(folder), shutil.disk_usage(there).free))
    return list(found.values())


def _why_not_listening(port: int) -> str:
    try:
        listening_socket("", port).close()
    except PlanetaryError as error:
        return str(error)
    return ""


def _devices(backend: str, system: System) -> tuple[list[str], str]:
    """Return the devices of a backend, or why they cannot be listed. A driver that hangs is left behind."""
    answers: queue.SimpleQueue[tuple[list[str], str]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            require_backend(backend)
            answers.put(([f"JAX {installed('jax')}"] if is_pjrt(backend) else list_devices(backend), ""))
        except Exception as error:  # noqa: BLE001 - a driver may raise anything
            answers.put(([], " ".join(str(error).split())))

    system.aside(f"driver of {backend}", ask)
    try:
        return answers.get(timeout=_DRIVER_S)
    except queue.Empty:
        return [], f"its driver did not answer within {_DRIVER_S:g} s"
