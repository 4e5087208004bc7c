"""Random fault schedules of whole simulated runs, and what must be true after each."""

from __future__ import annotations

import collections

import numpy as np

from planetary.fabric.protocol.records import (
    DeltaAccepted,
    DeltaWithdrawn,
    RolledBack,
    RoundClosed,
    RoundFinished,
    RunFinished,
    RunResumed,
)
from planetary.fabric.protocol.state import replay
from planetary.simulation.cluster import SimCluster, policy
from planetary.simulation.faults import draw_plan
from planetary.simulation.small_training import replay_parameters

ROUNDS, WORKERS = 6, 3
LIMIT_S = 600.0


def run_schedule(seed: int, checkpoint_every: int = 1, *, ring: bool = False, overlap: bool = False) -> SimCluster:
    limits = policy(
        rounds=ROUNDS, workers=WORKERS, checkpoint_every=checkpoint_every, ring=ring or overlap, overlap=overlap
    )
    plan = draw_plan(seed, workers=WORKERS, horizon_s=25.0, most=12)
    cluster = SimCluster(seed, limits, WORKERS, plan)
    ended = cluster.run(LIMIT_S)
    where = f"seed {seed}: {cluster.struck}"
    assert ended, f"hangs; {where}; {cluster.gateway and cluster.gateway.controller.stalls.why}"
    return cluster


def final_history(cluster: SimCluster) -> list:
    """The journal without what was voided by resumes."""
    history: list = []
    for record in cluster.disk.journal:
        if isinstance(record, RunResumed | RolledBack):
            ends = [
                i
                for i, r in enumerate(history)
                if isinstance(r, RoundFinished | RoundClosed) and r.round == record.mark.round
            ]
            history = history[: ends[-1] + 1] if ends else []
            # Where rounds overlap, the next one had begun.
            history = [r for r in history if getattr(r, "round", 0) <= record.mark.round]
        history.append(record)
    return history


def check(cluster: SimCluster, seed: int) -> None:
    assert cluster.gateway is not None
    state = cluster.gateway.controller.state
    where = f"seed {seed}: {cluster.struck}"
    end = cluster.disk.journal[-1]
    assert isinstance(end, RunFinished), where
    assert end.ok, f"{end.reason}; {where}"
    assert state.round == ROUNDS, where

    # The journal replays to the live state.
    assert replay(cluster.disk.journal) == state, where

    # Every token counts once: no lease is in two rounds of the final history, and the ledger agrees.
    history = final_history(cluster)
    withdrawn = {r.task for r in history if isinstance(r, DeltaWithdrawn)}
    accepted = [r for r in history if isinstance(r, DeltaAccepted) and r.task not in withdrawn]
    closed = {r.round: r for r in history if isinstance(r, RoundClosed)}
    leases = [r.lease for r in accepted]
    assert max(collections.Counter(leases).values()) == 1, where
    assert state.ledger.trained == len(leases), where
    assert state.ledger.held == [], where
    assert state.tokens_total == sum(r.tokens for r in accepted), where
    for number in range(1, ROUNDS + 1):
        assert closed[number].contributions == sum(r.round == number for r in accepted), where

    # The parameters are exactly what the final history says they are.
    assert cluster.gateway.controller.policy.inner_steps == 4
    found = cluster.gateway.parameters.state.params
    again = replay_parameters(cluster.disk.journal, 4, overlap=cluster.policy.overlap)
    np.testing.assert_array_equal(found["w"], again["w"], err_msg=where)

    # One metrics line per round, evaluated unless newer rounds overtook it twice.
    assert sorted(cluster.disk.metrics) == list(range(1, ROUNDS + 1)), where
    assert cluster.disk.metrics[ROUNDS].eval_loss is not None, where
