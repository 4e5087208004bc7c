"""Who may join a hub, as what, and what both must have in common; refusals name sizes and digests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from simulated_federation import SimFederation, hub_config, site_config
from small_training import SmallTraining, small_training

from planetary.cli.main import main
from planetary.compiler.step.step_module import TrainStep
from planetary.core.config import apply_overrides
from planetary.core.configuration.identity import config_hash
from planetary.core.configuration.schema import Config, OuterConfig
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec
from planetary.fleet.protocol.records import WorkerBanned, WorkerJoined, WorkerRefused
from planetary.runs.federation.config import SiteEntry
from planetary.runs.federation.facts import differences, facts_of
from planetary.runs.federation.hub.policy import terms_of
from planetary.runs.federation.status import FederationStanding
from planetary.runs.rounds.records import RoundMerged

PLAIN = OuterConfig(learning_rate=1.0, momentum=0.0, loss_rise=0.0)
Change = Callable[[SmallTraining], None]


def federation(
    entries: dict[str, dict[str, Any]], *, names: str = "ab", change: Change | None = None, rounds: int = 3
) -> SimFederation:
    """`entries`: what the hub knows; `names`: the sites that come, of which the last has its training changed."""
    config = small_training(rounds=rounds, workers=1).config
    hub = hub_config(config, tuple(SiteEntry(name, **entry) for name, entry in entries.items()), rounds=rounds)
    longer = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, rounds=20))
    sites = {name: SmallTraining(site_config(longer, name, outer=PLAIN, patience_s=5.0)) for name in names}
    if change is not None:
        change(sites[names[-1]])
    return SimFederation(3, SmallTraining(hub), sites)


def run(made: SimFederation) -> SimFederation:
    assert made.run(2000.0), [c.waits_for for c in (made.hub, *made.sites.values())]
    assert made.hub.finished is not None
    assert made.hub.finished.ok, made.hub.finished.reason
    return made


def end_of(made: SimFederation, name: str) -> str:
    end = made.sites[name].finished
    assert end is not None
    assert not end.ok
    return end.reason


def larger(training: SmallTraining) -> None:
    prepared = training.prepared
    spec = msgspec.structs.replace(prepared.step.spec, params=(TensorSpec("w", "f32", (12,)),))
    params = {"w": np.zeros(12, np.float32)}
    training.prepared = dataclasses.replace(prepared, step=TrainStep("", spec, b""), params=params)


def other_vocabulary(training: SmallTraining) -> None:
    data = msgspec.structs.replace(training.prepared.data, vocab_size=99)
    training.prepared = dataclasses.replace(training.prepared, data=data)


def other_data(training: SmallTraining) -> None:
    data = msgspec.structs.replace(training.prepared.data, key="f" * 64)
    training.prepared = dataclasses.replace(training.prepared, data=data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (larger, ["8 parameters in 1 tensors", "12 parameters", "'w' is f32[8] at the hub and f32[12] here", "digest"]),
        (other_vocabulary, ["tokenizer has", "99", "digest"]),
        (other_data, ["part of the hub's data", "ffffffffffff"]),
    ],
)
def test_site_training_something_else_is_refused(change: Change, said: list[str]) -> None:
    made = run(federation({"a": {}, "b": {}}, change=change))
    reason = end_of(made, "b")
    assert [text for text in said if text not in reason] == [], reason
    assert any(isinstance(r, WorkerRefused) and r.worker == "b" for r in made.hub.journal)
    assert made.hub.controller.state.counted.keys() == {"a"}


def test_a_site_with_data_of_its_own_may_have_any() -> None:
    made = run(federation({"a": {}, "b": {"data": "own"}}, change=other_data))
    assert made.hub.controller.state.counted.keys() == {"a", "b"}


def test_a_site_that_the_hub_does_not_know_is_refused_by_name() -> None:
    made = run(federation({"a": {}, "z": {}}))
    assert "knows no site named b; its federation.sites has a, z" in end_of(made, "b")


def test_a_standby_follows_and_contributes_nothing() -> None:
    made = run(federation({"a": {}, "b": {"role": "standby"}}))
    assert made.hub.controller.state.counted.keys() == {"a"}
    hub, site = made.hub.gateway, made.sites["b"].gateway
    assert hub is not None
    assert site is not None
    assert made.sites["b"].finished == made.sites["a"].finished


def test_a_site_trains_as_many_rounds_as_its_terms_say() -> None:
    made = run(federation({"a": {}, "b": {"every_rounds": 3}}))
    lease = made.hub.config.targets_per_slice
    assert made.hub.controller.state.counted == {"a": 3 * lease, "b": 9 * lease}


def test_no_site_weighs_more_than_its_share() -> None:
    """Six times the tokens, and half of the weight: the hub's step is then that of equal weights."""
    made = run(federation({"a": {}, "b": {"every_rounds": 6, "most_share": 0.5}}, rounds=1))
    norms = [r.contributions for r in made.hub.journal if isinstance(r, RoundMerged)]
    assert len(norms[0]) == 2
    assert made.hub.controller.state.counted == {"a": 32, "b": 192}
    gateways = [made.hub.gateway, *(site.gateway for site in made.sites.values())]
    assert all(gateway is not None for gateway in gateways)


def test_a_site_that_begins_anew_under_its_old_name_is_refused() -> None:
    made = federation({"a": {}, "b": {}}, rounds=8)
    site = made.sites["b"]

    def begin_anew() -> None:
        site.kill_gateway()
        for path in sorted(site.run_folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()

    made.world.at(14.0, begin_anew)
    run(made)
    assert "its run folder has 0: it is another folder" in end_of(made, "b")
    assert not [r for r in made.hub.journal if isinstance(r, WorkerBanned)]


def test_a_site_of_another_hub_is_refused_with_the_names_of_both() -> None:
    """The hub's run is begun again in another folder: for the sites it is another hub."""
    made = federation({"a": {}, "b": {}}, rounds=30)
    hub = made.hub

    def begin_another() -> None:
        hub.kill_gateway()
        (hub.run_folder / "hub").unlink()

    made.world.at(14.0, begin_another)
    made.run(2000.0)
    for name in "ab":
        assert "belongs to the hub run sim-" in end_of(made, name)
        assert "this hub runs sim-" in end_of(made, name)


def test_a_hub_and_its_sites_say_how_they_stand() -> None:
    made = federation({"a": {"most_share": 0.5}, "b": {"role": "standby"}}, rounds=4)
    seen: list[FederationStanding] = []

    def look() -> None:
        gateways = [made.hub.gateway, made.sites["a"].gateway]
        seen.extend(one.parts.run.federation() for one in gateways if one is not None and one.parts is not None)

    for second in (0.01, 12.0, 14.0):
        made.world.at(second, look)
    run(made)
    look()
    [hub] = [view for view in seen[-2:] if view.role == "hub"]
    assert (hub.version, hub.tokens_total) == (4, 128)
    assert [(one.terms.name, one.tokens, one.banned) for one in hub.sites] == [("a", 128, ""), ("b", 0, "")]
    [site] = [view for view in seen[-2:] if view.role == "site"]
    # Depending on the schedule, the site has begun another round when the hub ends.
    assert (site.hub, site.version, site.uncounted) == (hub.hub, 4, site.tokens_total - hub.tokens_total)
    joined = {r.worker: r.verified for r in made.hub.journal if isinstance(r, WorkerJoined)}
    assert joined == {"a": "part 1 of 2, at most 50% of the weight", "b": "part 2 of 2, standby"}


def test_a_hub_without_sites_is_told_what_to_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[train]\nrounds = 2\n")
    assert main(["federation-hub", "--gateway-config", str(config)]) == 2
    assert "federation.sites = [" in capsys.readouterr().err
    assert main(["gateway", "--gateway-config", str(config), "--site", "paris"]) == 2
    assert "--hub HOST:PORT" in capsys.readouterr().err


def test_facts_differ_where_training_would() -> None:
    training = small_training(rounds=1, workers=1)
    config, prepared = training.config, training.prepared
    facts, specs = facts_of(config, prepared), prepared.step.spec.params
    assert differences(facts, facts, specs, specs, same_data=True) == ""
    deeper = apply_overrides(config, ["model.options.n_layer=9"])
    other = facts_of(deeper, prepared)
    assert "compute different things" in differences(facts, other, specs, specs, same_data=True)
    longer = facts_of(apply_overrides(config, ["train.inner_steps=9"]), prepared)
    assert "train.inner_steps" in differences(facts, longer, specs, specs, same_data=True)
    assert differences(facts, longer, specs, specs, same_data=False) == ""


def test_sites_with_adapters_need_the_hubs_base() -> None:
    """What is not trained never travels, so a hub could not tell adapters of another base."""
    training = small_training(rounds=1, workers=1)
    config, specs = apply_overrides(training.config, ["adapter.rank=2"]), training.prepared.step.spec.params
    one, other = (
        facts_of(
            config,
            dataclasses.replace(
                training.prepared, record=msgspec.structs.replace(training.prepared.record, frozen={"w": digest})
            ),
        )
        for digest in ("0a", "0b")
    )
    assert differences(one, one, specs, specs, same_data=True) == ""
    assert "the tensors that are not trained, have the digests" in differences(one, other, specs, specs, same_data=True)


def test_parts_are_numbered_by_the_order_of_those_that_have_one() -> None:
    sites = (SiteEntry("a"), SiteEntry("b", data="own"), SiteEntry("c"))
    config = hub_config(Config(), sites, rounds=1)
    terms = terms_of(config)
    assert {name: (one.part, one.parts) for name, one in terms.items()} == {"a": (0, 2), "b": (0, 1), "c": (1, 2)}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (['federation.sites=[{name="a"}]', "federation.hub=h:1"], "leave one of the two out"),
        (['federation.sites=[{name="a"},{name="a"}]'], "names a twice"),
        (['federation.sites=[{name="a"},{name="b"}]', "federation.parts=1"], "expected at least 2"),
        (['federation.sites=[{name="a", role="king"}]'], "federation.sites"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        apply_overrides(Config(), overrides)


def test_a_hub_may_be_given_more_sites_and_not_another_cadence() -> None:
    one = apply_overrides(Config(), ['federation.sites=[{name="a"}]', "federation.parts=4"])
    more = apply_overrides(one, ['federation.sites=[{name="a"},{name="b"}]'])
    assert config_hash(one) == config_hash(more)
    assert config_hash(one) != config_hash(apply_overrides(one, ["federation.every_rounds=5"]))
    assert 'name = "a"' in to_toml(one)
