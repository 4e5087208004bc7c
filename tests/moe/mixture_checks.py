"""What tests of whole mixtures compare."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from mixture_cluster import MixtureCluster, Worker

from planetary.core.tensors import Tensors
from planetary.data.reader import batches, read_slice
from planetary.moe.expert_payloads import improved_bytes, improved_from
from planetary.moe.expert_work import HeldExperts, Improved
from planetary.moe.plan import MixturePlan
from planetary.moe.records import MixtureRecord, replay
from planetary.moe.states import ComposerState, TrainingState
from planetary.moe.trainer import MoeTrainer
from planetary.moe.version_streams import expert_streams
from planetary.wire import messages as m


def trained(plan: MixturePlan) -> TrainingState:
    """What the trainer makes of a plan."""
    trainer = MoeTrainer(plan.model, plan.training, optimise=False)
    state = trainer.initial()
    for step in range(plan.steps):
        state, _ = trainer.step(state, *next(batches(read_slice(plan.order.locate(step)), plan.training.batch_size, 8)))
    return state


def check_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert all((found[name] == value).all() for name, value in expected.items())


def composing(cluster: MixtureCluster, shard: int) -> ComposerState:
    found = next(w.driver.state for w in cluster.workers.values() if w.driver.machine.shard == shard)
    assert found is not None
    return found


def of_kind(cluster: MixtureCluster, kind: type) -> list:
    records = [msgspec.json.decode(line, type=MixtureRecord) for line in cluster.journal]
    return [record for record in records if isinstance(record, kind)]


def check_streams(cluster: MixtureCluster, *, all_moved: bool = True) -> None:
    """Every fragment, shard and expert has one stream of versions or epochs, without gaps.

    `all_moved`: and every expert has learned something.
    """
    records = [msgspec.json.decode(line, type=MixtureRecord) for line in cluster.journal]
    replay(records, cluster.plan.steps_per_round)  # of fragments
    streams = expert_streams(records, cluster.plan.owners, cluster.plan.training.replicas)
    assert streams
    assert all(streams.values()) or not all_moved


def check_steps(cluster: MixtureCluster) -> None:
    """All steps of the run were taken, by whoever was there, and hardly more: a report may be on its way."""
    plan = cluster.plan
    taken = sum(shard.step for shard in cluster.controller.state.shards)
    steps = [shard.step for shard in cluster.controller.state.shards]
    assert plan.most_steps <= taken <= plan.most_steps + 4 * plan.training.composers, (plan.most_steps, steps)


def spoil(one: Worker, change: Callable[[Improved], Improved]) -> None:
    """Change what an expert worker returns."""
    send, plan = one.driver.post.send, one.driver.plan
    wide = (plan.slots, plan.model.n_latent, plan.model.n_hidden)
    # Lossy updates are added to weights; what these are does not matter here.
    weights = {"up": np.zeros(wide, np.float32), "down": np.zeros((wide[0], wide[2], wide[1]), np.float32)}

    def spoiled(message: m.Message, payload: bytes | None) -> None:
        if isinstance(message, m.ExpertsImproved) and payload is not None:
            payload = improved_bytes(change(improved_from(payload, HeldExperts(weights, {}))))
        send(message, payload)

    one.driver.post.send = spoiled
