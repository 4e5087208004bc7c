"""The topology of a hub: a star of sites. See `docs/federation.md`."""

from __future__ import annotations

from planetary.diloco.weight_caps import capped
from planetary.fabric.controller.desk import RoundsDesk
from planetary.fabric.controller.star import Star
from planetary.fabric.federation.hub_policy import SITE, HubPolicy
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.fabric_events import ParametersOf
from planetary.fabric.protocol.sessions import WorkerSession
from planetary.fabric.protocol.state import OpenRound
from planetary.machine.events import Payload


class PublishedOf(Payload, frozen=True):
    """The parameters of one version in the model's own element types, as workers take them."""

    version: int


class Sites(Star):
    """A version is sent when it outlasts the hub, together with how many of the site's tokens are in it.

    A site puts the rest of its tokens on top: it has to know which version they are missing in, and that the hub never
    goes back behind it by itself.
    """

    def __init__(self, desk: RoundsDesk, policy: HubPolicy) -> None:
        """See `Topology`."""
        super().__init__(desk)
        self._hub = policy

    def able_workers(self) -> list[WorkerSession]:
        """See `Topology`; a site contributes once to a round, since only its next version says what of it counts."""
        opened = self._desk.state.open
        done = set() if opened is None else {c.worker for c in opened.contributions}
        return [
            site
            for site in super().able_workers()
            if site.backend == SITE and site.worker not in done and self._hub.sites[site.worker].entry.role == "trainer"
        ]

    def announce(self, round_: int) -> None:
        """See `Topology`: nothing leaves before the checkpoint is written."""

    def finished(self, round_: int) -> None:
        """See `Topology`."""
        for site in self._desk.ready_workers():
            if site.backend == SITE:
                self.send_parameters(site, round_)

    def evaluators(self) -> list[WorkerSession]:
        """See `Topology`: sites evaluate for themselves."""
        return [worker for worker in super().evaluators() if worker.backend != SITE]

    @property
    def is_evaluated(self) -> bool:
        """See `Topology`."""
        return any(worker.backend != SITE for worker in self._desk.workers.values())

    def send_parameters(self, worker: WorkerSession, version: int) -> None:
        """See `Topology`."""
        if worker.version == version:
            return
        worker.version = version
        if worker.backend != SITE:
            self._desk.send(worker.session, m.Parameters(version=version), PublishedOf(version))
        else:
            counted = self._desk.state.counted.get(worker.worker, 0)
            self._desk.send(worker.session, m.Parameters(version=version, counted=counted), ParametersOf(version))

    def _weights(self, ended: OpenRound) -> dict[int, int]:
        """See `Star`; no site weighs more than its share."""
        sites = {c.worker: c for c in ended.contributions}
        shares = {name: self._hub.sites[name].entry.most_share for name in sites}
        weights = capped({name: c.tokens for name, c in sites.items()}, shares)
        return {sites[name].task: weight for name, weight in weights.items()}
