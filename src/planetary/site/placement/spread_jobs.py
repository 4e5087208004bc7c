"""Configurations of a job over several sites: of the hub's own run, and of the run of each part.

The job's configuration is that of the hub's run: `train.rounds` counts its versions, and `[outer]` is the hub's step. A
site contributes after `federation.every_rounds` rounds, and takes the mean of all workers' end parameters as they are:
rate 1 without momentum, the identity where a site has one worker.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence

import msgspec

from planetary.core.config import config_from_tables
from planetary.core.configuration.schema import Config
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import UserError
from planetary.run.kinds import kind_of
from planetary.runs.federation.config import FederationConfig, SiteEntry
from planetary.site.config import SitePolicy
from planetary.site.placement.choice import JobNeeds, PlaceableJob

KIND = "rounds"
"""The kind of run divided among sites."""


def sites_wanted(config: Config, needs: JobNeeds) -> int:
    """Return how many sites train a job; 1: one has it alone. Raises `UserError` where two numbers are given."""
    named = len(config.of(FederationConfig).sites)
    if named and needs.sites not in (1, named):
        raise UserError(f"needs.sites = {needs.sites}: federation.sites of the configuration names {named}; give one")
    if named and needs.site:
        raise UserError(f"needs.site = {needs.site}: federation.sites of the configuration names the sites; give one")
    return named or needs.sites


def outer_config(config: Config, sites: int) -> Config:
    """Return the configuration of the hub's own run of a job over so many sites.

    Raises:
        UserError: it is none of a training in rounds, or one a federation refuses.
    """
    replace = msgspec.structs.replace
    named = config.of(FederationConfig).sites
    alone = config.having(FederationConfig())
    if (kind := kind_of(alone)).name != KIND:
        raise UserError(f"a job over several sites is a training in rounds; this is one of the kind {kind.name!r}")
    if any(entry.part for entry in named):
        raise UserError("federation.sites: the hub numbers the parts; leave `part` out")
    parts = sum(entry.data == "part" for entry in named) if named else sites
    federation = replace(config.of(FederationConfig), parts=parts, hub="", site="", run="", token_file="")
    train, model = replace(config.train, target_minutes=0.0), replace(config.model, smaller={})
    outer = replace(config, train=train, model=model).having(federation)
    whole = with_members(outer, {name: number for number, name in enumerate(_names(named, sites), 1)}, ())
    kind_of(whole).check(whole)
    return outer


def _names(named: Sequence[SiteEntry], sites: int) -> Sequence[str]:
    return [entry.name for entry in named] or [f"site-{number}" for number in range(sites)]


def with_members(config: Config, members: Mapping[str, int], policies: Sequence[SitePolicy]) -> Config:
    """Return the configuration of the hub's run with the sites that have, or had, parts; strictly checked.

    Args:
        config: of `outer_config`.
        members: site -> number of the part, from 1.
        policies: of the hub: a site judged there is judged in the run.

    Raises:
        UserError: a federation refuses it.
    """
    named, judged = config.of(FederationConfig).sites, {one.name for one in policies if one.trust == "judged"}
    divided = [entry.name for entry in named if entry.data == "part"]
    entries = []
    for site, number in sorted(members.items(), key=lambda item: item[1]):
        given = named[number - 1] if named else SiteEntry(name=site)
        part = divided.index(given.name) + 1 if named and given.data == "part" else 0 if named else number
        trust = "judged" if site in judged else given.trust
        entries.append(msgspec.structs.replace(given, name=site, part=part, trust=trust))
    federation = msgspec.structs.replace(config.of(FederationConfig), sites=tuple(entries))
    return config_from_tables(tomllib.loads(to_toml(config.having(federation))))


def part_config(config: Config, job: str) -> Config:
    """Return the configuration of a site's run of the part, from that of the hub's run of the job.

    The site adds the address of the hub and the site's name there.
    """
    replace = msgspec.structs.replace
    federation = config.of(FederationConfig)
    every = max([federation.every_rounds, *(entry.every_rounds for entry in federation.sites)])
    return replace(
        config,
        train=replace(config.train, rounds=config.train.rounds * every),
        outer=replace(config.outer, optimizer="nesterov", learning_rate=1.0, momentum=0.0),
    ).having(FederationConfig(run=job, patience_s=federation.patience_s))


def parts_of(placeable: PlaceableJob, named: Sequence[SiteEntry], sites: int) -> tuple[PlaceableJob, ...]:
    """Return the parts of a job for placement; `named`: sites in the configuration.

    A site the hub judges will do: the hub's run compares the contributions with the others'.
    """
    needs = msgspec.structs.replace(placeable.needs, sites=1, trust="judged")
    sites_of = [entry.name for entry in named] or [needs.site] * sites
    return tuple(
        msgspec.structs.replace(placeable, needs=msgspec.structs.replace(needs, site=name)) for name in sites_of
    )
