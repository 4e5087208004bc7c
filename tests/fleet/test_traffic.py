"""Bytes between gateway and workers are counted for the round that they belong to."""

from __future__ import annotations

from planetary.runs.mixture.messages import RunProgress, SaveShard
from planetary.runs.rl.messages import PolicyWeights, SampleRollouts
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runs.rounds.traffic import RoundTraffic
from planetary.runs.rounds.training_traffic import TrainingTraffic


def round_metrics(number: int) -> RoundMetrics:
    return RoundMetrics(
        round=number,
        loss=1.0,
        eval_loss=None,
        tokens=1,
        tokens_total=1,
        seconds=1.0,
        workers=1,
        inner_steps=1,
        bytes_up=0,
        bytes_down=0,
        tokens_per_s=1.0,
        compute_fraction=1.0,
    )


def test_a_rounds_message_counts_for_the_round_it_names() -> None:
    traffic = RoundTraffic()
    traffic.add_down(rm.Parameters(version=3), 10)
    traffic.add_up(rm.EvalResult(task=1, version=3, loss=1.0, batches=1), 5)
    assert (traffic.of_round(3), traffic.of_round(4)) == ((0, 0), (5, 10))


def test_outer_state_counts_up_for_its_round_and_down_for_next() -> None:
    traffic = RoundTraffic()
    traffic.add_up(rm.RingState(version=3, digest="d"), 8)
    traffic.add_down(rm.RingState(version=3, digest="d"), 4)
    traffic.add_up(rm.ReduceDone(round=3, attempt=1, digest="d", sent_bytes=100), 1)
    assert (traffic.of_round(3), traffic.of_round(4)) == ((9, 0), (0, 4))
    assert [traffic.counted(round_metrics(v)).bytes_ring for v in (3, 4)] == [100, 0]


def test_messages_of_roles_count_for_the_next_metrics() -> None:
    """A role's messages name no round: whichever kind of run has them, none is lost and none counts twice."""
    traffic = TrainingTraffic()
    traffic.add_down(PolicyWeights(version=0), 100)
    traffic.add_up(SaveShard(shard=0, epoch=0, step=1, progress=1, payload="p"), 30)
    assert traffic.of_round(1) == (30, 100)
    traffic.add_down(RunProgress(steps=(1,)), 7)
    assert traffic.of_round(1) == (30, 107)  # the metrics of a round that was evaluated are written again
    traffic.add_down(SampleRollouts(task=1, version=1, ends=(), vocabulary=9), 9)
    assert traffic.of_round(2) == (0, 9)
    assert (traffic.up, traffic.down) == (30, 116)
