"""A simulated run of reinforcement learning: actors and learners in the production shells, and some that lie."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from small_policy import SmallPolicy

from planetary.artifacts.jsonl import read_json_lines
from planetary.core.configuration.schema import Config
from planetary.core.tensors import Tensors
from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
from planetary.fleet.gateway.run_files import METRICS
from planetary.fleet.preparation.compiling import PublishedArtifact
from planetary.fleet.protocol import messages as m
from planetary.fleet.shell.system import System
from planetary.fleet.worker.role import Role, Roles, Workplace
from planetary.machine.machine import Validated
from planetary.runs.rl.controller import ReinforcementController
from planetary.runs.rl.environments.judge_process import Case
from planetary.runs.rl.environments.judging import Judged
from planetary.runs.rl.gateway import PolicySetup
from planetary.runs.rl.loader import PolicyLoader
from planetary.runs.rl.messages import REINFORCEMENT, PolicyJob, RolloutsSampled
from planetary.runs.rl.program.shape import SCORE, TRAIN
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runs.rounds.preparation.whole_versions import WholeVersions
from planetary.runtime.device_program import Handle
from planetary.simulation.executors import Health
from planetary.simulation.faults import Fault
from planetary.simulation.lies import RolloutLie
from planetary.simulation.node import SimulatedNode
from planetary.simulation.process import Process
from planetary.simulation.simulated_cluster import COMPILE_S, SimulatedCluster
from planetary.simulation.timed_program import TimedProgram

JUDGE_S = 0.1  # time of the environment for the texts of a task
Lies = dict[int, RolloutLie]
"""The lie of each worker that lies now, by number."""


class PolicyCluster(SimulatedCluster[Gateway[Any]]):
    """A run of reinforcement learning; see `SimulatedCluster`.

    Attributes:
        training: the computing part.
        lies: of workers.
        most_kept: most versions of the parameters the gateway kept at once.
    """

    protocol = REINFORCEMENT

    def __init__(
        self,
        seed: int,
        training: SmallPolicy,
        nodes: int,
        plan: Sequence[Fault] = (),
        *,
        roles: Sequence[tuple[str, ...]] = (),
    ) -> None:
        """Start everything at time 0; `plan` and `roles` name nodes by number. A node without an entry may be both."""
        self.training, self.lies, self.most_kept = training, Lies(), 0
        self._allowed = roles
        config: Config = training.prepared.config
        super().__init__(seed, config, nodes, plan)

    @property
    def controller(self) -> ReinforcementController:
        """Return the controller of the gateway that runs, or ran last."""
        found = super().controller
        assert isinstance(found, ReinforcementController)
        return found

    @property
    def metrics(self) -> dict[int, RoundMetrics]:
        """A round whose version was evaluated has a second line, which counts."""
        path = self.run_folder / METRICS
        return {line.round: line for line in read_json_lines(path, RoundMetrics)} if path.exists() else {}

    def _node(self, number: int, name: str = "", roles: tuple[str, ...] = ()) -> SimulatedNode:
        allowed = self._allowed[number] if number < len(self._allowed) else ()
        return super()._node(number, name, roles or allowed)

    def _make_gateway(self, process: Process, options: GatewayOptions, system: System) -> Gateway[Any]:
        async def compile_for(*_: object) -> PublishedArtifact:
            await asyncio.sleep(COMPILE_S)
            return PublishedArtifact(self.training.artifact(gateway.store), 1, "simulated")

        setup = PolicySetup(
            lambda *_: self.training.prepared,
            compile_for=compile_for,
            make_judges=lambda *_: SimulatedJudges(self.training),
        )
        gateway = Gateway[Any](self.config, options, Security(), setup, system=system)
        return gateway

    @property
    def parameters(self) -> WholeVersions:
        """The parameters at the gateway."""
        assert self.gateway is not None
        return self.gateway.run_parts.run.parameters

    def _roles(self, number: int, process: Process, health: Health) -> Roles:
        return {PolicyJob: DoubtfulLoader(self.training, health, number, self.lies)}

    def _check(self, gateway: Gateway[Any], machine: Validated) -> None:
        """The gateway keeps the newest version, and those of texts that are sampled or judged."""
        if gateway.controller is not machine:
            return
        versions, results = self.parameters.kept()
        self.most_kept = max(self.most_kept, versions)
        assert versions <= 2 * len(self.nodes) + 2, f"the gateway keeps {versions} versions of the parameters"
        assert results <= 2 * (len(self.nodes) + 1), f"the gateway keeps {results} results of {len(self.nodes)} workers"

    def _lie(self, fault: Fault) -> bool:
        self.lies[fault.worker] = fault.rollout_lie
        self.world.after(fault.seconds, lambda: self.lies.pop(fault.worker, None))
        return True


class SimulatedJudges:
    """Judges in no process; see `Judges`."""

    def __init__(self, training: SmallPolicy) -> None:
        self._training = training

    async def judge(self, cases: Sequence[Case]) -> list[Judged]:
        await asyncio.sleep(JUDGE_S)
        return [self._training.judge(case.completions, case.meta) for case in cases]

    async def close(self) -> None: ...


class DoubtfulLoader(PolicyLoader):
    """Loads the production role, whose program takes simulated time, and whose results may be forged on the way."""

    def __init__(self, training: SmallPolicy, health: Health, number: int, lies: Lies) -> None:
        """`number`: of the worker."""
        super().__init__(self._open_program)
        self._training, self._health, self._number, self._lies = training, health, number, lies

    def _open_program(self, *_: object, **__: object) -> TimedProgram:
        return DoubtfulProgram(self._training, self._health, self._number, self._lies)

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        return super().load(job, replace(place, send=partial(self._send, place)))

    def _send(self, place: Workplace, message: m.Message, tensors: Tensors | None) -> None:
        lie = self._lies.get(self._number)
        if isinstance(message, RolloutsSampled) and tensors is not None and lie in ("logprobs", "copied_rollouts"):
            tensors = forged(lie, tensors)
        place.send(message, tensors)


class DoubtfulProgram(TimedProgram):
    """A policy on a device that may sample with other weights than it was given."""

    def __init__(self, training: SmallPolicy, health: Health, number: int, lies: Lies) -> None:
        """`number`: of the worker."""
        inner = training.open_program()
        serving = training.prepared.shape.serving
        steps = {TRAIN: 2.0, SCORE: 0.5, **{call.name: 0.25 for call in serving.calls}}
        super().__init__(inner, health, steps)
        self._number, self._lies = number, lies

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        if function not in (TRAIN, SCORE) and self._lies.get(self._number) == "other_weights":
            table, *others = arguments
            arguments = [np.roll(table, 1, axis=1), *others]
        return super().invoke(function, arguments)


def forged(lie: RolloutLie | None, arrays: Tensors) -> Tensors:
    """Return a liar's forgery of the arrays of `RolloutsSampled`."""
    if lie == "logprobs":
        return {**arrays, "logprobs": arrays["logprobs"] - np.float32(0.1)}
    borders = np.cumsum(arrays["lengths"])[:-1]
    texts = list(zip(np.split(arrays["tokens"], borders), np.split(arrays["logprobs"], borders), strict=True))
    copies = [texts[i - i % 2] for i in range(len(texts))]  # every second one is the one before it
    return {
        "tokens": np.concatenate([tokens for tokens, _ in copies]),
        "logprobs": np.concatenate([values for _, values in copies]),
        "lengths": np.array([len(tokens) for tokens, _ in copies], np.int32),
    }
