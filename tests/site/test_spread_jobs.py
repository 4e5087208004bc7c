"""A job over several sites: the configurations of the hub's run and of its parts, and the choice of the sites."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from planetary.core.config import config_from_tables
from planetary.core.configuration.identity import config_hash
from planetary.core.configuration.schema import Config
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import UserError
from planetary.data.fitting import length_of
from planetary.runs.federation.config import FederationConfig, SiteEntry
from planetary.runs.federation.hub.policy import terms_of
from planetary.site.config import SitePolicy
from planetary.site.placement.choice import JobNeeds, PlaceableJob, SiteNow, choose_sites
from planetary.site.placement.messages import ControllerRoom, SiteNews, WorkerGroup
from planetary.site.placement.spread_jobs import outer_config, part_config, parts_of, sites_wanted, with_members


def config_of(**tables: Any) -> Config:
    return config_from_tables(tables)


def test_hubs_run_has_the_sites_with_their_part_numbers() -> None:
    outer = outer_config(config_of(federation={"every_rounds": 5}, train={"target_minutes": 3.0}), 2)
    assert (outer.of(FederationConfig).parts, outer.of(FederationConfig).sites, outer.train.target_minutes) == (
        2,
        (),
        0.0,
    )
    policies = [SitePolicy(name="a"), SitePolicy(name="b", trust="judged")]
    first = with_members(outer, {"a": 1, "b": 2}, policies)
    assert first.of(FederationConfig).sites == (
        SiteEntry(name="a", part=1),
        SiteEntry(name="b", part=2, trust="judged"),
    )
    moved = with_members(outer, {"a": 1, "b": 2, "c": 1}, policies)
    terms = terms_of(moved)
    assert {name: (one.part, one.parts) for name, one in terms.items()} == {"a": (0, 2), "b": (1, 2), "c": (0, 2)}
    assert config_hash(first) == config_hash(moved)  # so that the run may go on with its checkpoint


def test_named_sites_keep_their_terms_and_own_data_no_part() -> None:
    named = [{"name": "a", "data": "own"}, {"name": "b", "most_share": 0.5}, {"name": "c"}]
    config = config_of(federation={"sites": named})
    assert sites_wanted(config, JobNeeds()) == 3
    outer = outer_config(config, 3)
    terms = terms_of(with_members(outer, {"a": 1, "b": 2, "c": 3}, ()))
    assert {name: (one.part, one.parts) for name, one in terms.items()} == {"a": (0, 1), "b": (0, 2), "c": (1, 2)}
    assert terms["b"].entry.most_share == 0.5


def test_site_trains_between_versions_and_merges_by_identity() -> None:
    """A site trains the rounds between all versions and merges with the identity."""
    config = config_of(
        federation={"every_rounds": 5, "patience_s": 7.0},
        train={"rounds": 3},
        outer={"optimizer": "adam", "learning_rate": 0.1, "momentum": 0.5},
    )
    part = part_config(outer_config(config, 2), "j")
    assert part.train.rounds == 15
    assert (part.outer.optimizer, part.outer.learning_rate, part.outer.momentum) == ("nesterov", 1.0, 0.0)
    federation = part.of(FederationConfig)
    assert (federation.run, federation.patience_s, federation.hub, federation.sites) == ("j", 7.0, "", ())
    length = length_of(part, 10**6)  # it goes on for its hub, which ends it, and the schedule is that of its own rounds
    assert (length.expected_rounds, length.most_rounds) == (15, 60)
    assert length.schedule_steps == 15 * part.train.inner_steps
    assert length.first_step(16, 0) == 15 * part.train.inner_steps
    tables = tomllib.loads(to_toml(part))
    tables["federation"] |= {"hub": "127.0.0.1:9", "site": "a"}
    assert config_from_tables(tables).of(FederationConfig).run == "j"


@pytest.mark.parametrize(
    ("tables", "needs", "words"),
    [
        ({"serve": {"model": "runs/x"}}, {"sites": 2}, "a training in rounds; this is one of the kind 'serving'"),
        ({"checkpoint": {"every": 2}}, {"sites": 2}, r"not honour .*checkpoint\.every: a contribution has to"),
        ({"federation": {"sites": [{"name": "a", "part": 2}]}}, {}, "the hub numbers the parts"),
        ({"federation": {"sites": [{"name": "a"}]}}, {"site": "b"}, "names the sites; give one"),
        ({"federation": {"sites": [{"name": "a"}]}}, {"sites": 3}, "names 1; give one"),
    ],
)
def test_a_job_that_cannot_be_divided_is_refused(tables: dict[str, Any], needs: dict[str, Any], words: str) -> None:
    config = config_from_tables(tables)
    with pytest.raises(UserError, match=words):
        outer_config(config, sites_wanted(config, JobNeeds(**needs)))


def test_a_number_beyond_the_parts_is_refused() -> None:
    with pytest.raises(UserError, match="expected at least 3"):
        config_of(federation={"sites": [{"name": "a", "part": 3}, {"name": "b", "part": 1}], "parts": 2})


NEWS = SiteNews(
    controllers=(ControllerRoom(controller="training", parallel=1, own=0),),
    workers=(WorkerGroup(backend="cpu", target="host", device="", roles=(), memory=0, number=2, idle=2),),
)
JOB = PlaceableJob(controller="training", roles=("trainer",), data_sets=())


def test_each_part_gets_another_site_or_none_does() -> None:
    here = [SiteNow(policy=SitePolicy(name=name, trust="judged"), news=NEWS) for name in ("a", "b")]
    away = SiteNow(policy=SitePolicy(name="c"), news=None)
    assert choose_sites(parts_of(JOB, (), 2), [*here, away]).sites == ("a", "b")
    none = choose_sites(parts_of(JOB, (), 3), [*here, away])
    assert (none.sites, none.hopeless) == ((), False)
    assert none.why == ("2 of 3 sites can take a part now; c: it is away",)
    assert choose_sites(parts_of(JOB, (), 3), here).hopeless
    forbidden = SiteNow(policy=SitePolicy(name="d", roles=("server",)), news=NEWS)
    assert choose_sites(parts_of(JOB, (), 3), [*here, forbidden]).hopeless
    named = parts_of(JOB, (SiteEntry(name="c"), SiteEntry(name="a")), 2)
    assert not choose_sites(named, [*here, away]).hopeless
    assert choose_sites(named, here).hopeless
