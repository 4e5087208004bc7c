"""Random fault schedules of whole simulated mixtures, and the invariants after each; see `random_schedules`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from small_mixture import LEDGER, ledger_of, small_mixture
from version_streams import expert_streams

from planetary.artifacts.payload_store import PayloadStore
from planetary.fleet.gateway.run_files import PAYLOADS
from planetary.machine.journal import replay
from planetary.runs.mixture.controller.controller import EXPERT
from planetary.runs.mixture.gateway.gateway import KEPT_KINDS
from planetary.runs.mixture.payloads.shard import shard_from
from planetary.runs.mixture.records import MixtureState
from planetary.runs.rounds.records import RoundFinished, TrainingResumed
from planetary.simulation.faults import KINDS, draw_plan
from planetary.simulation.mixtures.mixture_cluster import MixtureCluster
from random_schedules import Schedules, check_ended_well, forging, journal_of, untimed

ROUNDS, NODES = 6, 3
LIMIT_S = 3000.0
MOST_FAULTS = 10

MODES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "copies": {"composers": 3, "replicas": 2, "outer": (0.9, 0.4)},
    "changes": {"delta_rank": 1},
    "offloaded": {"expert_workers": 1, "norm_ratio": 10.0},
    "audited": {"expert_workers": 1, "norm_ratio": 10.0, "audited": 0.5, "fitted_by": "expert-workers"},
    "lossy": {"expert_workers": 1, "norm_ratio": 10.0, "sketches": "all", "update_form": "4bit"},
}
"""Keys of `[moe]` under which schedules run, and rate and momentum of the outer step."""


@contextlib.contextmanager
def faulty_mixture(seed: int, mode: str = "plain", *, forger: bool | None = None) -> Iterator[MixtureCluster]:
    """Make the mixture of a seed.

    `forger`: whether another machine joins, which composes no shard and forges messages; None: in every fourth
    schedule of a mixture with expert workers.
    """
    training = small_mixture(rounds=ROUNDS, **MODES[mode])
    nodes = training.prepared.config.fabric.workers + 1
    plan = draw_plan(seed, workers=nodes, horizon_s=20.0, most=MOST_FAULTS)
    cluster = MixtureCluster(seed, training, nodes, plan)
    forger = seed % 4 == 0 if forger is None else forger
    if not forger:
        yield cluster
        return
    if seed % 16 < 8 or "expert_workers" not in MODES[mode]:
        forged = forging(cluster, lambda: first_composer(cluster), punished=seed % 8 > 0, at_s=6.0)
    else:
        cluster.add_node("forger/0", (EXPERT,))
        forged = forging(cluster, nodes, punished=seed % 8 > 0)
    with forged:
        yield cluster


def first_composer(cluster: MixtureCluster) -> int:
    """Return the number of the node whose worker composes a shard, or 0."""
    here = set() if cluster.gateway is None else {one.worker for one in cluster.controller.composing.values()}
    return next((number for number, node in enumerate(cluster.nodes) if node.name in here), 0)


def check_every_token_counts_once(cluster: MixtureCluster) -> None:
    """Each shard was trained on the tokens of each of its steps once, and all steps of the run were taken."""
    plan, store, taken = cluster.training.prepared.plan, payloads(cluster), 0
    for number, shard in enumerate(cluster.controller.state.shards):
        state, step, _ = shard_from(store.get(shard.payload), plan)
        assert step == shard.step
        assert int(state.dense_moments[LEDGER.name]) == ledger_of(plan, number, step), f"shard {number}"
        taken += step
    assert taken >= plan.most_steps


def check_no_finished_round_was_lost(cluster: MixtureCluster) -> None:
    """A round that the journal calls finished is never trained again after a resume."""
    finished = 0
    for record in cluster.journal:
        if isinstance(record, RoundFinished):
            assert record.round == finished + 1
            finished = record.round
        if isinstance(record, TrainingResumed):
            assert record.mark.round == finished


def check_the_journal_replays(cluster: MixtureCluster) -> None:
    """The journal folds to the live state, with its digests; the store has every payload that these name."""
    live = cluster.controller.state
    empty = MixtureState()
    found = replay(cluster.journal, empty)
    assert untimed(found) == untimed(live)
    for name in sorted(found.needed()):
        payloads(cluster).get(name)  # which compares its bytes with its name


def check_versions_are_one_stream(cluster: MixtureCluster) -> None:
    """Every fragment, shard and expert has one stream of versions or epochs, without gaps."""
    plan = cluster.training.prepared.plan
    assert expert_streams(cluster.journal, plan.owners, plan.training.replicas)


def check_each_round_has_its_metrics(cluster: MixtureCluster) -> None:
    """One line for each round, and the last one with the held-out loss."""
    metrics = cluster.metrics
    assert sorted(metrics) == list(range(1, ROUNDS + 1))
    assert all(np.isfinite(line.loss) for line in metrics.values())
    last = metrics[ROUNDS].eval_loss
    assert last is not None
    assert np.isfinite(last)


def payloads(cluster: MixtureCluster) -> PayloadStore:
    """Return the payload store of a run."""
    return PayloadStore(cluster.run_folder / PAYLOADS, dict.fromkeys(KEPT_KINDS, 1e9))


SCHEDULES = Schedules(
    kind="mixture",
    build=faulty_mixture,
    faults=[kind for kind in KINDS if kind != "repeat_result"],
    invariants=(
        check_ended_well,
        check_every_token_counts_once,
        check_no_finished_round_was_lost,
        check_the_journal_replays,
        check_versions_are_one_stream,
        check_each_round_has_its_metrics,
    ),
    limit_s=LIMIT_S,
    journals=journal_of,
    options={"--mode": {"choices": MODES, "default": "plain"}},
)
