"""Runs of a real training step in which some workers lie, in simulated time; `bench/liars.py` is the long form."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, get_args

import pytest

import planetary
from planetary.simulation.lies import Lie

pytestmark = pytest.mark.slow  # XLA compiles the training step once

WORKERS, LIARS, ROUNDS = 7, (1, 4), 6
LIAR_NAMES = {f"node-{number}/0" for number in LIARS}
ALWAYS = 1e9  # seconds


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("liars") / "corpus.txt"
    modules = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    path.write_text("".join(module.read_text("utf-8") for module in modules))
    return path


@functools.cache
def run(corpus: Path, cache: Path, lie: Lie | None = None, workers: int = WORKERS, judge: str = "others") -> Any:
    tables = {
        "model": {"options": {"n_layer": 1, "n_head": 1, "n_embd": 16, "vocab_size": 256}},
        "data": {"source": str(corpus)},
        "train": {"rounds": ROUNDS, "inner_steps": 5, "batch_size": 2, "sequence_length": 32},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 5},
        "outer": {"judge": judge, "merge": "mean", "learning_rate": 0.7, "momentum": 0.9},
        "eval": {"every": 1, "batches": 4},
    }
    faults = [planetary.Fault(0.0, "lie", worker=w, seconds=ALWAYS, lie=lie) for w in LIARS if w < workers and lie]
    return planetary.simulate(tables, workers=workers, faults=faults, cache=cache)


def lost(done: planetary.Simulated) -> set[str]:
    return {event["worker"] for event in done.events if event["event"] == "worker_lost"}


@pytest.mark.parametrize("lie", get_args(Lie))
def test_two_liars_of_seven_change_little_at_no_honest_cost(corpus: Path, shared_cache: Path, lie: Lie) -> None:
    honest = run(corpus, shared_cache)
    assert lost(honest) == set()
    assert not [event for event in honest.events if event["event"] == "delta_withdrawn"]
    done = run(corpus, shared_cache, lie)
    assert done.outcome == "finished"
    assert lost(done) == LIAR_NAMES
    assert done.eval_losses[-1][1] < 1.05 * honest.eval_losses[-1][1]
    assert not [event for event in done.events if event["event"] == "rolled_back"]
    withdrawn = {event["worker"] for event in done.events if event["event"] == "delta_withdrawn"}
    assert withdrawn <= LIAR_NAMES


def test_unjudged_run_goes_back_from_ruin_by_liars(corpus: Path, shared_cache: Path) -> None:
    """The median of the cautious rounds outvotes them."""
    honest, done = run(corpus, shared_cache), run(corpus, shared_cache, "flipped_10", judge="none")
    back = [event for event in done.events if event["event"] == "rolled_back"]
    assert back
    assert "the held-out loss of round" in back[0]["reason"]
    assert done.outcome == "finished"
    assert lost(done) == set()
    assert done.eval_losses[-1][1] < 1.3 * honest.eval_losses[-1][1]


def test_a_permanent_liar_among_two_ends_the_run_with_the_reason(corpus: Path, shared_cache: Path) -> None:
    done = run(corpus, shared_cache, "flipped_10", workers=2)
    assert "though the run went back 3 times" in done.outcome
    assert "with fewer than 3 workers none can be identified" in done.outcome
