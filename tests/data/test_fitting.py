"""A run on little data becomes a smaller run, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from planetary.core.config import apply_overrides
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.data.fitting import changes, fit_to_data, length_of
from planetary.data.prepare import prepare
from planetary.data.prepared_data import PreparedData
from planetary.data.run_length import RunLength
from planetary.runs.mixture.preparation import STEP_LEASES

SMALL = ["train.inner_steps=2", "train.batch_size=2", "train.sequence_length=7", "eval.batches=1"]


def given(folder: Path, nbytes: int, *overrides: str, name: str = "t.txt") -> tuple[Config, PreparedData]:
    (folder / name).write_bytes((b"%06d," * (nbytes // 7 + 1) % tuple(range(nbytes // 7 + 1)))[:nbytes])
    config = apply_overrides(Config(), [f"data.source={folder / name}", *SMALL, *overrides])
    return config, prepare(config, folder / "cache")


def test_a_run_that_fits_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, data = given(tmp_path, 7000, "optimizer.warmup_steps=3")
    assert fit_to_data(config, data) == config
    assert changes(config, config) == ""
    assert not caplog.text


def test_eval_batches_shrink_to_what_is_held_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, data = given(tmp_path, 7000, "eval.batches=23")
    assert fit_to_data(config, data).eval.batches == 22
    assert "eval.batches: 22 instead of 23, because the held-out data has 352 tokens" in caplog.text


def test_inner_steps_shrink_to_the_training_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, data = given(tmp_path, 200, "train.inner_steps=50", "train.rounds=4", "optimizer.warmup_steps=60")
    fitting = fit_to_data(config, data)
    assert fitting.train.inner_steps == data.train.count // 16 == 11
    assert fitting.optimizer.warmup_steps == 44 // 5
    assert "train.inner_steps: 11 instead of 50, because the training data has 184 tokens" in caplog.text
    assert "optimizer.warmup_steps: 8 instead of 60, because the run has only 44 inner steps" in caplog.text
    said = "fitted to the data: train.inner_steps is 11 instead of 50, optimizer.warmup_steps is 8 instead of 60"
    assert changes(config, fitting) == said
    data.order(fitting)
    assert fitting.eval.batches == 1


def test_a_tiny_text_holds_out_one_batch(tmp_path: Path) -> None:
    """A share of 5 % of 25 blocks is one sequence, and a batch of four could not be measured on it."""
    config, data = given(tmp_path, 200, "train.batch_size=4")
    assert data.held_out.count == 4 * 8
    assert fit_to_data(config, data).eval.batches == 1


def test_documents_too_few_to_be_held_out_whole_lose_their_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "one.jsonl").write_text('{"text": "%s"}\n' % ("one long document, " * 40))
    config = apply_overrides(Config(), [f"data.source={tmp_path / 'one.jsonl'}", *SMALL])
    data = prepare(config, tmp_path / "cache")
    assert data.held_out.count // 16 >= 1
    assert "too few to hold 0.05 of them out whole" in caplog.text


def test_less_than_one_batch_is_an_error_with_the_numbers(tmp_path: Path) -> None:
    config, data = given(tmp_path, 40, "train.batch_size=4")
    with pytest.raises(UserError, match=r"the training data has 24 tokens, and one batch .* takes 32: give more data"):
        fit_to_data(config, data)


def test_epochs_bound_the_leases_and_not_the_rounds(tmp_path: Path) -> None:
    """How many rounds that are depends on who comes; the schedule is as long as the expected workers need."""
    config, data = given(tmp_path, 7000, "data.max_epochs=3", "train.rounds=999", "fabric.workers=2")
    fitting = fit_to_data(config, data)
    assert fitting.train.rounds == 999
    length = length_of(fitting, data.train.count)
    assert length.leases == 3 * data.order(config).per_epoch == 621
    assert (length.expected_rounds, length.schedule_steps) == (311, 621)
    assert length.why_shorter() == (
        "data.max_epochs ends the run after 621 leases of data, about 311 rounds of 2 workers; train.rounds = 999 "
        "would take more"
    )
    free = length_of(apply_overrides(config, ["data.max_epochs=0"]), data.train.count)
    assert (free.leases, free.expected_rounds, free.schedule_steps, free.why_shorter()) == (0, 999, 1998, "")


def test_an_epoch_of_fewer_leases_than_workers_is_one_round(tmp_path: Path) -> None:
    config, data = given(tmp_path, 200, "data.max_epochs=1", "fabric.workers=8")
    length = length_of(fit_to_data(config, data), data.train.count)
    assert (length.leases, length.expected_rounds) == (5, 1)


def test_the_warm_up_fits_into_the_epochs(tmp_path: Path) -> None:
    config, data = given(tmp_path, 200, "data.max_epochs=2", "train.rounds=999", "optimizer.warmup_steps=50")
    assert fit_to_data(config, data).optimizer.warmup_steps == length_of(config, data.train.count).schedule_steps // 5


def test_the_schedule_goes_by_the_data_where_that_ends_the_run() -> None:
    length = RunLength(rounds=999, leases=21, inner_steps=3, workers=2)
    assert length.schedule_steps == 32
    assert [length.first_step(round_, 2 * (round_ - 1)) for round_ in range(1, 12)] == list(range(0, 33, 3))
    alone = [length.first_step(round_, round_ - 1) for round_ in range(1, 22)]
    assert alone[:4] == [0, 1, 3, 4]
    assert alone[-1] == 30
    endless = RunLength(rounds=7, inner_steps=3, workers=2)
    assert [endless.first_step(round_, 99) for round_ in range(1, 8)] == list(range(0, 21, 3))


def test_a_mixtures_epochs_count_steps_of_all_composers(tmp_path: Path) -> None:
    config, data = given(tmp_path, 7000, "data.max_epochs=2", "train.rounds=999", "moe.composers=3")
    fitting = fit_to_data(config, data, STEP_LEASES)
    assert fitting.train.rounds == 2 * (data.train.count // 48) // 2
    with pytest.raises(UserError, match=r"max_epochs = 2 allows .* a round of 3 takes .*: not one round is possible"):
        fit_to_data(apply_overrides(config, ["train.inner_steps=999"]), data, STEP_LEASES)


def test_a_mixtures_round_may_be_longer_than_an_epoch(tmp_path: Path) -> None:
    config, data = given(tmp_path, 200, "train.inner_steps=50", "moe.composers=3")
    assert fit_to_data(config, data, STEP_LEASES).train.inner_steps == 50
