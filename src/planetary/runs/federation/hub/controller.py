"""Decisions of a hub: a run in rounds in a star, whose workers are sites."""

from __future__ import annotations

from planetary.fleet.protocol import messages as m
from planetary.machine.events import Payload
from planetary.runs.federation.hub.policy import HubPolicy
from planetary.runs.federation.messages import SITE
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.controller.controller import Controller
from planetary.runs.rounds.controller.desk import RoundsDesk
from planetary.runs.rounds.controller.star import Star
from planetary.runs.rounds.controller.topology import Topology
from planetary.runs.rounds.events import ParametersOf
from planetary.runs.rounds.policy import ControllerPolicy
from planetary.runs.rounds.sessions import Trainer
from planetary.runs.rounds.state import OpenRound
from planetary.sync.contributions import capped


class HubController(Controller):
    """A controller whose workers are sites."""

    def _topology_of(self, policy: ControllerPolicy) -> Topology:
        assert isinstance(policy, HubPolicy)
        return Sites(self.desk, policy)

    def _beyond_task(self, worker: Trainer, message: m.Message) -> str:
        """No result of a site begins before the end of those that count; tokens of lost versions are given up."""
        train = worker.train
        if isinstance(message, rm.TrainResult) and train is not None and train.task == message.task:
            counted = self.state.counted.get(worker.worker, 0)
            if message.through - message.tokens < counted:
                begins = message.through - message.tokens
                return f"a result of {message.tokens} tokens behind {begins}, and {counted} count already"
        return super()._beyond_task(worker, message)

    def _go_on(self, now: float) -> None:
        if self.evaluation.versions and not self.topology.is_evaluated:
            self.evaluation.give_up()  # the worker that would have done it is gone
        super()._go_on(now)


class PublishedOf(Payload, frozen=True):
    """The parameters of one version in the model's own element types, as workers take them."""

    version: int


class Sites(Star):
    """A version is sent when it outlasts the hub, together with how many of the site's tokens are in it.

    A site puts the remaining tokens on top: it has to know which version lacks them, and the hub must never go back
    behind that version by itself.
    """

    def __init__(self, desk: RoundsDesk, policy: HubPolicy) -> None:
        super().__init__(desk)
        self._hub = policy

    def able_workers(self) -> list[Trainer]:
        """A site contributes once to a round, since only the next version shows the counted tokens."""
        opened = self._desk.state.open
        done = set() if opened is None else {c.worker for c in opened.contributions}
        return [
            site
            for site in super().able_workers()
            if site.backend == SITE and site.worker not in done and self._hub.sites[site.worker].entry.role == "trainer"
        ]

    def announce(self, round_: int) -> None:
        """Nothing leaves before the checkpoint is written."""

    def finished(self, round_: int) -> None:
        for site in self._desk.ready_workers():
            if site.backend == SITE:
                self.send_parameters(site, round_)

    def evaluators(self) -> list[Trainer]:
        """Sites evaluate for themselves."""
        return [worker for worker in super().evaluators() if worker.backend != SITE]

    def reports_steps(self, worker: Trainer) -> bool:
        """A site reports rounds, and keeps no queue of versions."""
        return worker.backend != SITE

    @property
    def is_evaluated(self) -> bool:
        return any(worker.backend != SITE for worker in self._desk.workers.values())

    def send_parameters(self, worker: Trainer, version: int) -> None:
        if worker.version == version:
            return
        worker.version = version
        if worker.backend != SITE:
            self._desk.send(worker.session, rm.Parameters(version=version), PublishedOf(version))
        else:
            counted = self._desk.state.counted.get(worker.worker, 0)
            self._desk.send(worker.session, rm.Parameters(version=version, counted=counted), ParametersOf(version))

    def _weights(self, ended: OpenRound) -> dict[int, int]:
        """No site weighs more than the configured share."""
        sites = {c.worker: c for c in ended.contributions}
        shares = {name: self._hub.sites[name].entry.most_share for name in sites}
        weights = capped({name: c.tokens for name, c in sites.items()}, shares)
        return {sites[name].task: weight for name, weight in weights.items()}
