"""A run's length follows from what this machine needs for a step and a round."""

from __future__ import annotations

from pathlib import Path

import pytest

from planetary.core.config import config_hash, load_config
from planetary.fabric.preparation.budget import BUDGETS, Speed, fit

CONFIG = load_config(Path(__file__).parents[2] / "examples" / "stdlib.toml")


@pytest.mark.parametrize(
    ("step_ms", "round_ms", "rounds"),
    [(1000, 900, 18), (260, 500, 63), (185, 400, 90), (77, 350, 180), (20, 60, 360)],
)
def test_a_run_ends_within_five_minutes_on_slow_and_fast_machines(step_ms: int, round_ms: int, rounds: int) -> None:
    chosen = fit(CONFIG, Speed(step_ms / 1e3, round_ms / 1e3))
    assert chosen.config.train.rounds == rounds
    assert chosen.seconds <= 300


def test_noise_within_a_class_changes_nothing() -> None:
    assert {fit(CONFIG, Speed(0.26 * noise, 0.5)).budget.name for noise in (0.97, 1.0, 1.03)} == {"third"}


def test_the_warm_up_stays_the_same_part_of_the_run() -> None:
    assert fit(CONFIG, Speed(0.260, 0.5)).config.optimizer.warmup_steps == 70
    slowest = fit(CONFIG, Speed(100.0, 0.5))
    assert slowest.budget == BUDGETS[0]  # more than five minutes, but a run
    assert slowest.config.optimizer.warmup_steps < slowest.config.total_inner_steps


def test_a_fitted_configuration_is_fixed_and_the_same_mathematics() -> None:
    chosen = fit(CONFIG, Speed(0.260, 0.5)).config
    assert chosen.train.target_minutes == 0
    full = fit(CONFIG, Speed(0.077, 0.35)).config
    assert full.train.rounds == CONFIG.train.rounds
    assert config_hash(full) == config_hash(CONFIG)


def test_the_first_lines_say_what_was_measured_and_chosen() -> None:
    speed = Speed(0.260, 0.5)
    assert fit(CONFIG, speed).sentence(speed) == (
        "this machine: 260 ms a step; training 322,560 tokens in 63 rounds (budget third), about 5 min. --full "
        "trains the whole budget"
    )
