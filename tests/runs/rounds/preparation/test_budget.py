"""A run's length follows from what this machine needs for a step and a round."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from planetary.core.config import load_config
from planetary.core.configuration.identity import config_hash
from planetary.runs.rounds.preparation.budget import BUDGETS, KeptSpeed, MachineSpeed, fit, smaller, why_smaller

CONFIG = load_config(Path(__file__).parents[4] / "examples" / "stdlib.toml")


@pytest.mark.parametrize(
    ("step_ms", "round_ms", "rounds"),
    [(280, 300, 18), (75, 150, 63), (55, 120, 90), (26, 60, 180), (8, 20, 360)],
)
def test_run_ends_within_five_minutes_on_any_machine(step_ms: int, round_ms: int, rounds: int) -> None:
    chosen = fit(CONFIG, MachineSpeed(step_ms / 1e3, round_ms / 1e3))
    assert chosen.config.train.rounds == rounds
    assert chosen.seconds <= 300


def test_noise_within_a_class_changes_nothing() -> None:
    assert {fit(CONFIG, MachineSpeed(0.075 * noise, 0.15)).budget.name for noise in (0.97, 1.0, 1.03)} == {"third"}


def test_the_warm_up_stays_the_same_part_of_the_run() -> None:
    assert fit(CONFIG, MachineSpeed(0.075, 0.15)).config.optimizer.warmup_steps == 70
    slowest = fit(CONFIG, MachineSpeed(100.0, 0.5))
    assert slowest.budget == BUDGETS[0]  # more than five minutes, but a run
    assert slowest.config.optimizer.warmup_steps < slowest.config.total_inner_steps


def test_fitted_configuration_is_fixed_with_equal_mathematics() -> None:
    chosen = fit(CONFIG, MachineSpeed(0.075, 0.15)).config
    assert chosen.train.target_minutes == 0
    full = fit(CONFIG, MachineSpeed(0.026, 0.06)).config
    assert full.train.rounds == CONFIG.train.rounds
    assert config_hash(full) == config_hash(CONFIG)


def test_the_first_lines_say_what_was_measured_and_chosen() -> None:
    speed = MachineSpeed(0.075, 0.15)
    assert fit(CONFIG, speed).sentence(speed, 63) == (
        "this machine: 75 ms a step; training 1,161,216 tokens in 63 rounds (budget third), about 4 min. --full "
        "trains the whole budget"
    )


def test_what_compiles_slowly_trains_shorter() -> None:
    assert fit(CONFIG, MachineSpeed(0.075, 0.15, made_s=20)).budget == fit(CONFIG, MachineSpeed(0.075, 0.15)).budget
    slow = fit(CONFIG, MachineSpeed(0.075, 0.15, made_s=60))
    assert slow.budget.share < fit(CONFIG, MachineSpeed(0.075, 0.15)).budget.share
    assert slow.seconds <= 300


def test_too_slow_machine_trains_the_smaller_model() -> None:
    """A machine on which the fewest rounds take too long trains the smaller model."""
    assert smaller(CONFIG, MachineSpeed(0.28, 0.3)) is None
    slow = MachineSpeed(0.8, 0.7, made_s=60)
    config = smaller(CONFIG, slow)
    assert config is not None
    assert config.model.options["n_embd"] == 64
    assert config.model.options["vocab_size"] == 256
    chosen = fit(config, MachineSpeed(0.1, 0.1, made_s=25), spent_s=slow.made_s)
    assert chosen.seconds <= 300
    assert not chosen.config.model.smaller
    assert config_hash(chosen.config) != config_hash(CONFIG)
    told = why_smaller(CONFIG, slow)
    assert told.startswith("this machine: 800 ms a step, with which the shortest run takes 12 min instead of 5")
    assert "n_embd = 64" in told


def test_a_configuration_without_a_smaller_model_keeps_its_own() -> None:
    only = msgspec.structs.replace(CONFIG, model=msgspec.structs.replace(CONFIG.model, smaller={}))
    assert smaller(only, MachineSpeed(100.0, 0.5)) is None


def test_disturbed_timing_is_repeated_and_the_faster_stays() -> None:
    """A disturbed timing is repeated until one is undisturbed and the faster stays."""
    disturbed = KeptSpeed(MachineSpeed(0.4, 0.9, made_s=25), busy=0.45)
    quiet = KeptSpeed(MachineSpeed(0.2, 0.5, made_s=0.0), busy=0.98)
    assert not disturbed.is_settled
    assert quiet.is_settled
    kept = disturbed.beside(quiet)
    assert kept == KeptSpeed(MachineSpeed(0.2, 0.5, made_s=25), busy=0.98)  # the compilation was timed the first time
    worse = disturbed.beside(KeptSpeed(MachineSpeed(0.6, 1.2), busy=0.3))
    assert worse == disturbed
    assert not worse.is_settled


def test_a_step_that_never_keeps_its_threads_busy_is_timed_twice() -> None:
    idle = KeptSpeed(MachineSpeed(0.2, 0.5), busy=0.6)
    assert not idle.is_settled
    assert idle.beside(KeptSpeed(MachineSpeed(0.206, 0.5), busy=0.6)).is_settled


def test_timings_under_equal_load_agree_without_settling() -> None:
    loaded = KeptSpeed(MachineSpeed(0.4, 0.9), busy=0.25)
    assert not loaded.beside(loaded).is_settled
