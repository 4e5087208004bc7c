"""A site at its gateway: a run in rounds that belongs to a hub."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from planetary.core.errors import LocalProtocolError, ResourceError
from planetary.core.random_keys import seed_of_site
from planetary.core.token_slice import Slice
from planetary.fleet.gateway.gateway import Gateway
from planetary.fleet.gateway.parts import Parts, Setup
from planetary.fleet.protocol import events as e
from planetary.runs.federation.config import FederationConfig
from planetary.runs.federation.facts import facts_of
from planetary.runs.federation.site import events as s
from planetary.runs.federation.site.border import adoption_of
from planetary.runs.federation.site.controller import SiteController
from planetary.runs.federation.site.points import Anchor, SitePoints
from planetary.runs.federation.site.uplink import Uplink, UplinkOptions
from planetary.runs.federation.status import SITE_READER, FederationStanding
from planetary.runs.rounds.gateway.gateway import RoundsRun, RoundsSetup
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.runs.rounds.preparation.preparation import Prepared
from planetary.runs.rounds.roll_out import RollOut, StepWanted
from planetary.runs.rounds.training_status import TrainingStatus
from planetary.runs.rounds.worker.events import TrainingDone


class SiteSetup(Setup[Prepared, "SiteRun"]):
    """How a site begins: as a run in rounds, with a connection to its hub."""

    protocol, traffic_of = RoundsSetup.protocol, RoundsSetup.traffic_of
    news_of, synced = RoundsSetup.news_of, RoundsSetup.synced

    def __init__(self, rounds: RoundsSetup, *, site: UplinkOptions) -> None:
        """`site`: how it joins the hub."""
        self._rounds, self._site = rounds, site

    def prepare(self, gateway: Gateway[Any]) -> Prepared:
        return self._rounds.prepare(gateway)

    def status(self, gateway: Gateway[Any]) -> TrainingStatus:
        return self._rounds.status(gateway, SITE_READER.name)

    async def fit(self, gateway: Gateway[Any], prepared: Prepared) -> Prepared | None:
        return await self._rounds.fit(gateway, prepared)

    def begin(self, gateway: Gateway[Any], prepared: Prepared) -> Parts[SiteRun]:
        run = self._rounds.run(gateway, prepared, SITE_READER)
        config, start = gateway.config, run.start
        points = SitePoints(gateway.options.folder, prepared.step.spec.params, gateway.system.files)
        points.forget_after(start.state.round)
        if (params := points.began_with(start.state.round)) is not None:
            start.parameters.replace(start.state.round, params)
            assert points.anchor is not None
            start.records.append(adoption_of(points.anchor, start.state.tokens_total))
        facts = facts_of(config, prepared)
        uplink = Uplink(self._site, facts, points, gateway.post, gateway.system)
        gateway.before_close.push_async_callback(uplink.stop)
        seed = seed_of_site(config.run.seed, config.of(FederationConfig).site or config.run.name)
        locate = partial(_locate, uplink, start.policy.locate)
        start.policy = msgspec.structs.replace(start.policy, locate=locate, seed=seed)
        controller = SiteController(
            start.policy,
            start.state,
            gateway.clock.monotonic(),
            start.unreported,
            anchor=points.anchor,
            offered=points.offered,
            patience_s=config.of(FederationConfig).patience_s,
        )
        site = SiteRun(run, controller, points, uplink)
        run.unfit = site.unfit
        rounds: Parts[Any] = run.parts(controller)
        effects = {
            **rounds.effects,
            s.AdoptVersion: site.adopt,
            s.OfferParameters: lambda asked: gateway.work.add(site.offer(asked)),
            s.ShowProgress: uplink.work.show,
        }
        return replace(rounds, run=site, effects=effects, begun=uplink.start)


def _locate(uplink: Uplink, locate: Any, lease: int) -> Slice:
    """Return where the tokens of a lease are: those of the site's part of the data, which has every n-th lease."""
    terms = uplink.terms
    if terms is None:
        raise LocalProtocolError("a lease was handed out before the hub said which part of the data is this site's")
    return locate(lease * terms.parts + terms.part)


class SiteRun:
    """A site that has begun; `rounds` is the run it has as every run in rounds."""

    def __init__(self, rounds: RoundsRun, controller: SiteController, points: SitePoints, uplink: Uplink) -> None:
        self.rounds, self._controller, self._points, self._uplink = rounds, controller, points, uplink

    @property
    def parameters(self) -> ParameterVersions:
        """The site's parameters."""
        return self.rounds.parameters

    @property
    def stage(self) -> RollOut:
        """Of the last replacement of the site's training step."""
        return self.rounds.stage

    def roll_out(self, wanted: StepWanted) -> None:
        self.rounds.roll_out(wanted)

    def federation(self) -> FederationStanding:
        """Return the site's place in the federation. Called on the event loop."""
        border, tokens = self._controller.border, self._controller.state.tokens_total
        anchor = border.anchor
        return FederationStanding(
            role="site",
            hub=self._uplink.hub,
            version=None if anchor is None else anchor.version,
            tokens_total=tokens,
            uncounted=tokens if anchor is None else tokens - anchor.tokens,
            waits=border.wait(),
            sites=(),
        )

    def unfit(self, made: Prepared) -> str:
        """Return why a step is not for this site: the facts the hub compares at a border must not change."""
        if facts_of(made.config, made) == facts_of(self.rounds.gateway.config, self.rounds.prepared):
            return ""
        return "a site trains the model of its hub, and this step has another [model]; give keys of [optimizer]"

    # --- instructions -----------------------------------------------------------------------------------------

    def adopt(self, asked: s.AdoptVersion) -> None:
        """Begin to take the version of the hub that has arrived."""
        version, params = self._uplink.work.arrived
        if version != asked.version:
            raise LocalProtocolError(f"version {asked.version} of the hub is not here, {version} is")
        self.rounds.gateway.answer(partial(self._adopted, asked, params))

    def _adopted(self, asked: s.AdoptVersion, params: Any) -> e.Event:
        uplink, points = self._uplink, self._points
        assert uplink.terms is not None
        anchor = Anchor(
            hub=uplink.hub, terms=uplink.terms, version=asked.version, round=asked.round, tokens=asked.tokens
        )
        try:
            start = points.adopt(anchor, params, self.parameters.state.params, asked.base)
        except ResourceError as error:
            return s.SiteFileLost(f"the hub's version cannot be saved: {error}")
        self.parameters.replace(asked.round, start)
        return s.VersionTaken(anchor)

    async def offer(self, asked: s.OfferParameters) -> None:
        """Save this site's contribution, and offer it to the hub."""
        gateway, uplink, newest = self.rounds.gateway, self._uplink, self.parameters.state.params
        try:
            await asyncio.to_thread(self._points.offer, asked.offered, newest)
        except ResourceError as error:
            gateway.post(s.SiteFileLost(f"this site's contribution cannot be saved: {error}"))
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
        gateway.post(s.ContributionKept())
        uplink.work.offer(done, newest)
