"""A simulated machine of a cluster: the production supervisor and worker shells, as processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.core.errors import CompileError, PeerError, PlanetaryError, TrustError, UserError
from planetary.fleet.protocol import events as e
from planetary.fleet.shell.child import ChildProcess
from planetary.fleet.shell.shell import Address, ClientShell, TensorSource
from planetary.fleet.shell.system import System
from planetary.fleet.supervisor.supervisor import SupervisorOptions, SupervisorShell
from planetary.fleet.worker.role import Roles, WorkerOptions
from planetary.fleet.worker.worker import WorkerShell
from planetary.runs.rounds import messages as rm
from planetary.simulation.disk import SimulatedDisk
from planetary.simulation.executors import Health
from planetary.simulation.forgeries import Forgery
from planetary.simulation.process import ChildOf, Process
from planetary.simulation.world import World
from planetary.wire.message import Message
from planetary.wire.protocol import Protocol

STEP_S = 0.2  # step time of a healthy worker
START_S = 0.6  # time from the start of a process to the first connection
LOAD_S = 0.3  # longest time of a worker's reads in a thread
GIVE_UP_S = 60.0
STATUS = {UserError: 2, CompileError: 3, TrustError: 4, PeerError: 6}  # exit statuses after which none is started again


@dataclass(frozen=True)
class NodeWork:
    """Work of a machine's workers.

    Attributes:
        protocol: of the run.
        roles: (worker process, health) -> the makers of the roles.
        allowed: roles the machine's operator allows; empty: all.
    """

    protocol: Protocol
    roles: Callable[[Process, Health], Roles]
    allowed: tuple[str, ...] = ()


class DoubtfulShell(ClientShell):
    """A client's shell that remembers the last result, and can forge."""

    send_again: Callable[[], None] | None = None
    forgery: Forgery | None = None
    worker = ""

    def send(self, message: Message, tensors: TensorSource | None = None) -> None:
        if self.forgery is not None:
            self.forgery.observe(self.worker, message)
            message = self.forgery.falsified(self.worker, message)
            tensors = None if tensors is None else self.forgery.observed(message, tensors)
        if isinstance(message, rm.TrainResult):
            self.send_again = partial(super().send, message, tensors)
        super().send(message, tensors)
        for forged in () if self.forgery is None else self.forgery.forge(self.worker):
            super().send(forged.message, None if forged.tensors is None else partial(_given, forged.tensors))


class SimulatedWorker(WorkerShell):
    """The worker's shell, which can be made to send the last result twice, and to forge."""

    shell_type = DoubtfulShell

    def use(self, forgery: Forgery, worker: str) -> None:
        """Let a worker of this name forge as `forgery` says."""
        assert isinstance(self._shell, DoubtfulShell)
        self._shell.forgery, self._shell.worker = forgery, worker

    def repeat_result(self) -> bool:
        """Send the last result again; false when there was none."""
        assert isinstance(self._shell, DoubtfulShell)
        if self._shell.send_again is None:
            return False
        self._shell.send_again()
        return True


class SimulatedNode:
    """A machine with one supervisor and a worker.

    Attributes:
        name: of the worker.
        node: of the machine.
        worker: the worker's process, None before the first one.
        shell: the worker's shell.
        health: of the worker's process.
        hangs: whether worker processes that start from now on hang.
        blobs: folder of the machine's cache.
    """

    def __init__(
        self,
        world: World,
        number: int,
        address: Address,
        *,
        name: str = "",
        site: str = "",
        folder: Path,
        shutdown_s: float,
        restart_s: tuple[float, float],
        step_s: float,
        spread: tuple[float, float],
        work: NodeWork,
        forgery: Forgery,
        observe: Callable[..., None],
        struck: Callable[[str], None],
        ended: Callable[[Process], None],
    ) -> None:
        """Join at once; `ended` is called with each process that has ended. `site`: prefix of the machine's name."""
        self.world, self.node = world, f"{site}node-{number}"
        self.name = name or f"{self.node}/0"
        self.blobs = folder / self.node
        self.worker: Process | None = None
        self.shell: SimulatedWorker | None = None
        self.step_s = step_s  # mean step time of a healthy worker process
        self.health = Health(step_s)
        self.started, self.hangs = 0, False
        self.disk = SimulatedDisk(world.random, struck, world.clock)
        self._address, self._shutdown_s, self._restart_s = address, shutdown_s, restart_s
        self._spread = spread  # spread of a process's own step time around `step_s`
        self._do, self._observe, self._ended, self._forgery = work, observe, ended, forgery
        self.supervisor = self.join()

    def join(self) -> Process:
        """Start the supervisor, as a person does; return the process."""
        self.supervisor = self.world.start(f"supervisor of {self.name}", self.node, self._supervise)
        self.supervisor.on_exit.append(self._ended)
        return self.supervisor

    @property
    def is_up(self) -> bool:
        """Whether there is a worker process."""
        return self.worker is not None and self.worker.alive

    def _system(self, process: Process, pid: int) -> System:
        return System(
            clock=self.world.clock,
            network=self.world.network.of(process),
            files=self.disk.of(process),
            threads=process.threads,
            aside=process.aside,
            start_child=self._start_worker,
            pid=lambda: pid,
            entropy=self.world.random.randbytes,
            memory=lambda: None,
            observe=self._observe,
        )

    async def _supervise(self, process: Process) -> int:
        first_s, limit_s = self._restart_s
        options = SupervisorOptions(
            address=self._address,
            name=self.name,
            node=self.node,
            command=("worker", self.name),
            log=None,
            restart_first_s=first_s,
            restart_limit_s=limit_s,
            shutdown_s=self._shutdown_s,
            final_codes=frozenset(STATUS.values()),
        )
        return _status(await SupervisorShell(options, self._system(process, 1)).run())

    async def _start_worker(self, command: Sequence[str], *, log: Path | None) -> ChildProcess:
        self.started += 1
        number = self.started
        self.worker = self.world.start(f"worker {self.name} #{number}", self.node, lambda p: self._work(p, number))
        self.worker.thread_s = LOAD_S
        self.worker.on_exit.append(self._ended)
        self.health = Health(self.step_s * self.world.random.uniform(*self._spread), is_hung=self.hangs)
        return ChildOf(self.worker)

    async def _work(self, process: Process, number: int) -> int:
        await asyncio.sleep(START_S)
        health = self.health
        options = WorkerOptions(
            address=self._address,
            name=self.name,
            node=self.node,
            backend="cpu",
            target="host",
            device_id=0,
            island=1,
            threads=1,
            cache=self.blobs,
            state=self.blobs / "state",
            give_up_s=GIVE_UP_S,
            roles=self._do.allowed,
            allow_code=True,
        )
        roles = self._do.roles(process, health)
        self.shell = SimulatedWorker(options, self._do.protocol, roles, system=self._system(process, number))
        self.shell.use(self._forgery, self.name)
        return _status(await self.shell.run())

    # --- faults -------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Switch the machine off."""
        self.supervisor.kill()
        self.kill_worker()

    def kill_worker(self) -> bool:
        """SIGKILL the worker process; false when there is none."""
        if self.worker is None or not self.worker.alive:
            return False
        self.worker.kill()
        return True

    def repeat_result(self) -> bool:
        """Let the worker send the last result again; false when it has none."""
        worker, shell = self.worker, self.shell
        return worker is not None and worker.alive and shell is not None and worker.in_context(shell.repeat_result)

    def cached(self) -> list[Path]:
        """Return the files of the machine's cache."""
        return sorted(path for path in BlobStore(self.blobs).root.glob("blobs/*/*") if not path.name.startswith("."))


def _given(tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    return tensors


def _status(end: e.Exit) -> int:
    """Return the exit status of a process that ended so; as the command line does."""
    if end.ok:
        return 0
    return next((status for kind, status in STATUS.items() if issubclass(end.error or PlanetaryError, kind)), 1)
