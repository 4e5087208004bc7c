from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
from run_story import ENDING, EVENTS, FACTS, METRICS, PARAMS, event, history, joined, lease, lost, metrics

from planetary.core.errors import UserError
from planetary.fleet.protocol.kind_reader import FORMAT
from planetary.monitor.folder_status import status_of
from planetary.monitor.picture import draw, tokens_at_losses, write_picture
from planetary.monitor.report import Loss, Spread, build_report, losses, recoveries, spread, write_report
from planetary.monitor.run_folder import (
    RunHistory,
    collect_facts,
    load_history,
    newest_of_each_round,
    read_facts,
    write_facts,
)
from planetary.monitor.screen import plain_lines
from planetary.runs.mixture.status import MixtureMetrics, MixtureReport, MixtureStatus, ShardMetrics
from planetary.runs.rounds.training_status import TrainingStatus


def write_folder(folder: Path, *, events: list[dict] = EVENTS + ENDING) -> Path:
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(m) + b"\n" for m in METRICS))
    write_facts(folder, FACTS)
    return folder


def test_examples_are_counted_as_such() -> None:
    pictures = history(events=[EVENTS[0] | {"counts": "examples"}, *EVENTS[1:], *ENDING])
    for run, counts, loss in ((pictures, "examples", "loss"), (history(), "tokens", "loss (nats per token)")):
        assert build_report(run).speed.counts == counts
        assert status_of(run).counts == counts
        axes = draw(run).axes[0]
        assert (axes.get_xlabel(), axes.get_ylabel()) == (f"{counts} trained on", loss)


# --- recovery
# ------------------------------------------------------------------------------------------------------


def test_a_lost_worker_is_timed_until_its_lease_trains_again() -> None:
    (one,) = recoveries(EVENTS)
    assert (one.worker, one.pid, one.lease, one.lost_at) == ("n/1", 2, 3, 118.0)
    assert (one.rejoined_s, one.reassigned_s, one.trained_again_s) == (1.0, 1.5, 2.0)


def test_what_faults_cost_is_counted_in_rounds_and_tokens() -> None:
    accepted = {"tokens": 100, "loss": 2.0, "seconds": 1.0}
    story = [
        lease(1.0, "lease_assigned", 1, "a", 1),
        lease(2.0, "delta_accepted", 1, "a", 1, **accepted),
        event(3.0, "round_finished", round=1, tokens_total=100),
        lease(4.0, "delta_accepted", 2, "a", 2, **accepted),
        event(5.0, "round_finished", round=2, tokens_total=200),
        lease(6.0, "delta_accepted", 3, "a", 3, **accepted),
        lost(7.0, "b") | {"silent_s": 0.25},
        lease(7.0, "lease_returned", 4, "b", 3, to="round", reason="lost", steps=3),
    ]
    assert losses(story, 5) == Loss(rounds=0, tokens=60)  # three of five steps
    withdrawn = [*story, lease(8.0, "delta_withdrawn", 3, "a", 3, reason="the worker that held it was lost")]
    assert losses(withdrawn, 5) == Loss(rounds=0, tokens=160)
    back = event(9.0, "rolled_back", mark={"round": 1, "tokens_total": 100}, reason="it was lost")
    assert losses([*story, back], 5) == Loss(rounds=1, tokens=60 + 100 + 100)
    resumed = event(9.0, "run_resumed", run="demo", rounds=3, mark={"round": 2, "tokens_total": 200})
    assert losses([*story, resumed], 5) == Loss(rounds=0, tokens=60 + 100)
    faults = build_report(history(events=[*EVENTS, *story[6:], back])).faults
    assert (faults.rounds_lost, faults.detected.count, faults.detected.max_s) == (1, 1, 0.25)


def test_another_worker_may_take_over_the_lease_in_a_later_round() -> None:
    (one,) = recoveries(
        [
            lease(1.0, "lease_assigned", 5, "a", 1),
            lost(2.0, "a"),
            lease(2.0, "lease_returned", 5, "a", 1, to="pool", reason="lost"),
            lease(9.0, "lease_assigned", 5, "b", 2),
            lease(9.5, "lease_started", 5, "b", 2),
        ]
    )
    assert (one.reassigned_s, one.trained_again_s, one.rejoined_s) == (7.0, 7.5, None)


def test_an_idle_worker_is_timed_until_it_is_back_only() -> None:
    (one,) = recoveries(
        [
            lease(1.0, "lease_assigned", 5, "a", 1),
            lease(2.0, "delta_accepted", 5, "a", 1),
            lost(3.0, "a"),
            lease(3.5, "lease_assigned", 6, "b", 2),
            joined(4.0, "a"),
        ]
    )
    assert (one.lease, one.reassigned_s, one.rejoined_s) == (None, None, 1.0)


def test_a_lease_lost_twice_counts_each_time_from_its_own_loss() -> None:
    first, second = recoveries(
        [
            lease(1.0, "lease_assigned", 5, "a", 1),
            lost(2.0, "a"),
            lease(3.0, "lease_assigned", 5, "b", 1),
            lost(4.0, "b"),  # before its first inner step
            lease(6.0, "lease_assigned", 5, "c", 1),
            lease(7.0, "lease_started", 5, "c", 1),
        ]
    )
    assert (first.reassigned_s, first.trained_again_s) == (1.0, None)
    assert (second.reassigned_s, second.trained_again_s) == (2.0, 3.0)


def test_the_pause_before_a_resume_is_not_measured() -> None:
    (one,) = recoveries(
        [
            lease(1.0, "lease_assigned", 5, "a", 1),
            lost(2.0, "a"),
            event(1000.0, "run_resumed", run="demo", rounds=3),
            lease(1001.0, "lease_assigned", 5, "a", 1),
        ]
    )
    assert one.reassigned_s is None


def test_spread_uses_the_nearest_rank() -> None:
    assert spread([]) == Spread(0, None, None, None)
    twenty = spread([float(i) for i in range(20, 0, -1)])
    assert (twenty.count, twenty.median_s, twenty.p95_s, twenty.max_s) == (20, 10.5, 19.0, 20.0)
    assert spread([3.0]).p95_s == 3.0


# --- report
# --------------------------------------------------------------------------------------------------------


def test_the_report_of_a_finished_run() -> None:
    report = build_report(history(baseline=[metrics(1, 3.0, 2.9, workers=1), metrics(3, 1.9, 1.96, workers=1)]))
    assert report.outcome == "finished"
    assert (report.quality.eval_loss, report.quality.eval_round, report.quality.train_loss) == (2.0, 3, 1.9)
    assert report.quality.below_bigram == pytest.approx(0.5)
    assert report.quality.gap_to_baseline == pytest.approx(2.0 / 1.96 - 1)
    assert (report.speed.tokens, report.speed.rounds, report.speed.seconds) == (600, 3, 34.0)
    assert report.speed.first_round_s == 13.0
    assert report.speed.tokens_per_s == pytest.approx(20.0)
    assert report.speed.compute_fraction == pytest.approx(0.9)
    assert report.traffic.dense_float32 == 8 * PARAMS
    assert report.traffic.per_round_and_worker == pytest.approx(8 * PARAMS + 40)
    assert report.traffic.ratio_to_dense == pytest.approx(1.005)
    assert (report.faults.workers_lost, report.faults.workers_joined, report.faults.leases_returned) == (
        1,
        3,
        1,
    )
    assert report.faults.trained_again.median_s == 2.0


def test_the_baseline_never_saw_more_tokens() -> None:
    report = build_report(history(metrics=METRICS[:2], baseline=[metrics(2, 2.0, 2.1), metrics(3, 1.0, 1.1)]))
    assert report.quality.baseline_eval_loss == 2.1


@pytest.mark.parametrize("last", [1, 2, 4])
def test_no_gap_is_claimed_at_other_tokens(last: int) -> None:
    """A run that went on, or a baseline that was interrupted: losses after other numbers of tokens do not compare."""
    quality = build_report(history(baseline=[metrics(last, 2.0, 3.0)])).quality  # the run has three rounds
    assert (quality.baseline_eval_loss, quality.gap_to_baseline) == (None, None)
    assert quality.baseline_tokens == 200 * last


def test_the_report_of_a_run_without_a_finished_round_or_facts() -> None:
    report = build_report(RunHistory(name="demo", events=EVENTS[:3], metrics=[]))
    assert report.outcome == "unfinished"
    assert report.quality.eval_loss is None
    assert report.speed.tokens == 0
    assert report.traffic.ratio_to_dense is None
    assert report.setup is None


def test_a_stopped_and_resumed_run_counts_its_sessions_only() -> None:
    stopped = [*EVENTS, event(124.0, "run_finished", round=2, ok=False, reason="interrupted")]
    assert build_report(history(events=stopped)).outcome == "stopped: interrupted"
    resumed = [
        *stopped,
        event(9000.0, "run_resumed", run="demo", rounds=3),
        event(9010.0, "round_finished", round=3),
    ]
    report = build_report(history(events=resumed))
    assert report.outcome == "unfinished"
    assert report.speed.seconds == 24.0 + 10.0
    assert report.faults.resumes == 1


def test_retrained_round_counts_once_after_a_resume() -> None:
    again = newest_of_each_round([metrics(1, 3.0), metrics(2, 2.0), metrics(3, 1.0), metrics(2, 2.5), metrics(3, 1.5)])
    assert [(m.round, m.loss) for m in again] == [(1, 3.0), (2, 2.5), (3, 1.5)]


def test_a_folder_goes_in_and_a_report_comes_out(tmp_path: Path) -> None:
    loaded = load_history(write_folder(tmp_path))
    assert loaded.metrics == METRICS
    written = json.loads(write_report(tmp_path, build_report(loaded)).read_text())
    assert written["quality"]["eval_loss"] == 2.0
    assert written["setup"]["config_hash"] == "ab"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_folder_that_is_no_run_names_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    write_folder(tmp_path / "good")
    with pytest.raises(UserError, match=r"no such folder; runs in .* are: good"):
        load_history(tmp_path / "goood")
    with pytest.raises(UserError, match=r"expected events\.jsonl"):
        load_history(tmp_path)


def test_facts_name_what_decides_the_numbers(tmp_path: Path) -> None:
    facts = collect_facts(run="r", params=1, inner_steps=2, config_hash="h", seed=0, bigram_loss=None)
    assert {"planetary", "python", "numpy"} <= set(facts.versions)
    assert facts.platform
    write_facts(tmp_path, facts)
    assert read_facts(tmp_path) == facts


# --- replay
# --------------------------------------------------------------------------------------------------------


def test_the_status_of_a_finished_run() -> None:
    shown = status_of(history())
    assert (shown.state, shown.round, shown.rounds, shown.rounds_finished) == ("finished", 3, 3, 3)
    assert shown.seconds_left is None
    assert [(w.name, w.state, w.lost_count) for w in shown.workers] == [
        ("n/0", "stopped", 0),
        ("n/1", "stopped", 1),
    ]
    assert (shown.started_at, shown.ended_at) == (100.0, 134.0)


def test_the_status_in_the_middle_of_a_round() -> None:
    cut = next(i for i, e in enumerate(EVENTS) if e["event"] == "worker_lost") + 1
    shown = status_of(history(events=EVENTS[:cut], metrics=METRICS[:1]))
    assert (shown.state, shown.round, shown.rounds_finished) == ("training", 2, 1)
    assert [w.state for w in shown.workers] == ["training", "lost"]
    assert shown.message == "worker n/1 lost: its process was killed by signal 9"
    assert shown.seconds_left == pytest.approx(20.0)
    assert shown.ended_at is None


@pytest.mark.parametrize("kind", ["moved", "drained", "restarted"])
def test_a_worker_that_left_in_good_order_is_not_lost(kind: str) -> None:
    asked = event(117.0, "worker_left", worker="n/0", pid=1, node="n", reason="the operator asked", kind=kind)
    cut = next(i for i, e in enumerate(EVENTS) if e["event"] == "worker_lost")
    before = history(events=[*EVENTS[:cut], asked], metrics=METRICS[:1])
    shown = status_of(before)
    assert [(w.state, w.lost_count) for w in shown.workers] == [(kind, 0), ("training", 0)]
    assert shown.message == f"worker n/0 was {kind}: the operator asked"
    report = build_report(before)
    assert (report.faults.workers_lost, report.faults.left_by_kind, report.faults.each) == (0, {kind: 1}, ())
    assert tokens_at_losses(before.events, METRICS[:1]) == []
    without = status_of(history(events=EVENTS[:cut], metrics=METRICS[:1]))
    assert plain_lines(without, shown)[0] == f"worker n/0 was {kind}"


def test_an_event_that_is_no_record_of_the_kind_is_refused() -> None:
    events = [*EVENTS, event(123.5, "comet_sighted", worker="n/0", tail=3)]
    with pytest.raises(UserError, match="Invalid value 'comet_sighted'"):
        status_of(history(events=events))


def test_events_that_cannot_follow_each_other_are_refused() -> None:
    """The folder's status is folded as a resume folds it, so a lost line is found by both."""
    lost_line = [one for one in EVENTS if one.get("lease") != 0 or one["event"] != "lease_assigned"]
    with pytest.raises(UserError, match="line 5: the record lease_assigned cannot follow"):
        status_of(history(events=lost_line))


@pytest.mark.parametrize(("written", "which"), [(None, "an older"), (FORMAT - 1, "an older"), (FORMAT + 1, "a newer")])
def test_a_folder_of_another_version_is_refused_in_a_sentence(tmp_path: Path, written: int | None, which: str) -> None:
    folder = write_folder(tmp_path)
    first, *others = (folder / "events.jsonl").read_text().splitlines()
    began = {key: value for key, value in {**json.loads(first), "format": written}.items() if value is not None}
    (folder / "events.jsonl").write_text("\n".join([json.dumps(began), *others]) + "\n")
    with pytest.raises(UserError, match=f"was written by {which} planetary .* begin another run"):
        load_history(folder)


def test_a_kind_of_run_that_is_not_installed_is_named() -> None:
    events = [{**EVENTS[0], "kind": "comet"}]
    with pytest.raises(UserError, match=r"the kind of run 'comet' is not known here; known are .*rounds"):
        status_of(history(events=events))


# --- picture
# -------------------------------------------------------------------------------------------------------


def test_losses_of_workers_are_placed_by_time_within_a_round() -> None:
    (x,) = tokens_at_losses(EVENTS, METRICS)
    assert x == pytest.approx(300.0)  # half-way through round 2, which went from 200 to 400 tokens


def test_the_picture_shows_every_curve(tmp_path: Path) -> None:
    whole = history(baseline=[metrics(1, 3.0, 2.9), metrics(2, 2.0, 2.1)])
    (axes,) = draw(whole).axes
    labels = axes.get_legend_handles_labels()[1]
    assert labels == [
        "training loss (mean of the round)",
        "one worker, no DiLoCo (held-out)",
        "held-out loss",
        "bigram model (2.500)",
        "a worker was lost",
    ]
    held_out = next(line for line in axes.get_lines() if line.get_label() == "held-out loss")
    assert list(held_out.get_xdata()) == [200, 400, 600]
    assert list(held_out.get_ydata()) == [3.0, 2.2, 2.0]
    path = write_picture(tmp_path, whole)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_rounds_still_has_a_picture() -> None:
    (axes,) = draw(RunHistory(name="demo", events=[], metrics=[])).axes
    assert [text.get_text() for text in axes.texts] == ["no round is finished yet"]
    assert all(math.isfinite(edge) for edge in axes.get_xlim())


def test_overlapping_rounds_in_the_journal() -> None:
    started = [event(t, "round_started", round=n, version=0, workers=2) for n, t in ((1, 3.0), (2, 13.0))]
    events = [EVENTS[0], *started]
    shown = status_of(history(events=events, metrics=[]))
    assert (shown.round, shown.reducing) == (2, 1)
    sizes = {"workers": 2, "tokens": 0, "tokens_total": 0, "durable": False}
    over = event(14.0, "round_finished", round=1, **sizes, loss=2.0, seconds=10.0, compute_fraction=0.9)
    assert status_of(history(events=[*events, over], metrics=[])).reducing == 0
    back = event(14.0, "rolled_back", mark={"round": 0, "tokens_total": 0, "next_task": 1, "ledger": {}}, reason="gone")
    assert status_of(history(events=[*events, back], metrics=[])).reducing == 0


def test_mixture_report_has_rates_and_composers_last_words() -> None:
    def shard(mixed: float | None) -> ShardMetrics:
        seen = {"mixed_loss": mixed, "surrogate_loss": mixed}
        return ShardMetrics(loss=2.0, surrogate_error=0.1, surrogate_step=5, surrogate_age=1.0, **seen)

    def of_round(mixed: float | None, overlap: float | None) -> MixtureMetrics:
        counts = {"refused": {"stale": 1}, "refused_sketches": {"stale": 2}, "merges": {"router": 2}}
        agreed = {"routing_overlap": overlap, "routing_divergence": overlap}
        return MixtureMetrics(
            shards=(shard(mixed), shard(mixed)),
            updates={"accepted": 30, "stale": 5},
            seconds=10.0,
            merge_s={"router": 0.1},
            **counts,
            **agreed,
        )

    rounds = [of_round(1.5, 0.75), of_round(None, None)]
    lines = tuple(msgspec.structs.replace(metrics(n, 2.0), own=one) for n, one in enumerate(rounds, 1))
    began = [{**EVENTS[0], "kind": "mixture"}, *EVENTS[1:3]]
    found = build_report(history(events=began, metrics=lines)).own
    assert isinstance(found, MixtureReport)
    ended = status_of(history(events=began, metrics=lines))  # which the page of a run that has ended shows
    newest = msgspec.structs.replace(rounds[0], routing_overlap=0.75, routing_divergence=0.75)
    assert isinstance(ended, MixtureStatus)
    assert (ended.kind, ended.newest, ended.rounds) == ("mixture", newest, 3)
    assert type(status_of(history())) is TrainingStatus
    assert found.updates_per_s == {"accepted": 3.0, "stale": 0.5}
    assert found.refused_sketches == {"stale": 4}
    assert found.mixed_losses == found.surrogate_losses == (1.5, 1.5)
    assert found.routing_overlap == found.routing_divergence == 0.75
