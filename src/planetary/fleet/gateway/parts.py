"""The interface of a kind of run to its gateway: a setup, and the parts of the run that the setup begins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from planetary.core.configuration.schema import Config
from planetary.core.errors import RemoteProtocolError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.controller.controller import RunController
from planetary.fleet.gateway.status import base_status
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.news import LastingNews
from planetary.fleet.protocol.records import RunFinished, RunResumed, RunStarted
from planetary.fleet.protocol.status import RunStatus
from planetary.fleet.protocol.traffic import WorkerTraffic
from planetary.fleet.shell.shell import Answer, Read, TensorSource
from planetary.machine.journal import Record
from planetary.wire.limits import Limits
from planetary.wire.protocol import Protocol as WireProtocol
from planetary.wire.streams import Allocate, ReceivedMessage

if TYPE_CHECKING:
    from planetary.fleet.gateway.gateway import Gateway

SYNCED: tuple[type[Record], ...] = (RunStarted, RunResumed, RunFinished)
"""Records of every kind that are on the disk before anything else happens, whatever becomes of the power."""


class Demand(msgspec.Struct, frozen=True):
    """How many workers a run can use.

    Attributes:
        least: without so many it does not go on well.
        most: more would be idle; None: it can use any number.
    """

    least: int
    most: int | None


class PreparedRun(Protocol):
    """The parts every kind of run is made of."""

    @property
    def param_count(self) -> int:
        """Trained parameters."""
        ...

    @property
    def config(self) -> Config:
        """The run's configuration, as preparation left it."""
        ...


async def without_tensors(session: int, received: ReceivedMessage) -> e.Event:
    """Make the event of a message that has no tensors of interest."""
    return e.Received(session, received.message)


def allocate_expected(expects: Callable[[m.Message, TensorSpec], bool]) -> Allocate:
    """Return an allocator of tensors in memory, which raises `RemoteProtocolError` for an unexpected tensor."""

    def allocate(message: m.Message, spec: TensorSpec) -> np.ndarray:
        if not expects(message, spec):
            raise RemoteProtocolError(
                f"reading {type(message).__name__}: a tensor {spec.name!r} is not expected with it"
            )
        return spec.empty()

    return allocate


def constant(tensors: Tensors) -> TensorSource:
    """Return the source of tensors that are here now: their owner may forget them before the message's turn."""
    return lambda: tensors


RunT = TypeVar("RunT")
PreparedT = TypeVar("PreparedT", bound=PreparedRun)


@dataclass(frozen=True, kw_only=True)
class Parts(Generic[RunT]):
    """A run that has begun. Functions are called on the event loop, unless a thread is named.

    Attributes:
        run: the kind's own object, for callers who know the kind.
        controller: decides.
        records: new ones, to be written to the journal.
        metrics: lines of an earlier gateway.
        status: returns the run's status.
        compile_for: compiles and verifies the artifact that workers run.
        limits: returns the limits of a worker's messages.
        expects: whether a worker's message may bring such a tensor.
        read: makes the controller's event of a message.
        effects: instructions that are carried out at once, by class.
        answers: instructions that are carried out in a thread, whose event answers them, by class.
        sources: returns the tensors of a payload in the message's turn, by class.
        may_be_on_loan: whether a peer goes on with other runs when this one has ended, where workers do.
        begun: called when the controller decides.
    """

    run: RunT
    controller: RunController[Any, Any]
    records: Iterable[Record]
    metrics: list[Any] = field(default_factory=list)
    status: Callable[[], RunStatus]
    compile_for: Callable[[CompileTarget], Awaitable[PublishedArtifact]]
    limits: Callable[[], Limits]
    expects: Callable[[m.Message, TensorSpec], bool]
    read: Read = without_tensors
    effects: Mapping[type[e.Instruction], Callable[[Any], object]] = field(default_factory=dict)
    answers: Mapping[type[e.Instruction], Answer] = field(default_factory=dict)
    sources: Mapping[type[e.Payload], Callable[[Any], TensorSource]] = field(default_factory=dict)
    may_be_on_loan: Callable[[m.Hello], bool] = lambda hello: True
    begun: Callable[[], None] = lambda: None


class Setup(ABC, Generic[PreparedT, RunT]):
    """How a kind of run prepares and begins.

    Attributes:
        protocol: messages of this kind of run.
        traffic_of: class of the counter of bytes.
        news_of: class of the notes that outlast other news.
        compiles: name of the artifact that workers get, for users.
        synced: records that are on the disk before anything else happens, whatever becomes of the power.
    """

    protocol: ClassVar[WireProtocol] = m.FABRIC
    traffic_of: ClassVar[type[WorkerTraffic]] = WorkerTraffic
    news_of: ClassVar[type[LastingNews]] = LastingNews
    compiles: ClassVar[str] = "the training step"
    synced: ClassVar[tuple[type[Record], ...]] = SYNCED

    @abstractmethod
    def prepare(self, gateway: Gateway[RunT]) -> PreparedT:
        """Make everything that does not depend on the run folder. In a thread; may take minutes."""

    @abstractmethod
    def begin(self, gateway: Gateway[RunT], prepared: PreparedT) -> Parts[RunT]:
        """Read or make the run folder. In a thread."""

    async def open(self, gateway: Gateway[RunT]) -> None:
        """Take note that the run folder is taken, and nothing prepared. Raises `UserError`."""

    async def fit(self, gateway: Gateway[RunT], prepared: PreparedT) -> PreparedT | None:
        """Fit a new run to this machine; return the parts then, None to stop."""
        return prepared

    def status(self, gateway: Gateway[RunT]) -> RunStatus:
        """Return the status of a run that has not begun. Called on the event loop."""
        return base_status(gateway)

    def demand(self, gateway: Gateway[RunT]) -> Demand:
        """Return how many workers the run can use now. Called on the event loop."""
        return Demand(least=1, most=None)
