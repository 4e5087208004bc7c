"""The star: workers send their end parameters to the gateway, which takes the outer step and sends new ones."""

from __future__ import annotations

from planetary.fabric.controller.desk import RoundsDesk
from planetary.fabric.controller.topology import Outcome, Topology
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.events import KeepParameters, ParametersOf, TakeOuterStep
from planetary.fabric.protocol.records import RoundClosed
from planetary.fabric.protocol.sessions import WorkerSession
from planetary.fabric.protocol.state import OpenRound


class Star(Topology):
    """See the module. Any ready worker can be sent any version that the gateway keeps."""

    result = "end_parameters"

    def __init__(self, desk: RoundsDesk) -> None:
        """See `Topology`."""
        super().__init__(desk)
        self._attachments: dict[int, int] = {}  # accepted task -> where its tensors are
        self._stepping = 0  # the round whose outer step the gateway takes; 0: none
        self._stepped = 0  # the newest whose outer step is taken

    def able_workers(self) -> list[WorkerSession]:
        """See `Topology`."""
        return self._desk.ready_workers()

    def send_parameters(self, worker: WorkerSession, version: int) -> None:
        """See `Topology`."""
        if worker.version != version:
            worker.version = version
            self._desk.send(worker.session, m.Parameters(version=version), ParametersOf(version))

    def can_evaluate(self, worker: WorkerSession, version: int) -> bool:
        """See `Topology`. A worker in the middle of a lease holds other parameters; it evaluates when it is done."""
        return worker.train is None or worker.version == version

    def accept(self, worker: WorkerSession, task: int, attachment: int) -> None:
        """See `Topology`."""
        self._attachments[task] = attachment

    @property
    def busy(self) -> bool:
        """See `Topology`."""
        return self._stepping > 0

    def begin(self, ended: OpenRound, why: str, now: float) -> None:
        """See `Topology`."""
        self._desk.append(RoundClosed(round=ended.round, contributions=len(ended.contributions), why=why))
        self._stepping = ended.round
        self.begin_again(ended, now)

    def begin_again(self, ended: OpenRound, now: float) -> None:
        """See `Topology`."""
        parts = sorted((c.task, c.tokens) for c in ended.contributions)
        contributions = tuple((task, tokens, self._attachments.pop(task)) for task, tokens in parts)
        self._desk.out.append(TakeOuterStep(ended.round, contributions))

    def settle(self, ended: OpenRound, now: float) -> Outcome:
        """See `Topology`."""
        if self._stepped < self._stepping:
            return Outcome.WAIT
        self._stepping = 0
        return Outcome.DONE

    def stepped(self, round_: int) -> None:
        """See `Topology`."""
        self._stepped = round_

    def made(self, round_: int, needed: tuple[int, ...]) -> None:
        """See `Topology`."""
        self._desk.out.append(KeepParameters((*needed, round_)))
