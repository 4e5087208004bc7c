"""The outer step of a configuration that names none."""

from __future__ import annotations

import tomllib

import pytest

from planetary.core.config import apply_overrides, config_from_tables
from planetary.core.configuration.derived import why_chosen
from planetary.core.configuration.identity import config_hash
from planetary.core.configuration.schema import Config
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import UserError


def rule(config: Config) -> tuple[float, float, str]:
    return config.outer.learning_rate, config.outer.momentum, config.outer.merge


def test_short_run_averages_radially_and_long_takes_nesterov() -> None:
    assert rule(config_from_tables({"train": {"rounds": 999}})) == (1.0, 0.0, "rda")
    assert rule(config_from_tables({"train": {"rounds": 1000}})) == (0.7, 0.9, "mean")
    assert rule(config_from_tables({}, ["train.rounds=5000"])) == (0.7, 0.9, "mean")


@pytest.mark.parametrize("key", ["outer.learning_rate=0.7", "outer.momentum=0.9", "outer.merge=mean"])
def test_any_key_of_the_rule_fixes_it(key: str) -> None:
    assert rule(config_from_tables({}, [key])) == (0.7, 0.9, "mean")


def test_other_keys_of_the_section_do_not() -> None:
    assert rule(config_from_tables({"outer": {"judge": "none"}})) == (1.0, 0.0, "rda")


def test_adam_has_a_rate_of_its_own_unless_one_is_given() -> None:
    adam = config_from_tables({"outer": {"optimizer": "adam"}})
    assert rule(adam) == (0.03, 0.0, "mean")
    assert rule(config_from_tables({"outer": {"optimizer": "adam", "learning_rate": 0.02}})) == (0.02, 0.0, "mean")
    assert rule(config_from_tables({"outer": {"optimizer": "adam", "momentum": 0.5}})) == (0.03, 0.5, "mean")
    assert rule(config_from_tables({"outer": {"optimizer": "adam"}}, ["train.rounds=5000"])) == (0.03, 0.9, "mean")
    assert rule(config_from_tables(tomllib.loads(to_toml(adam)))) == rule(adam)
    assert why_chosen(adam.outer, 100) == ""
    assert config_hash(adam) != config_hash(apply_overrides(adam, ["outer.momentum=0.9"]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["outer.beta2=0.9"], "the key outer.beta2 was removed: Adam's is 0.99"),
        (["outer.epsilon=0.1"], "the key outer.epsilon was removed: Adam's is 0.01"),
        (
            ["outer.optimizer=adam", "outer.learning_rate=0.7"],
            'outer.learning_rate: expected at most 0.5 with outer.optimizer = "adam", found 0.7',
        ),
        (["outer.optimizer=adamw"], "unknown outer optimizer 'adamw'; did you mean adam?"),
        (
            ["outer.optimizer=adam", "sync.overlap=eager", "sync.compression=float32"],
            'outer.optimizer: expected "nesterov" with sync.overlap = "eager", found "adam"',
        ),
        (
            ["outer.optimizer=adam", "sync.compression=sign", "sync.broadcast_compression=relay"],
            "newcomers would not have the moments",
        ),
    ],
)
def test_settings_outside_an_outer_optimizer_are_refused(given: list[str], words: str) -> None:
    with pytest.raises(UserError) as refused:
        config_from_tables({}, given)
    assert words in str(refused.value)


def test_a_run_that_is_lengthened_keeps_its_rule() -> None:
    short = config_from_tables({"train": {"rounds": 100}})
    longer = apply_overrides(short, ["train.rounds=4000"])
    assert rule(longer) == rule(short)
    assert config_hash(longer) == config_hash(short)


def test_ring_of_end_parameters_or_overlap_has_the_mean() -> None:
    assert rule(config_from_tables({"sync": {"topology": "ring", "precision": "f64"}})) == (0.7, 0.9, "mean")
    assert rule(config_from_tables({"sync": {"topology": "ring", "overlap": "async"}})) == (0.7, 0.9, "mean")
    assert rule(config_from_tables({"sync": {"topology": "ring"}})) == (1.0, 0.0, "rda")
    with pytest.raises(UserError, match="directions are not known"):
        config_from_tables({"sync": {"topology": "ring", "precision": "f64"}, "outer": {"merge": "rda"}})


def test_the_reason_is_told_only_of_the_rule_that_is_chosen() -> None:
    short = config_from_tables({"train": {"rounds": 100}})
    assert "fewer than 1,000 outer steps (this one has 100)" in why_chosen(short.outer, 100)
    assert why_chosen(config_from_tables({"outer": {"momentum": 0.9}}).outer, 100) == ""
