"""A site's connection to the hub: the shell of a worker, whose role is the site itself.

The hub's tasks, versions and cancellations become events of the site's controller, and the controller's offers become
the result of a task. So dialling, redialling, invites, refusals and the order of messages are those of every worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from planetary.core.errors import CompileError, PlanetaryError, UserError
from planetary.core.schedules import Schedule
from planetary.core.tensors import Tensors
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import EndKind
from planetary.fleet.shell.shell import Address
from planetary.fleet.shell.system import System
from planetary.fleet.worker.role import Role, WorkerOptions, Workplace
from planetary.fleet.worker.worker import WorkerShell
from planetary.machine.events import Event, Exit, Instruction, Payload
from planetary.net.addresses import parse_address
from planetary.net.identity import Identity
from planetary.runs.federation.facts import differences
from planetary.runs.federation.messages import FEDERATION, SITE, Facts, SiteJob, masters_of
from planetary.runs.federation.site import events as s
from planetary.runs.federation.site.points import SitePoints
from planetary.runs.federation.status import terms_in_words
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.events import EndParametersOf
from planetary.runs.rounds.worker import events as w
from planetary.runs.rounds.worker.exchange import Exchange
from planetary.runs.rounds.worker.role import TrainingRole
from planetary.wire.streams import ReceivedMessage

log = logging.getLogger(__name__)

REJOIN_S = 2.0
"""Pause before a hub is joined again that was stopped and may be resumed."""


class UplinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a site joins the hub."""

    address: Address
    name: str
    cache: Path  # folder of blobs
    run: str = ""  # run of the hub to join; "": the only one


def hub_invite_in(path: str) -> str:
    """Return the hub's invite that is in a file; "" where `path` is "". Raises `UserError`."""
    try:
        return Path(path).read_text().strip() if path else ""
    except OSError as error:
        raise UserError(
            f"cannot read the hub's invite {path}: {error.strerror or error}; federation.token_file (--hub-token-file) "
            "names the file that planetary federation-hub or planetary invite made"
        ) from error


def hub_address(hub: str, token: str, key: Path, connect_s: float) -> Address:
    """Return where a site's hub is, with the invite and the identity of the site, in the file `key`.

    Raises:
        UserError: `hub` is no "HOST:PORT".
    """
    host, port = parse_address(hub)
    return Address(host, port, token, connect_s, Identity.open(key) if token else None)


class Uplink:
    """One per site. Methods are called on the event loop.

    Attributes:
        terms: the site's terms in the federation; None before the hub's job.
        hub: the identity of the hub's run; "" before the hub's job.
    """

    def __init__(
        self, options: UplinkOptions, facts: Facts, points: SitePoints, post: Callable[[Event], None], system: System
    ) -> None:
        """`post` takes the events of the site's controller."""
        self._options, self._facts, self._points, self._post = options, facts, points, post
        self._system = system
        self._shell: SiteShell | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        anchor = points.anchor
        self.terms = None if anchor is None else anchor.terms
        self.hub = "" if anchor is None else anchor.hub
        self.work = SiteWork(post)

    def start(self) -> None:
        """Begin to dial."""
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """Leave the hub."""
        self._stopping = True
        if self._shell is not None:
            self._shell.stop("the site's gateway ends")
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=REJOIN_S)
            self._task.cancel()

    async def _keep(self) -> None:
        while not self._stopping:
            self._shell = SiteShell(self._worker_options(), FEDERATION, {SiteJob: self}, system=self._system)
            end = await self._shell.work()
            self.work.abandon()
            if self._stopping:
                return
            if not end.ok:
                self._post(s.FederationEnded(_kind_of(end), f"the hub does not take this site: {end.reason}"))
                return
            if self._shell.end_kind == "done":
                self._post(s.FederationEnded("done", f"the federation's run is over: {end.reason}"))
                return
            log.info("the hub left: %s; joining it again", end.reason)
            await asyncio.sleep(REJOIN_S)

    def _worker_options(self) -> WorkerOptions:
        options = self._options
        return WorkerOptions(
            address=options.address,
            name=options.name,
            node=options.name,
            backend=SITE,
            target=SITE,
            device_id=0,
            island=1,
            threads=0,
            cache=options.cache,
            state=options.cache,
            roles=(SITE,),
            give_up_s=0.0,
            run=options.run,
        )

    # --- as a `RoleLoader` ------------------------------------------------------------------------------------

    def blobs(self, job: m.WorkerJob) -> tuple[str, ...]:
        """A site has a separate training step."""
        return ()

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        assert isinstance(job, SiteJob)
        name = self._options.name
        if self.hub not in ("", job.hub):
            raise UserError(
                f"the run folder of this site belongs to the hub run {self.hub}, and this hub runs {job.hub}: a site "
                "has one hub. Set federation.hub to the other one, or join this one with a new run folder"
            )
        terms = job.sites[name]
        if self.terms is not None and (terms.part, terms.parts) != (self.terms.part, self.terms.parts):
            raise UserError(
                f"this site trains part {self.terms.part + 1} of {self.terms.parts} of the hub's data, and the hub now "
                f"says part {terms.part + 1} of {terms.parts}: tokens would count twice. Let the hub's "
                "federation.sites keep their order, and set federation.parts before sites are added"
            )
        own = self._points.specs
        if why := differences(job.facts, self._facts, job.spec.params, own, same_data=terms.entry.data == "part"):
            raise CompileError(f"site {name} differs from its hub: {why}")
        self.hub, self.terms = job.hub, terms
        self.work.report = place.post
        saved = self._points.anchor.round if self._points.anchor is not None else 0
        ready = rm.Ready(artifact=job.artifact, opt_state_round=saved, device="gateway", verified=terms_in_words(terms))
        return SiteRole(job, place, self.work, ready, self._points.is_anchor)


class SiteShell(WorkerShell):
    """A worker's shell that keeps how the gateway's run ended.

    Attributes:
        end_kind: as of `Shutdown`; "" before.
    """

    end_kind = ""

    def _received(self, session: int, received: ReceivedMessage) -> None:
        if isinstance(received.message, m.Shutdown):
            self.end_kind = received.message.kind
        super()._received(session, received)


class SiteWork:
    """The hub's tasks, executed by the site. See `LeaseWork`.

    Attributes:
        report: takes the events of the role.
        exchange: with the hub; the role sets it.
        arrived: the newest received version, and the tensors.
    """

    def __init__(self, post: Callable[[Event], None]) -> None:
        """`post` takes the events of the site's controller."""
        self._post = post
        self.exchange: Exchange = Exchange(())
        self._ends: dict[int, Tensors] = {}
        self._task = 0  # newest task of the hub; 0: none
        self.report: Callable[[Event], None] = lambda event: None
        self.arrived: tuple[int, Tensors] = (-1, {})

    def use_version(self, event: s.VersionArrived, params: Tensors) -> None:
        """Let a version of the hub be the next one the site goes on from."""
        self.arrived = (event.version, params)
        self._post(event)

    def offer(self, done: w.TrainingDone, ends: Tensors) -> None:
        """Answer a task."""
        self._ends = {done.task: ends}
        self.report(done)

    def show(self, progress: s.ShowProgress) -> None:
        """Tell how far a task is."""
        self.report(w.StepDone(progress.task, progress.rounds, progress.loss))

    def abandon(self) -> None:
        """Drop the hub's task: the connection is closed."""
        if self._task:
            self._post(s.HubAsksNoMore(self._task))
            self._task = 0

    def use_parameters(self, params: Callable[[], Tensors]) -> None:
        """A site needs to know of which version they are."""
        raise NotImplementedError

    def take_ahead(self, take: Callable[[], None]) -> None:
        """A site gets whole parameters."""
        raise NotImplementedError

    def train(self, task: rm.TrainTask, schedule: Schedule, tokens: np.ndarray | None) -> None:
        self._task = task.task
        self.report(w.StepDone(task.task, 0, None))
        self._post(s.HubAsks(task))

    def count_in(self, task: int, round_: int) -> None:
        """A hub's tasks have one round."""

    def give_again(self, task: int, round_: int) -> None:
        """A hub's tasks have one round."""

    def mix(self, task: rm.TrainTask, take: Callable[[], None]) -> None:
        """A hub has no fragments."""
        self.report(w.TaskBroke(task.task, "internal", "a site mixes nothing in"))

    def evaluate(self, task: rm.EvalTask, tokens: np.ndarray | None) -> None:
        """A hub asks for no evaluation."""
        self.report(w.TaskBroke(task.task, "internal", "a site evaluates nothing for its hub"))

    def stop(self, task: int) -> None:
        self._post(s.HubAsksNoMore(task))
        self.report(w.TaskStopped(task))

    def finish(self, task: int) -> None:
        """Leases of a hub are not cut off."""

    def end_parameters(self, payload: Payload) -> Tensors:
        assert isinstance(payload, EndParametersOf)
        return self._ends.pop(payload.task)

    def close(self) -> None: ...


class SiteRole(TrainingRole):
    """The role of a site as a worker of the hub."""

    def __init__(
        self,
        job: rm.TrainingJob,
        place: Workplace,
        work: SiteWork,
        ready: rm.Ready,
        is_anchor: Callable[[int, Tensors], bool],
    ) -> None:
        super().__init__(job, place, work, ready)
        self._work, self._is_anchor = work, is_anchor
        work.exchange = Exchange(masters_of(job.spec.params))
        self._counted: dict[int, int] = {}  # version -> tokens of this site in it

    def carry_out(self, instruction: Instruction) -> None:
        if not isinstance(instruction, w.UseParameters):
            super().carry_out(instruction)
            return
        version = instruction.version
        params = self._start_from(instruction)()
        event = s.VersionArrived(version, self._counted.pop(version), self._is_anchor(version, params))
        self._work.use_version(event, params)

    def _keep(self, message: m.Message, tensors: Tensors) -> str:
        if isinstance(message, rm.Parameters):
            self._counted[message.version] = message.counted
        return super()._keep(message, tensors)


def _kind_of(end: Exit) -> EndKind:
    """Return how a site's run ends that the hub refuses."""
    error = end.error or PlanetaryError
    if issubclass(error, UserError):
        return "data"
    return "compile" if issubclass(error, CompileError) else "peer"
