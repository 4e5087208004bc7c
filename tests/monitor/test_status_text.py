from __future__ import annotations

import msgspec
from run_story import status

from planetary.monitor.status_text import status_text

NOW = 1100.0

WHOLE = """\
run demo: training, round 7 of 12, 1:40 so far, 1:12 left
training loss 2.4400, held-out loss 2.4500
369k tokens, 12.3k tokens/s, up 157 MB, down 184 MB
newest checkpoint of round 6, 42 s old, 41.2 GB free on the disk

worker    state        round   step    loss  a step  transfers  share  last result  lost  device
laptop/0  training         7  18/30  2.4312       -          -      -            -     0  cpu host
laptop/1  ready, slow      7      -       -   1.2 s    12.4 ms   93 %         50 s     2  cpu host
laptop/1 is slow: its inner steps take 1.25 s
waiting for laptop/1 (12 s)
newest event: laptop/1 was lost: its process was killed by signal 9
note: a checkpoint takes 26.3 MB
"""


def test_everything_that_is_known_is_in_the_text() -> None:
    first, second = status().workers
    second = msgspec.structs.replace(
        second,
        state="ready",
        step_s=1.25,
        transfer_s=0.0124,
        share=0.93,
        last_contribution_at=NOW - 50,
        slow="its inner steps take 1.25 s",
    )
    shown = status(
        workers=(first, second),
        checkpoint_round=6,
        checkpoint_at=NOW - 42,
        disk_free=41_200_000_000,
        waiting_for=("laptop/1",),
        waiting_since=NOW - 12,
        notes=("a checkpoint takes 26.3 MB",),
    )
    assert status_text(shown, NOW) == WHOLE


def test_what_is_no_text_is_not_counted_in_tokens() -> None:
    shown = status_text(status(counts="examples"), NOW)
    assert "369k examples, 12.3k examples/s" in shown
    assert "token" not in shown


def test_little_known_run_has_few_lines_and_no_escapes() -> None:
    early = status(
        state="preparing",
        stage="exporting\x1b[2J\nthe model",
        rounds=0,
        loss=(),
        eval_loss=(),
        tokens_total=0,
        workers=(),
        message="",
        seconds_left=None,
        started_at=0.0,
    )
    (line,) = status_text(early, NOW).splitlines()
    assert line.startswith("run demo: preparing, exporting")
    assert "\x1b" not in line
