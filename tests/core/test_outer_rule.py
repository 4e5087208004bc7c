"""The outer step of a configuration that names none."""

from __future__ import annotations

import pytest

from planetary.core.config import Config, apply_overrides, config_from_tables, config_hash
from planetary.core.configuration.outer_rule import why_chosen
from planetary.core.errors import UserError


def rule(config: Config) -> tuple[float, float, str]:
    return config.outer.learning_rate, config.outer.momentum, config.outer.merge


def test_a_short_run_averages_radially_and_a_long_one_takes_nesterovs_step() -> None:
    assert rule(config_from_tables({"train": {"rounds": 999}})) == (1.0, 0.0, "rda")
    assert rule(config_from_tables({"train": {"rounds": 1000}})) == (0.7, 0.9, "mean")
    assert rule(config_from_tables({}, ["train.rounds=5000"])) == (0.7, 0.9, "mean")


@pytest.mark.parametrize("key", ["outer.learning_rate=0.7", "outer.momentum=0.9", "outer.merge=mean"])
def test_any_key_of_the_rule_fixes_it(key: str) -> None:
    assert rule(config_from_tables({}, [key])) == (0.7, 0.9, "mean")


def test_other_keys_of_the_section_do_not() -> None:
    assert rule(config_from_tables({"outer": {"judge": "none"}})) == (1.0, 0.0, "rda")


def test_a_run_that_is_lengthened_keeps_its_rule() -> None:
    short = config_from_tables({"train": {"rounds": 100}})
    longer = apply_overrides(short, ["train.rounds=4000"])
    assert rule(longer) == rule(short)
    assert config_hash(longer) == config_hash(short)


def test_a_ring_that_sums_end_parameters_or_overlaps_has_the_mean() -> None:
    assert rule(config_from_tables({"sync": {"topology": "ring", "precision": "f64"}})) == (0.7, 0.9, "mean")
    assert rule(config_from_tables({"sync": {"topology": "ring", "overlap": "async"}})) == (0.7, 0.9, "mean")
    assert rule(config_from_tables({"sync": {"topology": "ring"}})) == (1.0, 0.0, "rda")
    with pytest.raises(UserError, match="directions are not known"):
        config_from_tables({"sync": {"topology": "ring", "precision": "f64"}, "outer": {"merge": "rda"}})


def test_the_reason_is_told_only_of_the_rule_that_is_chosen() -> None:
    short = config_from_tables({"train": {"rounds": 100}})
    assert "fewer than 1,000 outer steps (this one has 100)" in why_chosen(short.outer, 100)
    assert why_chosen(config_from_tables({"outer": {"momentum": 0.9}}).outer, 100) == ""
