"""Federations that runs of this gateway take part in: as a hub, or as a site of one. PCP's paths."""

from __future__ import annotations

from typing import Literal

import msgspec

from planetary.fleet.protocol.status import WorkerStatus
from planetary.runs.federation.config import FederationConfig
from planetary.runs.federation.status import FederationStanding, InFederation
from planetary.runs.rounds.training_status import training_of
from planetary.site.api.group import SiteGroup
from planetary.site.hosted_run import HostedRun
from planetary.site.placed_work import PlacedWork
from planetary.web.access import Scope
from planetary.web.router import operation

FederationRole = Literal["hub", "site"]


class FederatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that takes part in a federation."""

    job_id: str
    role: FederationRole
    hub: str  # "HOST:PORT"; "": it is the hub itself
    site: str  # site name at the hub; "": this is the hub
    round: int  # finished ones
    standing: FederationStanding


class HubLinkView(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway's own link to a hub that places jobs here."""

    upstream: str  # "HOST:PORT"
    site: str  # name of this gateway there
    hub: str  # identity of the hub; "": it was never reached
    connected: bool
    refused: str  # why it is not connected; "": it is, or was not dialled yet
    dials: bool  # the gateway dials again; False: the reason cannot pass away


class FederationView(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this gateway takes part in federations, and how."""

    enabled: bool
    runs: tuple[FederatedRun, ...]
    places_jobs: bool  # this is a hub that places jobs: see /v1/federation/jobs
    link: HubLinkView | None  # None: it has none


class PeerList(msgspec.Struct, frozen=True, kw_only=True):
    """Sites of the hubs that run here, as their hubs see them."""

    peers: tuple[WorkerStatus, ...]


class FederationOperations(SiteGroup):
    """Operations on federations."""

    @operation("GET", "/v1/federation/status", group="federation", scope=Scope.READ)
    async def get_federation(self) -> FederationView:
        """Return which runs take part in a federation, and the gateway's own link to a hub."""
        site = self._site
        runs = tuple(_view(name, run, role) for name, run in site.runs.items() if (role := _role(run)) is not None)
        link = None if site.placed is None else _link_view(site.placed)
        enabled = bool(runs) or link is not None or site.hub is not None
        return FederationView(enabled=enabled, runs=runs, places_jobs=site.hub is not None, link=link)

    @operation("GET", "/v1/federation/peers", group="federation", scope=Scope.READ)
    async def list_federation_peers(self) -> PeerList:
        """List the sites of the hubs that run here."""
        hubs = [run for run in self._site.runs.values() if _role(run) == "hub"]
        return PeerList(peers=tuple(peer for run in hubs for peer in run.status().workers))


def _role(run: HostedRun) -> FederationRole | None:
    federation = run.gateway.config.of(FederationConfig)
    return "hub" if federation.sites else "site" if federation.hub else None


def _link_view(placed: PlacedWork) -> HubLinkView:
    machine, options = placed.link.machine, placed.link.options
    return HubLinkView(
        upstream=f"{options.address.host}:{options.address.port}",
        site=options.name,
        hub=machine.hub,
        connected=machine.connected and not machine.ended,
        refused=machine.ended or machine.away,
        dials=not machine.ended,
    )


def _view(name: str, run: HostedRun, role: FederationRole) -> FederatedRun:
    config, gateway = run.gateway.config, run.gateway
    standing = FederationStanding(
        role=role, hub="", version=None, tokens_total=0, uncounted=0, waits=gateway.stage, sites=()
    )
    if gateway.parts is not None:
        assert isinstance(gateway.parts.run, InFederation), "the kind of a run is that of its configuration"
        standing = gateway.parts.run.federation()
    return FederatedRun(
        job_id=name,
        role=role,
        hub=config.of(FederationConfig).hub if role == "site" else "",
        site=(config.of(FederationConfig).site or config.run.name) if role == "site" else "",
        round=training_of(run.status()).rounds_finished,
        standing=standing,
    )
