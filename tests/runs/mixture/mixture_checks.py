"""Comparisons in tests of whole mixtures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from lockstep_trainer import MoeTrainer
from mixture_stage import MixtureStage, Worker
from version_streams import expert_streams

from planetary.artifacts.packed_arrays import Packed
from planetary.core.tensors import Tensors
from planetary.data.reader import batches, read_slice
from planetary.fleet.protocol import messages as m
from planetary.machine.journal import replay
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.payloads.experts import improved_bytes, improved_from
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.records import ExpertWork, MixtureState
from planetary.runs.mixture.training.expert_work import HeldExperts, Improved
from planetary.runs.mixture.training.participant_states import ComposerState, TrainingState


def trained(plan: MixturePlan) -> TrainingState:
    """Return the state that the trainer reaches with a plan."""
    trainer = MoeTrainer(plan.model, plan.training, optimise=False)
    state = trainer.initial()
    for step in range(plan.steps):
        state, _ = trainer.step(state, *next(batches(read_slice(plan.order.locate(step)), plan.training.batch_size, 8)))
    return state


def check_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert all((found[name] == value).all() for name, value in expected.items())


def composing(cluster: MixtureStage, shard: int) -> ComposerState:
    found = next(w.driver.state for w in cluster.workers.values() if w.machine.shard == shard)
    assert found is not None
    return found


def of_kind(cluster: MixtureStage, kind: type) -> list:
    return [record for record in cluster.records_so_far if isinstance(record, kind)]


def check_streams(cluster: MixtureStage, *, all_moved: bool = True) -> None:
    """Every fragment, shard and expert has one stream of versions or epochs, without gaps.

    `all_moved`: and every expert has learned something.
    """
    records = cluster.records_so_far
    replay(records, MixtureState())  # of fragments
    streams = expert_streams(records, cluster.plan.owners, cluster.plan.training.replicas)
    assert streams
    assert all(streams.values()) or not all_moved


def check_steps(cluster: MixtureStage) -> None:
    """All steps of the run were taken, and hardly more: a report may be in flight."""
    plan = cluster.plan
    taken = sum(shard.step for shard in cluster.controller.state.shards)
    steps = [shard.step for shard in cluster.controller.state.shards]
    assert plan.most_steps <= taken <= plan.most_steps + 4 * plan.training.composers, (plan.most_steps, steps)


def unanswered(cluster: MixtureStage, worker: Worker, layer: int) -> set[int]:
    """Return the steps of a composer's sketches of a layer that are in flight, or whose work is not over.

    Those that its predecessors left are among them.
    """
    found = set(cluster.controller.offload.unanswered_sketches(worker.machine.shard, layer))
    found |= {step for packed, step in worker.packed if packed == layer}
    offers = [offer for offer in worker.up if isinstance(offer, mm.OfferSketches) and offer.layer == layer]
    # A message sent as a connection broke never comes; its epoch is over.
    return found | {offer.step for offer in offers if offer.epoch == worker.machine.epoch}


def check_answers(cluster: MixtureStage) -> None:
    """The gateway reports as unanswered exactly the sketches whose work has not ended."""
    if cluster.finished is not None or not cluster.has_begun or cluster.controller.state.ended is not None:
        return
    for shard, layer in cluster.controller.state.experts:
        queued = {work.step for work in waiting_work(cluster) if (work.shard, work.layer) == (shard, layer)}
        assert queued == set(cluster.controller.offload.unanswered_sketches(shard, layer))


def waiting_work(cluster: MixtureStage) -> list[ExpertWork]:
    """Return the expert work that is neither judged nor given up."""
    return list(cluster.controller.state.work.values())


def check_window(cluster: MixtureStage, *, exactly: bool = True) -> None:
    """No composer has more sketches of a layer out than the window; `exactly`: and all answers reach it."""
    plan = cluster.plan
    if plan.training.expert_optimizer.in_step or not plan.pace.sketches_expire:
        return
    check_answers(cluster)
    for worker in cluster.workers.values() if cluster.finished is None and cluster.has_begun else ():
        one = cluster.controller.composing.get(worker.session)
        if one is not None and (one.shard, one.epoch) == (worker.machine.shard, worker.machine.epoch):
            for layer in range(plan.model.n_layer):
                out = unanswered(cluster, worker, layer)
                assert len(out) <= max(1, plan.window), (worker.name, layer, out)
                if exactly and not worker.due(mm.GrantShard, mm.ExpertsUpdate):
                    assert worker.machine.unanswered_sketches(layer) == out, (worker.name, layer, out)


def stale(cluster: MixtureStage) -> int:
    """How many experts' updates and sketches came too late, over the whole run."""
    rounds = cluster.controller.rounds
    counts = [rounds.updates, rounds.refused_sketches]
    for line in cluster.lines:
        counts += [line.own.updates, line.own.refused_sketches] if line.own else []
    return sum(count.get("stale", 0) for count in counts)


def spoil(one: Worker, change: Callable[[Improved], Improved]) -> None:
    """Change an expert worker's results."""
    plan = one.stage.plan
    wide = (plan.slots, plan.model.n_latent, plan.model.n_hidden)
    # Lossy updates are added to weights; their values do not matter here.
    weights = {"up": np.zeros(wide, np.float32), "down": np.zeros((wide[0], wide[2], wide[1]), np.float32)}

    def spoiled(message: m.Message, payload: Packed) -> Packed:
        if isinstance(message, mm.ExpertsImproved):
            return improved_bytes(change(improved_from(payload, HeldExperts(weights, {}))))
        return payload

    one.change_sent(spoiled)
