"""The baseline of a run is plain training, however the run synchronises."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from planetary.core.config import config_from_tables, load_config
from planetary.core.configuration.presets import PRESETS
from planetary.run import baseline

EXAMPLE = Path(__file__).parents[2] / "examples" / "stdlib.toml"


@pytest.mark.parametrize("preset", [*PRESETS, "adam"])
def test_the_baseline_is_plain_training_on_the_same_tokens(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ["outer.optimizer=adam", "outer.learning_rate=0.03"] if preset == "adam" else PRESETS[preset].overrides(2)
    plain = [] if preset != "adam" else PRESETS["rda"].overrides(2)
    config = load_config(EXAMPLE, [*plain, *chosen])
    metrics = [SimpleNamespace(tokens_total=7 * config.targets_per_slice)]
    monkeypatch.setattr(baseline, "load_history", lambda folder: SimpleNamespace(metrics=metrics))
    found = baseline.baseline_of(config, tmp_path)
    assert found is not None
    alone, place = found
    assert place == tmp_path / "baseline"
    assert (alone.train.rounds, alone.fabric.workers, alone.fabric.quorum) == (7, 1, 1)
    assert alone.sync == config_from_tables({}).sync
    outer = alone.outer
    assert (outer.optimizer, outer.learning_rate, outer.momentum, outer.merge) == ("nesterov", 1.0, 0.0, "mean")
    place.mkdir()
    (place / "metrics.jsonl").touch()
    for tokens, is_done in ((7, True), (6, False)):
        lines = [SimpleNamespace(tokens_total=tokens * config.targets_per_slice)]
        monkeypatch.setattr(baseline, "read_metrics", lambda folder, lines=lines: lines)
        assert (baseline.baseline_of(config, tmp_path) is None) is is_done
        assert place.exists() is is_done, "a baseline of fewer tokens is trained anew"
