"""A hub's constants: those of a run in rounds whose workers are sites."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from planetary.core.configuration.schema import Config
from planetary.fleet.controller.reported_values import MOST
from planetary.fleet.protocol import messages as m
from planetary.runs.federation.config import FederationConfig
from planetary.runs.federation.facts import facts_of
from planetary.runs.federation.messages import SITE, Facts, SiteJob, SiteTerms, masters_of
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.policy import ControllerPolicy
from planetary.runs.rounds.preparation.preparation import Prepared
from planetary.sync.deltas import Table
from planetary.sync.judgement import Claim, Judgement, Judging

EVALUATOR = "evaluator"
"""The role of a worker that joins a hub."""


class HubPolicy(ControllerPolicy, frozen=True, kw_only=True):
    """A hub's constants. An inner step of a site is a round of the site."""

    hub: str
    facts: Facts
    sites: dict[str, SiteTerms]
    site_artifact: str  # stand-in for an artifact's digest in the jobs of sites

    @property
    def loaded(self) -> str:
        return "the terms of the federation"

    @property
    def roles(self) -> tuple[str, ...]:
        return (SITE, EVALUATOR)

    @property
    def delivers_held_out(self) -> bool:
        """A worker of the hub has no files of it."""
        return True

    @property
    def watches_training_loss(self) -> bool:
        """A hub may have no worker that evaluates."""
        return True

    def refuse(self, hello: m.Hello) -> m.Refused | None:
        """Gateways whose names are in the configuration may join, and workers that evaluate."""
        if hello.backend != SITE:
            if hello.worker not in self.sites:
                return super().refuse(hello)
            return m.Refused(
                code="hub",
                reason=f"{hello.worker} is the name of a site, and this is a worker: choose another --node-name. At a "
                "hub workers evaluate its versions; those that train join a site",
                kind="data",
            )
        if hello.worker not in self.sites:
            return m.Refused(
                code="site",
                reason=f"the hub {self.run} knows no site named {hello.worker}; its federation.sites has "
                f"{', '.join(self.sites)}: choose one of these as federation.site, or add the site there and resume "
                "the hub",
                kind="data",
            )
        return None

    def steps_of(self, worker: str, leases: int) -> int:
        """Rounds between two contributions."""
        return self.sites[worker].entry.every_rounds or self.inner_steps

    def defect_of(self, result: rm.TrainResult, steps: int, *, ends_early: bool) -> str:
        """A site that was cut off brings more rounds than it was asked for."""
        if result.steps < 1 or result.tokens < 1:
            return f"it counts {result.tokens} tokens in {result.steps} rounds"
        if result.through < result.tokens:
            return f"it counts {result.tokens} tokens, and has trained {result.through} in all"
        return ""

    def most_steps(self, steps: int) -> int:
        """A site that was cut off goes on; see `defect_of`."""
        return MOST

    def job(self, artifact: str, reference: str) -> m.Message:
        job = super().job(artifact, reference)
        if artifact != self.site_artifact:
            return job
        assert isinstance(job, rm.TrainingJob)
        fields = {name: getattr(job, name) for name in job.__struct_fields__}
        return SiteJob(**fields, hub=self.hub, facts=self.facts, sites=self.sites)

    def may_fetch(self, digest: str, artifact: str, reference: str) -> bool:
        """A site has everything."""
        return artifact != self.site_artifact and super().may_fetch(digest, artifact, reference)


def hub_policy(policy: ControllerPolicy, config: Config, prepared: Prepared, hub: str) -> HubPolicy:
    """Return the constants of a hub of this configuration, from those of a run in rounds; `hub`: which one it is."""
    federation = config.of(FederationConfig)
    facts, sites = facts_of(config, prepared), terms_of(config)
    # A site that was replaced is not awaited.
    awaited = len({name if terms.entry.data == "own" else terms.part for name, terms in sites.items()})
    length = msgspec.structs.replace(policy.length, leases=0, inner_steps=federation.every_rounds, workers=awaited)
    fields = {name: getattr(policy, name) for name in policy.__struct_fields__}
    trusted = frozenset(site.name for site in federation.sites if site.trust == "full")
    round_ = msgspec.structs.replace(policy.round, grace_s=policy.round.grace_s + _slowest_s(policy, config))
    fields |= {
        "length": length,
        "round": round_,
        "gateway_delivers": False,
        "judge": trusting(policy.judge, trusted),
    }
    label = hashlib.sha256(f"site {policy.spec.stablehlo_digest}".encode()).hexdigest()
    return HubPolicy(**fields, hub=hub, facts=facts, sites=sites, site_artifact=label)


def _slowest_s(policy: ControllerPolicy, config: Config) -> float:
    """Return the seconds the parameters take to the site with the slowest line, and back."""
    bits = 8 * sum(spec.nbytes for spec in masters_of(policy.spec.params))
    return max(
        (2 * bits / (1e6 * site.mbit_per_s) for site in config.of(FederationConfig).sites if site.mbit_per_s),
        default=0.0,
    )


def trusting(judge: Judging, trusted: frozenset[str]) -> Judging:
    """Return a judge that refuses nothing of trusted sites."""

    def judge_others(claims: Sequence[Claim], table: Table, history: Sequence[float], scale: float = 1.0) -> Judgement:
        found = judge(claims, table, history, scale)
        measures = tuple(
            msgspec.structs.replace(measure, refused="") if measure.worker in trusted else measure
            for measure in found.measures
        )
        return Judgement(measures, found.length)

    return judge_others


def terms_of(config: Config) -> dict[str, SiteTerms]:
    """Return the terms of each site; sites that train a part of the hub's data get the parts in their order.

    A site whose entry has the number of a part gets that one.
    """
    sites = config.of(FederationConfig).sites
    divided = [site.name for site in sites if site.data == "part"]
    parts = config.of(FederationConfig).parts or max(len(divided), *(site.part for site in sites), 0)
    return {
        site.name: SiteTerms(entry=site, part=site.part - 1 if site.part else divided.index(site.name), parts=parts)
        if site.data == "part"
        else SiteTerms(entry=site, part=0, parts=1)
        for site in sites
    }
