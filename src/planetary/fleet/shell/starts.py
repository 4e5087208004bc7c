"""The starts of child processes: a parent writes one file with one struct, and the child is started with the file.

The file may hold an invite token, so only the owner can read it. It lies in a folder that goes with the parent.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from planetary.core import decoding
from planetary.core.errors import LocalProtocolError, ResourceError


class NodeStart(msgspec.Struct, frozen=True, kw_only=True):
    """The common part of the starts of a node manager, a supervisor and a worker."""

    host: str  # address of the gateway
    port: int  # port of the gateway for workers
    token: str  # invite; "": none
    plain: bool  # no TLS and no token; the gateway is on this machine
    latency_budget_s: float
    node: str  # name of the machine in the run
    backend: str  # name of a backend; "auto": the node manager chooses
    target: str
    island: int  # devices that run every step together
    threads: int  # threads of each worker; 0: a share of the cores, none of a GPU
    cache: str  # folder
    state: str  # folder of the workers' optimizer states
    logs: str = ""  # folder; "": the output of the parent
    roles: tuple[str, ...] = ()  # allowed roles; empty: all that a run has
    allow_code: bool = False  # permission to run Python from the gateway
    give_up_s: float = 0.0  # end when the gateway was out of reach for this long; 0: never

    @property
    def log_folder(self) -> Path | None:
        """Folder of the logs; None: the output of the parent."""
        return Path(self.logs) if self.logs else None


class ManagerStart(NodeStart, frozen=True, kw_only=True):
    """A node manager."""

    scale: int = 1  # number of workers


class WorkerStart(NodeStart, frozen=True, kw_only=True):
    """A supervisor, which passes the file on to the worker."""

    name: str  # name of the worker
    device_id: int = 0
    report: str = ""  # file in which the supervisor reports to the node manager; "": nobody reads it
    trial: str = ""  # folder of a choice among backends; "": the worker is no candidate
    chosen: str = ""  # why the machine took this backend, in words


Start = TypeVar("Start", bound=msgspec.Struct)


def start_command(role: str, start: Path) -> list[str]:
    """Return the command line of a child of this process, which has a role of `planetary`."""
    return [sys.executable, "-m", "planetary.cli.child", role, str(start)]


def write_start(path: Path, start: msgspec.Struct) -> Path:
    """Write the file of a child, which only the owner can read, and return the path. Raises `ResourceError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(start))
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def read_start(path: Path, kind: type[Start]) -> Start:
    """Return the struct in a file. Raises `ResourceError`, and `LocalProtocolError` for something else."""
    try:
        return decoding.from_json(path.read_bytes(), kind)
    except OSError as error:
        raise ResourceError(f"cannot read {path}, which this process was started with: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise LocalProtocolError(f"{path} is no {kind.__name__}: {error}") from error
