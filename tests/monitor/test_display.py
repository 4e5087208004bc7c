from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console
from run_story import metrics, status

from planetary.monitor import human_numbers as human
from planetary.monitor.display import fraction_done, render, workers_shown
from planetary.monitor.screen import LiveScreen, PlainScreen, open_screen, plain_lines
from planetary.monitor.sinks.scalars import scalars_of
from planetary.monitor.status_text import status_text
from planetary.runs.rl.status import PolicyMetrics
from planetary.runs.rounds.metrics import Figure, KindMetrics, figures_of
from planetary.runs.rounds.training_status import TrainerStatus, TrainingStatus

AT_80_COLUMNS = """\
╭─ planetary · demo ───────────────────────────────────────────────────────────╮
│ round 7 of 12     ━━━━━━━━━━━━━━━━━━━━━╸                     55 %  1:12 left │
│                                                                              │
│ train loss  2.4400 █▄▂▁▁▁                     tokens   369k · 12.3k tok/s    │
│ eval loss   2.4500 █▄▁                        traffic  ↑ 157 MB ↓ 184 MB     │
│                                                                              │
│ worker            state         round       step     loss  lost  device      │
│ laptop/0          ● training        7      18/30   2.4312     0  cpu host    │
│ laptop/1          ● lost            7          -        -     2  cpu host    │
│                                                                              │
│ laptop/1 was lost: its process was killed by signal 9                        │
╰─────────────────────────────────────────────────────────────────── training ─╯
"""


def drawn(shown: TrainingStatus, now: float = 1065.0, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, legacy_windows=False)
    console.print(render(shown, now, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_panel_at_80_columns() -> None:
    assert drawn(status()) == AT_80_COLUMNS


REWARDED = """\
│ train loss       2.4400 █▄▂▁▁▁                tokens   369k · 12.3k tok/s    │
│ eval loss        2.4500 █▄▁                   traffic  ↑ 157 MB ↓ 184 MB     │
│ sampled reward    0.625 ▁▆█                                                  │
│ held-out reward   0.400 ▁                                                    │
│ greedy reward     0.500 ▁                                                    │
│ staleness         0.750 ▁█                                                   │
"""


def rewarded() -> TrainingStatus:
    """Three rounds of reinforcement learning, of which the last was evaluated, after one of imitation."""
    groups: list[dict[int, int]] = [{}, {0: 4}, {0: 1, 1: 3}]
    policies = [PolicyMetrics(imitates=True), *(PolicyMetrics(reward=0.25 * n, staleness=groups[n]) for n in (1, 2))]
    policies.append(PolicyMetrics(reward=0.625, held_out_reward=0.5, held_out_sampled=0.4))
    lines = [msgspec.structs.replace(metrics(n, 2.0), own=policy) for n, policy in enumerate(policies, 3)]
    return status(figures=figures_of(reversed(lines)))


def test_the_panel_has_a_row_for_every_figure_of_the_kind_of_run() -> None:
    assert REWARDED in drawn(rewarded())
    assert max(len(line) for line in drawn(rewarded(), width=60).splitlines()) <= 60


def test_figures_are_the_metrics_of_the_kind_of_run() -> None:
    class ToyMetrics(KindMetrics, frozen=True, tag="toy"):
        rounds: int = 0

        @property
        def figures(self) -> dict[str, float | None]:
            return {"toys": None if self.rounds == 2 else 2.0 * self.rounds, "games": None}

    lines = [msgspec.structs.replace(metrics(n, 3.0), own=ToyMetrics(rounds=n)) for n in (1, 2, 3)]
    assert figures_of(lines) == (Figure("toys", ((1, 2.0), (3, 6.0))),)
    assert scalars_of(lines[2])["toys"] == 6.0
    assert figures_of([metrics(1, 3.0)]) == ()


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("state", ["preparing", "waiting", "training", "finishing", "finished", "failed", "stopped"])
def test_no_line_exceeds_the_terminal_and_the_state_is_named(width: int, state: str) -> None:
    shown = status(state=state, stage="waiting for at least 2 workers to connect")
    lines = drawn(shown, width=width).splitlines()
    assert max(len(line) for line in lines) <= min(width, 100)
    assert state in lines[-1]


def test_preparing_shows_the_stage_and_the_time_spent() -> None:
    shown = TrainingStatus(run="demo", state="preparing", stage="compiling the step for cpu/host", started_at=1060.0)
    text = drawn(shown)
    assert "compiling the step for cpu/host" in text
    assert "5.0 s so far" in text


def test_overlapping_rounds_are_both_named() -> None:
    workers = tuple(msgspec.structs.replace(w, round=8) for w in status().workers)
    shown = status(round=8, reducing=7, workers=workers)
    assert "round 8 of 12, 7 is being reduced" in drawn(shown)
    assert fraction_done(shown) == pytest.approx(fraction_done(status()) + 1 / 12)


def test_a_run_that_ended_shows_how_long_it_took() -> None:
    assert "took 4:25" in drawn(status(state="finished", ended_at=1265.0), now=9999.0)


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    worker = TrainerStatus(name="[red]n[/]", node="n", pid=1, state="ready")
    text = drawn(status(run="[bold]r[/]", workers=(worker,), message="[/] oops"))
    for name in ("[bold]r[/]", "[red]n[/]", "[/] oops"):
        assert name in text


def test_too_many_workers_show_the_lost_ones_first() -> None:
    workers = tuple(
        TrainerStatus(name=f"n/{i:02}", node="n", pid=i, state="lost" if i == 29 else "ready") for i in range(30)
    )
    shown, hidden = workers_shown(workers, 12)
    assert (len(shown), hidden) == (12, 18)
    assert shown[0].name == "n/29"
    assert "and 18 more workers" in drawn(status(workers=workers))


def test_progress_counts_the_open_round_once() -> None:
    assert fraction_done(status()) == pytest.approx((6 + 18 / 30) / 12)
    assert fraction_done(status(rounds_finished=7)) == pytest.approx(7 / 12)  # the workers still report round 7
    assert fraction_done(status(state="finished", rounds_finished=12)) == 1.0
    assert fraction_done(status(rounds=0)) == 0.0


def test_a_status_survives_json() -> None:
    shown = status()
    assert msgspec.json.decode(msgspec.json.encode(shown), type=TrainingStatus) == shown


# --- plain lines
# ---------------------------------------------------------------------------------------------------


def test_plain_lines_tell_each_thing_once() -> None:
    before = status()
    assert plain_lines(before, before) == []
    after = status(loss=(*before.loss, (7, 2.4)), eval_loss=(*before.eval_loss, (7, 2.41)), rounds_finished=7)
    assert plain_lines(before, after) == [
        "round 7/12: train loss 2.4000, eval loss 2.4100, 369k tokens, 12.3k tokens/s, up 157 MB, "
        "down 184 MB, 1:12 left"
    ]


def test_plain_lines_tell_the_figures_of_a_round() -> None:
    after = rewarded()
    before = msgspec.structs.replace(after, loss=after.loss[:-1])
    told = "round 6/12: train loss 2.4400, eval loss 2.4500, sampled reward 0.625, held-out reward 0.400, greedy reward"
    assert plain_lines(before, after)[0].startswith(told)
    assert ", sampled reward 0.625, held-out reward 0.400, greedy reward 0.500, staleness 0.750\n" in status_text(
        after, 1065.0
    )


def test_plain_lines_tell_a_late_held_out_loss() -> None:
    after = status(eval_loss=(*status().eval_loss, (5, 2.6)))
    assert plain_lines(status(), after) == ["round 5/12: eval loss 2.6000"]


def test_plain_lines_tell_lost_and_returned_workers() -> None:
    first, second = status().workers
    gone = msgspec.structs.replace(first, state="lost", lost_count=1)
    back = msgspec.structs.replace(first, pid=33, state="ready", lost_count=1)
    assert plain_lines(status(), status(workers=(gone, second))) == ["worker laptop/0 was lost (pid 3)"]
    assert plain_lines(status(workers=(gone, second)), status(workers=(back, second))) == [
        "worker laptop/0 is ready (pid 33, cpu host)"
    ]


def test_a_restart_between_two_looks_is_told_whole() -> None:
    first, second = status().workers
    back = msgspec.structs.replace(first, pid=33, lost_count=1)
    assert plain_lines(status(), status(workers=(back, second))) == [
        "worker laptop/0 was lost (pid 3)",
        "worker laptop/0 is ready (pid 33, cpu host)",
    ]


def test_plain_lines_pass_over_the_moment_between_two_rounds() -> None:
    between = status(state="waiting", stage="waiting for workers")
    assert plain_lines(status(), between) == []
    nobody = status(state="waiting", stage="waiting for workers", workers=status().workers[1:])
    assert plain_lines(status(), nobody) == ["waiting: waiting for workers"]
    told = msgspec.structs.replace(nobody, message=nobody.stage)  # the newest event says the same: once is enough
    assert plain_lines(status(), told) == ["waiting: waiting for workers"]


def test_plain_lines_tell_how_long_a_stage_took() -> None:
    exporting = TrainingStatus(run="demo", state="preparing", stage="exporting", stage_since=100.0)
    compiling = TrainingStatus(run="demo", state="waiting", stage="compiling for cpu:host", stage_since=103.6)
    training = TrainingStatus(run="demo", state="training", stage_since=115.6)
    assert plain_lines(exporting, compiling)[-2:] == ["exporting: took 3.6 s", "waiting: compiling for cpu:host"]
    assert "compiling for cpu:host: took 12 s" in plain_lines(compiling, training)
    quick = TrainingStatus(run="demo", state="waiting", stage="compiling for cpu:host", stage_since=100.4)
    assert not [line for line in plain_lines(exporting, quick) if "took" in line]


def test_the_display_counts_the_seconds_of_a_stage() -> None:
    shown = TrainingStatus(run="demo", state="preparing", stage="exporting", stage_since=1060.0, started_at=1050.0)
    assert "exporting, 12 s" in drawn(shown, now=1072.0)


def test_the_end_is_told_once_and_without_an_old_stage() -> None:
    ended = status(state="finished", stage="waiting for workers")
    assert plain_lines(status(), ended) == ["finished"]
    assert plain_lines(ended, status(state="finished")) == []


def test_plain_lines_are_ascii() -> None:
    lines = plain_lines(None, status(state="preparing", stage="compiling"))
    assert "\n".join(lines).isascii()
    assert lines[0] == "run demo: 12 rounds of 30 inner steps"
    assert lines[-1] == "preparing: compiling"


def test_a_stream_that_is_no_terminal_gets_plain_lines() -> None:
    stream = io.StringIO()
    with open_screen(stream) as screen:
        assert isinstance(screen, PlainScreen)
        screen.show(status())
        screen.show(status(state="finished"))
    assert stream.getvalue().endswith("finished\n")


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    with open_screen(stream) as screen:
        assert isinstance(screen, LiveScreen)
        screen.show(status())
    assert "planetary" in stream.getvalue()
    assert "╭" in stream.getvalue()


@pytest.mark.parametrize(("term", "encoding"), [("dumb", "utf-8"), ("xterm", "ascii")])
def test_a_terminal_that_cannot_draw_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch, term: str, encoding: str
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(Terminal, "encoding", encoding)
    assert isinstance(open_screen(Terminal()), PlainScreen)


# --- numbers
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.00k"),
        (1234, "1.23k"),
        (92_274_688, "92.3M"),
        (999_950, "1.00M"),
        (2e15, "2000T"),
    ],
)
def test_count(value: float, text: str) -> None:
    assert human.count(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (26_214_400, "26.2 MB"), (1500, "1.50 kB")])
def test_size(value: float, text: str) -> None:
    assert human.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.84, "0.8 s"),
        (9.96, "10 s"),
        (59.6, "1:00"),
        (187, "3:07"),
        (7387, "2:03:07"),
        (360_180, "4d 04:03"),
    ],
)
def test_duration(value: float | None, text: str) -> None:
    assert human.duration(value) == text


def test_sparkline_keeps_to_its_width_and_order() -> None:
    assert human.sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert human.sparkline([1.0, float("nan"), 1.0], 10) == "▁▁"
    assert human.sparkline([], 10) == ""
    long = human.sparkline([float(-i) for i in range(100)], 10)
    assert len(long) == 10
    assert list(long) == sorted(long, reverse=True)


def test_what_the_data_made_smaller_is_said_once() -> None:
    before = TrainingStatus(run="r", state="preparing", rounds=6)
    after = msgspec.structs.replace(before, rounds=5, notes=("fitted to the data: train.rounds is 5 instead of 6",))
    line = "note: fitted to the data: train.rounds is 5 instead of 6"
    assert line in plain_lines(before, after)
    assert line not in plain_lines(after, after)
