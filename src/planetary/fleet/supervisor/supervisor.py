"""The supervisor process: the supervisor machine with a real child process and a real connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import msgspec

from planetary.artifacts.store import write_atomically
from planetary.core.errors import PlanetaryError
from planetary.core.exit_status import describe_exit
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.shell.child import ChildProcess, on_stop_signals
from planetary.fleet.shell.shell import Address, ClientShell
from planetary.fleet.shell.system import SYSTEM, System
from planetary.fleet.supervisor.machine import SupervisorMachine
from planetary.fleet.supervisor.node_news import SupervisorReport
from planetary.fleet.supervisor.restarts import Restarts
from planetary.machine.machine import Machine
from planetary.version import __version__
from planetary.wire.streams import ReceivedMessage, refuse_tensors

log = logging.getLogger(__name__)


class SupervisorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a supervisor process is started."""

    address: Address
    name: str  # worker name
    node: str
    command: tuple[str, ...]  # command of the worker
    log: Path | None  # where the worker's output goes; None: to this process's own
    restart_first_s: float
    restart_limit_s: float
    shutdown_s: float  # how long the worker gets to end by itself
    report: Path | None = None  # file for the node manager
    final_codes: frozenset[int]  # exit statuses of the worker after which a restart cannot help


def _without_time(report: SupervisorReport) -> SupervisorReport:
    return msgspec.structs.replace(report, retry_in_s=None)


class SupervisorShell:
    """Carries out the machine's instructions."""

    def __init__(self, options: SupervisorOptions, system: System = SYSTEM) -> None:
        self._options = options
        self._system = system
        self._child: ChildProcess | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._reported: SupervisorReport | None = None
        self._machine = machine = SupervisorMachine(
            options.name,
            restarts=Restarts(
                options.name,
                first_s=options.restart_first_s,
                limit_s=options.restart_limit_s,
                healthy_after_s=10 * options.restart_limit_s / 15,
                final_codes=options.final_codes,
            ),
            redial_first_s=0.2,
            redial_limit_s=2.0,
        )
        hello = m.Hello(
            role="supervisor",
            protocol=m.FABRIC.version,
            software=__version__,
            token="",
            worker=options.name,
            node=options.node,
            pid=system.pid(),
        )
        self._shell = ClientShell(
            machine,
            self._carry_out,
            system.clock,
            self._observe,
            address=options.address,
            protocol=m.FABRIC,
            hello=hello,
            received=self._received,
            allocate=refuse_tensors,
            network=system.network,
        )

    async def run(self) -> e.Exit:
        """Supervise until the worker ends for good, the gateway asks for the end, or a stop signal comes."""
        on_stop_signals(lambda reason: self._shell.post(e.StopRequested(reason)))
        end = await self._shell.run()
        log.info("supervisor of %s ends: %s", self._options.name, end.reason)
        if self._child is not None:
            await self._child.end(self._options.shutdown_s)
        await self._shell.close(end.reason)
        for task in self._tasks:
            task.cancel()
        return end

    def _observe(self, machine: Machine[Any, Any]) -> None:
        self._system.observe(machine)
        path = self._options.report
        if path is None:
            return
        report = self._machine.report(self._system.clock.monotonic())
        # Passing seconds are no news; the start and the end of an attempt are.
        if self._reported is None or _without_time(report) != _without_time(self._reported):
            self._reported = report
            with contextlib.suppress(PlanetaryError):  # it is for people alone
                write_atomically(path, msgspec.json.encode(report), self._system.files)

    def _received(self, session: int, received: ReceivedMessage) -> None:
        self._shell.post(e.Received(session, received.message))

    def _carry_out(self, instruction: e.Instruction) -> None:
        match instruction:
            case e.StartProcess():
                self._spawn(self._run_child(instruction.attempt))
            case e.KillProcess():
                log.info("ending worker %s: %s", self._options.name, instruction.reason)
                if self._child is not None:
                    grace = self._options.shutdown_s if instruction.gracefully else 0.0
                    self._spawn(self._end_child(self._child, grace))
            case _:
                raise AssertionError(f"a supervisor's machine asked for {instruction}")

    def _spawn(self, work: object) -> None:
        task = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_child(self, attempt: int) -> None:
        try:
            child = await self._system.start_child(self._options.command, log=self._options.log)
        except PlanetaryError as error:
            self._shell.post(e.ProcessExited(0, 1, str(error)))
            return
        log.info("worker %s started as process %d, attempt %d", self._options.name, child.pid, attempt)
        self._child = child
        self._shell.post(e.ProcessStarted(child.pid))
        code = await child.wait()
        self._child = None
        log.info("worker %s, process %d, %s", self._options.name, child.pid, describe_exit(code))
        self._shell.post(e.ProcessExited(child.pid, code, describe_exit(code)))

    async def _end_child(self, child: ChildProcess, grace_s: float) -> None:
        with contextlib.suppress(PlanetaryError):
            if grace_s > 0:
                await child.end(grace_s)
            else:
                child.kill()
