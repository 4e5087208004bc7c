"""Who takes part: the controller's dealings with connections, until a worker is ready and after it is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planetary.fleet.controller.desk import AnyDesk
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.admission import invite_of, refuse
from planetary.fleet.protocol.events import BlobOf, Compile, Compiled, CompileFailed
from planetary.fleet.protocol.records import (
    ArtifactPublished,
    EndKind,
    WorkerBanned,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerRefused,
)
from planetary.fleet.protocol.sessions import Phase, SupervisorSession, WorkerSession
from planetary.fleet.protocol.status import Departure
from planetary.machine.events import Close

MOST_TARGETS = 8  # compilations in progress per node; a machine has a backend or two, and a trial tries five
MOST_CRASHES = 8
"""Times in a row a worker's process may end without an answer to a task in between: it will end the next time."""
LIVED_S = 3600.0
"""A process that lived for so long did not end at once, even where it had no task."""

Target = tuple[str, str, str]  # backend, target, features of a compiled module


AWAY_FACTOR = 24
"""A run whose workers were moved or drained waits for them this many times as long as for lost ones: four hours by
default, in which a machine is repaired. A worker that never comes back must not keep the run for ever."""


class Membership:
    """Admits, equips, loses and bans workers."""

    def __init__(self, desk: AnyDesk, now: float) -> None:
        """Start at monotonic time `now`, with no worker connected."""
        self._desk = desk
        self._artifacts: dict[Target, str] = {}  # digest; "" while it is being compiled
        self._asked: dict[str, set[Target]] = {}  # machine -> targets that were compiled because it came
        self._references: dict[str, str] = {}  # artifact -> digest of the reference results of the check
        self._edition = 0  # how often the step was replaced
        self._strikes: dict[str, int] = {}  # worker -> failed tasks in a row
        self._crashes: dict[str, tuple[int, str]] = {}  # worker -> process ends in a row, and the last one's reason
        self._started_at: dict[str, float] = {}  # worker -> start of the process
        self._violations: dict[str, int] = {}  # machine -> messages no worker of ours sends
        self.banned: dict[str, str] = {}  # worker -> reason of the ban, since this gateway began
        self._began_at = now
        self.first_ready_at: float | None = None
        self.deserted_at: float | None = now  # start of the time without a connected worker
        self.last_failure: tuple[EndKind, str] = ("peer", "")  # how and why a worker was last of no use
        self._is_last_ban_lasting = False

    def hello(self, session: int, hello: m.Hello, now: float) -> list[int]:
        """Admit or refuse a new connection; return the older sessions of the same worker, which are now lost."""
        desk = self._desk
        refusal = refuse(hello, desk.policy, desk.state, self._connected())
        if refusal is not None:
            desk.send(session, refusal)
            desk.out.append(Close(session, refusal.reason))
            return []
        policy = desk.policy
        desk.send(
            session,
            m.Welcome(run=policy.run, heartbeat_s=policy.heartbeat_s, silent_after_s=policy.silent_after_s),
        )
        if hello.role == "supervisor":
            for old in [s for s in desk.supervisors.values() if s.worker == hello.worker]:
                desk.out.append(Close(old.session, "replaced by a newer connection of the same supervisor"))
                del desk.supervisors[old.session]
            desk.supervisors[session] = SupervisorSession(session, hello.worker, hello.node, identity=hello.identity)
            return []
        replaced = [w.session for w in desk.workers.values() if w.worker == hello.worker]
        worker = desk.session(
            session,
            hello.worker,
            hello.node,
            hello.pid,
            hello.backend,
            hello.target,
            hello.target_features,
            Phase.COMPILING,
            phase_at=now,
            trial=hello.trial,
            chosen=hello.chosen,
            roles=hello.roles,
            identity=hello.identity,
            invite=invite_of(hello),
        )
        desk.workers[session] = worker
        self.deserted_at = None
        if self._artifacts.get(_target(worker)):
            self._offer_job(worker, now)
        elif refused := self._compile_for(worker):
            self.refuse_worker(worker, refused)
        return replaced

    def _compile_for(self, worker: WorkerSession) -> str:
        """Have the step compiled for a worker unless that is under way; return why it is not, "" where it is."""
        target = _target(worker)
        if target not in self._artifacts:
            asked = self._asked.setdefault(worker.identity or worker.node, set())
            if len(asked | {target}) > MOST_TARGETS:
                names = ", ".join(sorted({f"{backend}:{name}" for backend, name, _ in asked}))
                return f"node {worker.node} has had the step compiled for {len(asked)} targets: {names}"
            asked.add(target)
            self._artifacts[target] = ""
            self._desk.out.append(Compile(*target, self._edition))
        return ""

    @property
    def targets(self) -> tuple[Target, ...]:
        """Those the step is compiled for, or is being compiled for."""
        return tuple(self._artifacts)

    def replace_step(self, compiled: Sequence[Compiled], now: float) -> None:
        """Have every worker load another step: of `compiled`, or compiled for it at its request."""
        self._edition += 1
        self._artifacts, self._references = {}, {}
        for event in compiled:
            self._publish(event)
        for worker in list(self._desk.workers.values()):
            worker.advance("job replaced", now)
            if self._artifacts.get(_target(worker)):
                self._offer_job(worker, now)
            else:
                self._compile_for(worker)

    def replace_job(self, now: float) -> None:
        """Have every worker load the job again after a change of another part than the step."""
        for worker in self._desk.workers.values():
            worker.advance("job replaced", now)
            if self._artifacts.get(_target(worker)):
                self._offer_job(worker, now)

    def compiled(self, event: Compiled, now: float) -> None:
        """Offer a finished artifact to everyone who waits for it."""
        if event.edition != self._edition:
            return  # of the step before
        target = self._publish(event)
        for worker in self._desk.workers.values():
            if worker.phase is Phase.COMPILING and _target(worker) == target:
                self._offer_job(worker, now)

    def _publish(self, event: Compiled) -> Target:
        target = (event.backend, event.target, event.features)
        self._artifacts[target] = event.digest
        self._references[event.digest] = event.reference
        self._desk.append(
            ArtifactPublished(
                backend=event.backend,
                target=event.target,
                digest=event.digest,
                nbytes=event.nbytes,
                seconds=event.seconds,
                verified=event.verified,
            )
        )
        return target

    def compile_failed(self, event: CompileFailed) -> None:
        """Turn away everyone who needs an artifact that cannot be made; the others go on."""
        if event.edition != self._edition:
            return  # of the step before
        target = (event.backend, event.target, event.features)
        del self._artifacts[target]
        reason = f"{self._desk.policy.loaded} does not work on {event.backend}:{event.target}: {event.reason}"
        for worker in [w for w in self._desk.workers.values() if _target(w) == target]:
            self.refuse_worker(worker, reason)

    def fetch(self, worker: WorkerSession, message: m.FetchBlob) -> None:
        """Send a blob the worker's job needs."""
        if self._desk.policy.may_fetch(message.digest, worker.artifact, worker.reference):
            self._desk.send(worker.session, m.BlobData(digest=message.digest), BlobOf(message.digest))

    def ready(self, worker: WorkerSession, now: float, device: str = "", verified: str = "") -> None:
        """Note a worker's loaded artifact, device description and check."""
        if worker.phase is not Phase.LOADING or worker.trial:
            return
        worker.advance("ready", now)
        worker.device, worker.verified = device, verified
        if self.first_ready_at is None:
            self.first_ready_at = now
        self._desk.append(
            WorkerJoined(
                backend=worker.backend,
                target=worker.target,
                device=device,
                verified=verified,
                chosen=worker.chosen,
                address=worker.address,
                identity="" if self._desk.policy.local else worker.identity,
                **worker.named,
            )
        )

    def refuse_worker(self, worker: WorkerSession, reason: str) -> None:
        """The worker's target or device is of no use; the others go on."""
        self._desk.append(WorkerRefused(backend=worker.backend, target=worker.target, reason=reason, **worker.named))
        self.ban(worker, reason, "compile")

    def supervisor_says(self, supervisor: SupervisorSession, message: m.Message, now: float) -> int | None:
        """Take a supervisor's message; return the worker's session ended with the process, if any."""
        match message:
            case m.WorkerStarted():
                supervisor.child_pid = message.pid
                self._started_at[supervisor.worker] = now
            case m.WorkerExited():
                supervisor.child_pid = 0
                supervisor.restart_expected = message.restart_in_s is not None
                self._crashed(supervisor, message, now)
                for worker in self._desk.workers.values():
                    if worker.worker == supervisor.worker and worker.pid == message.pid:
                        return worker.session
        return None

    def _crashed(self, supervisor: SupervisorSession, message: m.WorkerExited, now: float) -> None:
        """Count the end of a worker's process; after `MOST_CRASHES` in a row it is not started again."""
        name = supervisor.worker
        lived_s = now - self._started_at.get(name, now)
        times = 1 if lived_s >= LIVED_S else self._crashes.get(name, (0, ""))[0] + 1
        self._crashes[name] = times, message.reason
        if times < MOST_CRASHES or message.restart_in_s is None or name in self.banned:
            return
        reason = f"its process ended {times} times in a row and answered no task; the last time: {_ended(message)}"
        self._note_ban(name, supervisor.node, reason, "resource")
        self._desk.send(supervisor.session, m.Shutdown(reason=reason, ok=False, kind="resource"))

    def answered(self, worker: WorkerSession) -> None:
        """The worker answered a task; the process is not ended early."""
        self._crashes.pop(worker.worker, None)

    def remove(
        self, worker: WorkerSession, reason: str, kind: Departure, now: float, silent_s: float | None = None
    ) -> None:
        """The worker is gone; the last sign of life was `silent_s` ago, None: the last message."""
        del self._desk.workers[worker.session]
        self._desk.tasks.forget(worker.session)
        if not self._desk.workers:
            self.deserted_at = now
        self._desk.out.append(Close(worker.session, reason))
        if not worker.ready:
            return
        name, pid, node = worker.worker, worker.pid, worker.node
        if kind in ("moved", "drained", "restarted"):
            self._desk.append(WorkerLeft(worker=name, pid=pid, node=node, reason=reason, kind=kind))
            return
        silent_s = now - worker.heard_at if silent_s is None else silent_s
        self._desk.append(WorkerLost(worker=name, pid=pid, node=node, reason=reason, silent_s=silent_s, kind=kind))

    def succeeded(self, worker: WorkerSession) -> None:
        """The worker finished a task well: earlier failures are forgotten."""
        self._strikes.pop(worker.worker, None)
        self.answered(worker)

    def failed(self, worker: WorkerSession, reason: str, kind: EndKind, *, lasting: bool = False) -> str:
        """Count a failed task. After `max_strikes` in a row the worker is banned: return why, "" before.

        `lasting`: as of `ban`.
        """
        self.last_failure = (kind, reason)
        strikes = self._strikes.get(worker.worker, 0) + 1
        self._strikes[worker.worker] = strikes
        if strikes < self._desk.policy.max_strikes:
            return ""
        return self.ban(worker, f"{strikes} failed tasks in a row; the last one: {reason}", kind, lasting=lasting)

    def violated(self, worker: WorkerSession, what: str) -> str:
        """Count a message that breaks the protocol. After `max_strikes` of a machine it is banned: return why.

        No success in between forgives one: an honest worker sends none.
        """
        machine = worker.identity or worker.worker
        self._violations[machine] = self._violations.get(machine, 0) + 1
        if self._violations[machine] < self._desk.policy.max_strikes:
            return ""
        text = f"it broke the protocol {self._violations[machine]} times; the last time it sent {what}"
        return self.ban(worker, text, "peer", lasting=True)

    def distrusted(self, worker: WorkerSession, refusals: int, text: str) -> str:
        """Ban a worker after `max_strikes` refused results of late: return why (`text`), "" before."""
        return self.ban(worker, text, "peer", lasting=True) if refusals >= self._desk.policy.max_strikes else ""

    def ban(self, worker: WorkerSession, reason: str, kind: EndKind, *, lasting: bool = False) -> str:
        """Do not use this worker again, and tell worker and supervisor to end; return the reason.

        `lasting`: neither the worker nor its machine under another name, whether the run is resumed or not.
        """
        if worker.trial:  # a trial of one backend: the machine has others
            self._desk.send(worker.session, m.Shutdown(reason=reason, ok=False, kind=kind))
            return reason
        lasting = lasting and not self._desk.policy.local  # whose workers are all of one person
        identity = "" if self._desk.policy.local else worker.identity
        self._note_ban(
            worker.worker, worker.node, reason, kind, identity=identity, invite=worker.invite, lasting=lasting
        )
        supervisors = [s.session for s in self._desk.supervisors.values() if s.worker == worker.worker]
        for session in [worker.session, *supervisors]:
            self._desk.send(session, m.Shutdown(reason=reason, ok=False, kind=kind))
        return reason

    def _note_ban(
        self,
        worker: str,
        node: str,
        reason: str,
        kind: EndKind,
        *,
        identity: str = "",
        invite: str = "",
        lasting: bool = False,
    ) -> None:
        self.last_failure = (kind, reason)
        self._is_last_ban_lasting = lasting
        self.banned[worker] = reason
        self._desk.append(
            WorkerBanned(
                worker=worker,
                node=node,
                kind=kind,
                reason=reason,
                identity=identity,
                invite=invite,
                lasting=lasting,
            )
        )

    def restart(self, worker: WorkerSession, reason: str, kind: Departure) -> None:
        """Ask the worker's supervisor, if it has one, for a fresh process."""
        for supervisor in self._desk.supervisors.values():
            if supervisor.worker == worker.worker:
                self._desk.send(supervisor.session, m.RestartWorker(reason=reason, kind=kind))

    def let_supervisor_go(self, worker: WorkerSession) -> None:
        """End the connection of a worker's supervisor, which dials again and follows the worker."""
        for supervisor in self._desk.supervisors.values():
            if supervisor.worker == worker.worker:
                self._desk.out.append(Close(supervisor.session, worker.leaving))

    @property
    def hopeless(self) -> bool:
        """Whether only banned workers are left, no other is connected, and other workers would fare no better.

        Workers that were moved or drained come back when a person or the site's scheduler decides.
        """
        others = [s for s in self._desk.supervisors.values() if s.worker not in self.banned]
        only_banned = bool(self.banned) and not self._desk.workers and not others and not self.away
        return only_banned and not self.others_may_do_better

    @property
    def others_may_do_better(self) -> bool:
        """Whether workers may come to which the last failure does not apply: the run waits until it is deserted.

        A compilation failure, a faulty device and a liar say nothing about the workers to come. Nor do the failures of
        some about known others that are away: a liar may be alone for a moment.
        """
        if self._desk.policy.local:
            return False
        return self.last_failure[0] == "compile" or self._is_last_ban_lasting or bool(self.absent)

    @property
    def absent(self) -> list[str]:
        """Workers that took part, are not connected, and are not banned."""
        state = self._desk.state
        here = {worker.worker for worker in self._desk.workers.values()}
        return sorted({*state.keys, *state.losses, *state.left} - here - {*state.bans, *self.banned})

    @property
    def desertion_deadline(self) -> float | None:
        """When the run ends because no worker is connected (monotonic seconds); None while one is, or never."""
        return self.deserted_at + self._patience_s if self.deserted_at is not None and self._patience_s > 0 else None

    @property
    def _patience_s(self) -> float:
        """How long the run waits without a worker; longer for those that were moved or drained."""
        return self._desk.policy.abandon_after_s * (AWAY_FACTOR if self.away else 1)

    @property
    def away(self) -> dict[str, str]:
        """Workers that were moved or drained and are not back: name -> which of both."""
        return {name: kind for name, kind in sorted(self._desk.state.left.items()) if kind != "restarted"}

    @property
    def desertion(self) -> str:
        """Why the run ends at the desertion deadline."""
        reason = f"no worker was connected for {self._patience_s:.0f} s{self.absences}"
        return reason if not self.banned else f"{reason}; the last failure: {self.last_failure[1]}"

    @property
    def preparing_until(self) -> float:
        """Until when (monotonic seconds) a wait for workers is no stall, because they start, compile or load.

        Infinite while the gateway compiles for one: that ends in an artifact or a failure, within the compiler's limit.
        """
        grace_s = self._desk.policy.startup_grace_s
        until = self._began_at + grace_s
        for worker in self._desk.workers.values():
            if worker.phase is Phase.COMPILING:
                return math.inf
            if worker.phase is Phase.LOADING:
                until = max(until, max(worker.phase_at, worker.heard_at) + grace_s)
        return until

    def whom_we_wait_for(self) -> str:
        """Say for people why no worker is ready."""
        loading = sorted(w.worker for w in self._desk.workers.values() if not w.ready)
        coming = sorted(s.worker for s in self._desk.supervisors.values() if s.restart_expected)
        if loading:
            return f"waiting for {', '.join(loading)} to load {self._desk.policy.loaded}"
        if coming:
            return f"waiting for {', '.join(map(self._with_crashes, coming))} to start"
        if self.banned:
            why = f"waiting for a worker that can train: {', '.join(sorted(self.banned))} cannot"
        else:
            why = "waiting for a worker to connect"
        return f"{why}{self.absences}"

    def _with_crashes(self, worker: str) -> str:
        times, reason = self._crashes.get(worker, (0, ""))
        return worker if times < 2 else f"{worker} (its process ended {times} times in a row, the last time: {reason})"

    @property
    def absences(self) -> str:
        """Which workers were moved or drained, behind the reason of a stall."""
        return "".join(f"; {name} was {kind}" for name, kind in self.away.items())

    def _offer_job(self, worker: WorkerSession, now: float) -> None:
        digest = self._artifacts[_target(worker)]
        worker.advance("artifact offered", now)
        worker.artifact, worker.reference = digest, self._references.get(digest, "")
        worker.offers += 1
        self._desk.send(worker.session, self._desk.policy.job(digest, worker.reference))

    def _connected(self) -> dict[str, tuple[str, str]]:
        sessions = [*self._desk.workers.values(), *self._desk.supervisors.values()]
        return {one.worker: (one.node, one.identity) for one in sessions}


def _ended(message: m.WorkerExited) -> str:
    """Say how a process ended, with the usual cause."""
    hint = " (out of memory? `dmesg` on its machine says so)" if message.code == -9 else ""
    return f"{message.reason}{hint}"


def _target(worker: WorkerSession) -> Target:
    return (worker.backend, worker.target, worker.features)
