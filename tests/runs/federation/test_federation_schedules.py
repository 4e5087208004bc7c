"""Whole federations under random faults: every token once, and all parameters from the journals bit for bit."""

from __future__ import annotations

import shutil

import pytest
from federation_schedules import SCHEDULES, federation_of, history_of
from simulated_federation import SimFederation, hub_config, site_config
from small_training import SmallTraining, small_training

from planetary.core.configuration.schema import OuterConfig
from planetary.runs.federation.config import SiteEntry
from planetary.runs.federation.records import ContributionOffered, VersionAdopted, WentAlone
from planetary.runs.rounds.records import DeltaAccepted

SEEDS, LATER_SEEDS = range(2), range(100, 124)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_count_once_and_parameters_replay(seed: int) -> None:
    SCHEDULES.run(seed, sites=2, hub_rounds=4)


@pytest.mark.slow
def test_more_schedules_of_three_sites() -> None:
    records = SCHEDULES.sweep(LATER_SEEDS).records
    assert records[WentAlone] > 0
    assert records[ContributionOffered] > len(LATER_SEEDS)


@pytest.mark.slow
def test_the_moments_of_adam_stay_at_each_level() -> None:
    adam = OuterConfig(optimizer="adam", learning_rate=0.2, momentum=0.5, loss_rise=0.0)
    SCHEDULES.sweep(range(200, 204), sites=2, outer=(adam, adam))


@pytest.mark.slow
def test_twenty_sites_under_faults() -> None:
    SCHEDULES.run(1000, sites=20, hub_rounds=4, most=30)


@pytest.mark.slow
def test_what_a_site_trained_alone_counts_when_it_returns() -> None:
    """Its tokens go on top of the version that it comes back to, and are in its next contribution."""
    federation = federation_of(7, sites=2, hub_rounds=14, every_rounds=2)
    federation.world.at(8.0, lambda: federation.cut_off("s0", 14.0))
    assert federation.run(3000.0), federation.waits_for
    SCHEDULES.check(federation)
    journal = federation.sites["s0"].journal
    assert [r for r in journal if isinstance(r, WentAlone)]
    [carried] = [r for r in journal if isinstance(r, VersionAdopted) and r.carried]
    after = next(r for r in journal if isinstance(r, ContributionOffered) and r.round > carried.round)
    lease = federation.sites["s0"].config.targets_per_slice
    assert after.tokens == carried.carried + (after.round - carried.round) * lease
    accepted = [r for r in federation.hub.journal if isinstance(r, DeltaAccepted) and r.worker == "s0"]
    assert after.tokens in [r.tokens for r in accepted]


def test_a_hub_that_is_killed_goes_on_with_its_sites() -> None:
    federation = federation_of(8, sites=2, hub_rounds=5, every_rounds=1)
    for at in (9.0, 15.0):
        federation.world.at(at, federation.hub.kill_gateway)
    assert federation.run(3000.0), federation.waits_for
    SCHEDULES.check(federation)
    assert federation.hub.struck == ["kill_gateway", "kill_gateway"]


@pytest.mark.slow
def test_a_late_site_joins_with_the_newest_version() -> None:
    federation = federation_of(9, sites=2, hub_rounds=12, every_rounds=1)
    federation.cut_off("s1", 35.0)  # from the start
    assert federation.run(3000.0), federation.waits_for
    SCHEDULES.check(federation)
    first = next(r for r in federation.sites["s1"].journal if isinstance(r, VersionAdopted))
    assert first.version > 0


@pytest.mark.slow
def test_hub_regains_what_sites_trained_since_lost_versions() -> None:
    """Resumed from an older checkpoint, it lacks the tokens that only the lost versions had, and no others."""
    federation = federation_of(10, sites=2, hub_rounds=12, every_rounds=1)
    hub = federation.hub
    lost: list[str] = []

    def lose_versions() -> None:
        assert hub.kill_gateway()
        for path in sorted((hub.run_folder / "checkpoints").glob("round-*"))[-2:]:
            lost.append(path.name)
            shutil.rmtree(path)

    federation.world.at(16.0, lose_versions)
    assert federation.run(3000.0), federation.waits_for
    assert len(lost) == 2
    state = hub.controller.state
    for name, site in federation.sites.items():
        journal = site.journal
        [back] = [r for r in journal if isinstance(r, VersionAdopted) and "went back" in r.why]
        given_up = int(back.why.split(", and ")[1].split()[0])
        history = [r for r in history_of(hub.journal) if isinstance(r, DeltaAccepted) and r.worker == name]
        assert sum(r.tokens for r in history) == state.counted[name] - given_up
        later = [r for r in journal if isinstance(r, VersionAdopted) and r.t > back.t]
        assert later, "it went on with the hub"
        assert not any(r.why for r in later)


def test_understaffed_site_waits_for_an_absent_hub() -> None:
    """The time for its workers to come passes first, and is due for ever: its process took all of one core, deaf."""
    config = small_training(rounds=3, workers=2).config
    hub = hub_config(config, (SiteEntry("a"),), rounds=3)
    site = site_config(config, "a", workers=2, outer=config.outer)
    federation = SimFederation(5, SmallTraining(hub), {"a": SmallTraining(site)})
    away_s = 4 * config.timings.startup_grace_s
    federation.cut_off("a", away_s)
    assert federation.run(away_s + 300.0)
    assert federation.world.now > away_s
    assert federation.hub.finished is not None
    assert federation.hub.finished.ok, federation.hub.finished.reason
