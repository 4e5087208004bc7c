"""A controller of rounds without a world around it."""

from __future__ import annotations

import msgspec
import numpy as np
from small_training import small_policy, small_training

from planetary.core.extension_points import CODECS
from planetary.fleet.protocol import messages as m
from planetary.machine.journal import replay
from planetary.runs.rounds import events as e
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.controller.controller import Controller
from planetary.runs.rounds.gateway.topology import ring_policy
from planetary.runs.rounds.records import RoundsRecord, TrainingStarted
from planetary.runs.rounds.start import policy_of
from planetary.runs.rounds.state import ControllerState
from planetary.sync.deltas import Table

ROUNDS = 3


class Bench:
    """A controller without a world: its instructions are collected, and time is what the test says."""

    def __init__(
        self, workers: int = 1, *, rounds: int = ROUNDS, local: bool = False, given: tuple[str, ...] = ()
    ) -> None:
        """`given`: settings, as of `--set`."""
        policy = small_policy(rounds=rounds, workers=workers)
        if given:
            training = small_training(rounds=rounds, workers=workers, given=given)
            policy = policy_of(training.config, training.prepared)
            if training.config.sync.topology == "ring":
                ring = ring_policy(training.config, policy.spec.params, training.start(), 1)
                policy = msgspec.structs.replace(policy, ring=ring)
        self.policy = msgspec.structs.replace(policy, local=local)
        self.started = TrainingStarted(run="sim", rounds=rounds, config_hash="c", model="m", params=8)
        self.controller = Controller(self.policy, replay([self.started], ControllerState()), 0.0)
        self.now = 0.0
        self.journal: list[RoundsRecord] = []
        self.sent: list[tuple[int, m.Message]] = []
        self.finish: e.Finish | None = None
        self.measures: list[e.MeasureContributions] = []
        self.steps: list[e.TakeOuterStep] = []
        self.writes: list[e.WriteCheckpoint] = []
        self.restores: list[e.RestoreParameters] = []
        self.deltas: dict[int, list[float]] = {}  # task -> its delta, where it differs from the others
        self._sessions = 0

    def tell(self, event: e.Event) -> None:
        self.now += 0.01
        for instruction in self.controller.handle(event, self.now):
            match instruction:
                case e.Append():
                    self.journal.append(instruction.record)
                case e.Send():
                    self.sent.append((instruction.session, instruction.message))
                case e.Finish():
                    self.finish = instruction
                case e.MeasureContributions():
                    self.measures.append(instruction)
                    self.tell(e.ContributionsMeasured(instruction.round, self.table_of(instruction)))
                case e.TakeOuterStep():
                    self.steps.append(instruction)
                case e.WriteCheckpoint():
                    self.writes.append(instruction)
                case e.RestoreParameters():
                    self.restores.append(instruction)
                case e.Compile():
                    self.compile(instruction)

    def compile(self, instruction: e.Compile) -> None:
        self.tell(
            e.Compiled(instruction.backend, instruction.target, instruction.features, "a" * 64, 1, 1.0, "verified")
        )

    def table_of(self, instruction: e.MeasureContributions) -> Table:
        """The inner products of the deltas that the test gave the tasks; all others are [1, 0]."""
        tasks = [task for task, _ in instruction.contributions]
        deltas = np.array([self.deltas.get(task, [1.0, 0.0]) for task in tasks])
        products = tuple(tuple(float(value) for value in row) for row in deltas @ deltas.T)
        return Table(tuple(tasks), products, 1.0, 10**6)

    def join(self, name: str, *, identity: str = "", token: str = "") -> int:
        """A worker connects and loads its job; returns its session."""
        session = self.connect(name, identity=identity, token=token)
        ready = rm.Ready(artifact="a" * 64, opt_state_round=0, in_ring=self.policy.ring is not None)
        self.tell(e.Received(session, ready))
        return session

    def connect(
        self,
        name: str,
        *,
        trial: bool = False,
        roles: tuple[str, ...] = (),
        identity: str = "",
        token: str = "",
        worker: str = "",
    ) -> int:
        """A worker connects and is given its job; returns its session."""
        self._sessions += 1
        hello = m.Hello(
            role="worker",
            protocol=m.FABRIC.version,
            software="test",
            token=token,
            identity=identity,
            worker=worker or f"{name}/0",
            node=name,
            pid=1,
            backend="cpu",
            target="host",
            trial=trial,
            roles=roles,
            iree_version=self.policy.iree_version,
            codecs=tuple(CODECS.built_in),
        )
        self.tell(e.Received(self._sessions, hello))
        return self._sessions

    def task_of(self, session: int) -> int:
        return [msg.task for to, msg in self.sent if to == session and isinstance(msg, rm.TrainTask)][-1]

    def records(self, kind: type) -> list:
        return [record for record in self.journal if isinstance(record, kind)]
