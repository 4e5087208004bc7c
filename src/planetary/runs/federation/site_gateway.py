"""The gateway of a site: that of a run in rounds, which belongs to a hub."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec

from planetary.core.config import Config
from planetary.core.errors import LocalProtocolError, ResourceError
from planetary.core.random_keys import seed_of_site
from planetary.core.token_slice import Slice
from planetary.fleet.gateway.gateway import GatewayOptions, Security
from planetary.fleet.protocol import events as e
from planetary.runs.federation import site_events as s
from planetary.runs.federation.border import adoption_of
from planetary.runs.federation.config import FederationConfig
from planetary.runs.federation.facts import facts_of
from planetary.runs.federation.site_controller import SiteController
from planetary.runs.federation.site_points import Anchor, SitePoints
from planetary.runs.federation.status import SITE_READER, FederationStanding
from planetary.runs.federation.uplink import Uplink, UplinkOptions
from planetary.runs.rounds.controller.controller import Controller
from planetary.runs.rounds.gateway.gateway import RoundsGateway
from planetary.runs.rounds.gateway.start import RoundsStart
from planetary.runs.rounds.preparation.preparation import Prepared
from planetary.runs.rounds.worker.events import TrainingDone


class SiteGateway(RoundsGateway):
    """The gateway of a site."""

    reader = SITE_READER

    def __init__(
        self, config: Config, options: GatewayOptions, security: Security, *, site: UplinkOptions, **parts: Any
    ) -> None:
        """`site`: how it joins the hub; `parts`: as of `RoundsGateway`."""
        super().__init__(config, options, security, **parts)
        self._site = site
        self._points: SitePoints | None = None
        self._uplink: Uplink | None = None

    # --- the run ----------------------------------------------------------------------------------------------

    def _begin(self, prepared: Prepared) -> RoundsStart:
        start = super()._begin(prepared)
        points = self._points = SitePoints(self.options.folder, prepared.step.spec.params, self._system.files)
        points.forget_after(start.state.round)
        if (params := points.began_with(start.state.round)) is not None:
            start.parameters.replace(start.state.round, params)
            assert points.anchor is not None
            start.records.append(adoption_of(points.anchor, start.state.tokens_total))
        seed = seed_of_site(self.config.run.seed, self.config.of(FederationConfig).site or self.config.run.name)
        locate = partial(self._locate, start.policy.locate)
        start.policy = msgspec.structs.replace(start.policy, locate=locate, seed=seed)
        facts = facts_of(self.config, prepared)
        self._uplink = Uplink(self._site, facts, points, self._post, self._system)
        return start

    def _locate(self, locate: Any, lease: int) -> Slice:
        """Return where the tokens of a lease are: those of the site's part of the data, which has every n-th lease."""
        terms = self._uplink.terms if self._uplink is not None else None
        if terms is None:
            raise LocalProtocolError("a lease was handed out before the hub said which part of the data is this site's")
        return locate(lease * terms.parts + terms.part)

    def _control(self, prepared: Prepared, start: RoundsStart) -> Controller:
        points = self._points
        assert points is not None
        return SiteController(
            start.policy,
            start.state,
            self._clock.monotonic(),
            start.unreported,
            anchor=points.anchor,
            offered=points.offered,
            patience_s=self.config.of(FederationConfig).patience_s,
        )

    def _begun(self) -> None:
        assert self._uplink is not None
        self._uplink.start()

    async def _close(self) -> None:
        if self._uplink is not None:
            await self._uplink.stop()
        await super()._close()

    def federation(self) -> FederationStanding:
        """Return the site's place in the federation. Called on the event loop."""
        controller = self.controller
        anchor = controller.border.anchor if isinstance(controller, SiteController) else None
        tokens = 0 if controller is None else controller.state.tokens_total
        waits = controller.border.wait() if isinstance(controller, SiteController) else self.stage
        return FederationStanding(
            role="site",
            hub=self._uplink.hub if self._uplink is not None else "",
            version=None if anchor is None else anchor.version,
            tokens_total=tokens,
            uncounted=tokens if anchor is None else tokens - anchor.tokens,
            waits=waits,
            sites=(),
        )

    def _unfit(self, made: Prepared) -> str:
        """The facts the hub compares at a border must not change."""
        assert self.prepared is not None
        if facts_of(made.config, made) == facts_of(self.config, self.prepared):
            return ""
        return "a site trains the model of its hub, and this step has another [model]; give keys of [optimizer]"

    # --- instructions -----------------------------------------------------------------------------------------

    def _carry_out(self, instruction: e.Instruction) -> e.Finish | None:
        uplink = self._uplink
        match instruction:
            case s.AdoptVersion():
                assert uplink is not None
                assert self._shell is not None
                version, params = uplink.work.arrived
                if version != instruction.version:
                    raise LocalProtocolError(f"version {instruction.version} of the hub is not here, {version} is")
                self._shell.answer(partial(self._adopt, instruction, params))
            case s.OfferParameters():
                self._work.add(self._offer(instruction))
            case s.ShowProgress():
                assert uplink is not None
                uplink.work.show(instruction)
            case _:
                return super()._carry_out(instruction)
        return None

    def _adopt(self, asked: s.AdoptVersion, params: Any) -> e.Event:
        uplink, points = self._uplink, self._points
        assert uplink is not None
        assert uplink.terms is not None
        assert points is not None
        anchor = Anchor(
            hub=uplink.hub, terms=uplink.terms, version=asked.version, round=asked.round, tokens=asked.tokens
        )
        try:
            start = points.adopt(anchor, params, self.parameters.state.params, asked.base)
        except ResourceError as error:
            return s.SiteFileLost(f"the hub's version cannot be saved: {error}")
        self.parameters.replace(asked.round, start)
        return s.VersionTaken(anchor)

    async def _offer(self, asked: s.OfferParameters) -> None:
        uplink, points = self._uplink, self._points
        assert uplink is not None
        assert points is not None
        newest = self.parameters.state.params
        try:
            await asyncio.to_thread(points.offer, asked.offered, newest)
        except ResourceError as error:
            self._post(s.SiteFileLost(f"this site's contribution cannot be saved: {error}"))
            return
        done = TrainingDone(
            asked.task.task,
            asked.task.round,
            asked.rounds,
            asked.tokens,
            asked.loss,
            0.0,
            asked.seconds,
            asked.offered.tokens,
        )
        self._post(s.ContributionKept())
        uplink.work.offer(done, newest)
