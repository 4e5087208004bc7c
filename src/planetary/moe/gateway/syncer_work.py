"""What the syncer does with tensors: merges and whole models, from the payload store and back. Blocks; no decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import Packed
from planetary.artifacts.payload_store import PayloadStore
from planetary.core.errors import PlanetaryError
from planetary.moe.composer.composer_view import routing_from
from planetary.moe.controller.mixture_events import ExpertsJudged, FragmentMade, JudgeExperts, MakeFragment, WorkOf
from planetary.moe.methods import averaging
from planetary.moe.methods.acceptance import Refusal, Verdict
from planetary.moe.methods.ownership import EMPTY, owned_slots
from planetary.moe.methods.sketch import decode
from planetary.moe.payloads.expert_payloads import (
    change_bytes,
    experts_bytes,
    experts_from,
    improved_from,
    weights_bytes,
    work_bytes,
)
from planetary.moe.payloads.payloads import fragment_bytes, fragment_from, sketch_from
from planetary.moe.payloads.saved_composers import saved_composer
from planetary.moe.plan.plan import MixturePlan
from planetary.moe.training.audit import audit, disagreements, judge_fit, unusable_surrogates
from planetary.moe.training.expert_work import HeldExperts, Improved, accept_slots, sketched_rows
from planetary.moe.training.replicas import rule_of
from planetary.moe.training.routing import RoutingAgreement, routing_agreement
from planetary.moe.training.states import SyncerState, TrainingState, merged_model


def make_fragment(store: PayloadStore, wanted: MakeFragment, plan: MixturePlan) -> FragmentMade:
    """Merge publications into a fragment's next version. What fails is said in the answer."""
    rule = rule_of(wanted.tier, plan.training.merge)
    shards = tuple(sorted(one.shard for one in wanted.published))
    made = FragmentMade(wanted.tier, wanted.fragment, wanted.version, shards, why=wanted.why)
    try:
        before = fragment_from(store.get(wanted.before))
        velocity = fragment_from(store.get(wanted.velocity)) if wanted.velocity else {}
        if rule.momentum and not velocity:
            velocity = {name: np.zeros_like(value) for name, value in before.items()}
        published = [
            averaging.PublishedParameters(one.shard, fragment_from(store.get(one.payload)), one.tokens, one.steps)
            for one in wanted.published
        ]
        merged, speed = averaging.merge(before, velocity, published, rule)
        payload = store.put("fragment", fragment_bytes(merged))
        name = store.put("fragment", fragment_bytes(speed)) if rule.momentum else ""
    except PlanetaryError as error:
        return FragmentMade(wanted.tier, wanted.fragment, wanted.version, shards, failed=str(error))
    except KeyError as error:
        missing = f"a publication lacks the tensor {error}"
        return FragmentMade(wanted.tier, wanted.fragment, wanted.version, shards, failed=missing)
    steps = max(one.steps for one in wanted.published)
    return msgspec.structs.replace(made, payload=payload, velocity=name, steps=steps)


def routing_of(store: PayloadStore, views: tuple[str, ...], plan: MixturePlan) -> RoutingAgreement | None:
    """Return how far composers agree about routing, or None where not all of them have said it.

    Raises:
        PlanetaryError: a payload is missing, damaged or of another model.
    """
    if len(views) < 2:
        return None
    return routing_agreement([routing_from(store.get(name), plan) for name in views], plan.model.n_active)


def expert_work(store: PayloadStore, wanted: WorkOf) -> memoryview:
    """Return what an expert worker needs for a lease. Raises `PlanetaryError` where a part of it is gone."""
    return work_bytes(store.get(wanted.experts), [store.get(name) for name in wanted.lease.work.payloads])


def expert_weights(store: PayloadStore, experts: str, plan: MixturePlan) -> memoryview:
    """Return the experts in a payload as composers get them. Raises `PlanetaryError`."""
    return weights_bytes(experts_from(store.get(experts)), plan.model)


def judge_experts(
    store: PayloadStore, wanted: JudgeExperts, results: Sequence[Packed], plan: MixturePlan
) -> ExpertsJudged:
    """Put what counts of an expert worker's result into the store. What fails is said in the answer.

    `results`: the result, and where two workers had the work, the second one's.
    """
    slots = _slots(wanted, plan)
    try:
        before = experts_from(store.get(wanted.before))
        made = [improved_from(result, before) for result in results]
        if not all(_fits(before, one, len(slots), surrogates=wanted.fits) for one in made):
            return ExpertsJudged(wanted.task, failed="the result has other tensors than the experts")
        improved, doubts = made[0], {}
        if len(made) > 1:
            doubts |= disagreements(before.weights, made[0], made[1], layer=wanted.layer, slots=slots)
        if wanted.audited:
            doubts |= _audited(store, wanted, before, improved, plan)
        if wanted.fits:
            improved, poor = _judged_fit(store, wanted, before, improved, plan)
            doubts |= poor
        after, verdicts = accept_slots(
            before,
            improved,
            plan.training,
            layer=wanted.layer,
            owner=wanted.shard,
            slots=slots,
            versions=(wanted.version, plan.pace.made_with(wanted.version, wanted.base_version)),
            doubts=doubts,
        )
        accepted_some = any(verdict.accepted for verdict in verdicts)
        payload = store.put("experts", experts_bytes(after)) if accepted_some else wanted.before
        change = ""
        if improved.deltas and accepted_some and not plan.model.ternary:  # whole, ternary weights are smaller
            accepted = np.zeros(len(slots), bool)
            accepted[np.flatnonzero(slots != EMPTY)] = [verdict.accepted for verdict in verdicts]
            change = store.put(
                "change", change_bytes(improved.deltas, accepted, after.surrogates if wanted.fits else {})
            )
    except PlanetaryError as error:
        return ExpertsJudged(wanted.task, failed=str(error))
    refused = Counter(str(v.refusal) for v in verdicts if not v.accepted)
    broken = {Refusal.NOT_FINITE, Refusal.MOMENTS, Refusal.RESIDUAL}  # no honest worker's: the journal says what it was
    said = tuple((str(v.refusal), v.why) for v in verdicts if v in doubts.values() or v.refusal in broken)
    accepted = sum(v.accepted for v in verdicts)
    return ExpertsJudged(wanted.task, payload, accepted, dict(refused), change=change, doubts=said)


def _slots(wanted: JudgeExperts, plan: MixturePlan) -> np.ndarray:
    return owned_slots(plan.owner_map, wanted.shard, plan.slots)[wanted.layer]


def _fits(before: HeldExperts, improved: Improved, slots: int, *, surrogates: bool) -> bool:
    if any(p.shape != (slots,) or p.dtype.kind != "f" for p in (improved.proxy_before, improved.proxy_after)):
        return False
    residuals, stand_ins = before.weights if improved.deltas else {}, before.surrogates if surrogates else {}
    pairs = [(before.weights, improved.weights), (before.moments, improved.moments)]
    pairs += [(residuals, improved.residuals), (stand_ins, improved.surrogates)]
    kinds = [tuple({n: (v.shape, v.dtype) for n, v in tensors.items()} for tensors in pair) for pair in pairs]
    return all(mine == theirs for mine, theirs in kinds)


def _audited(
    store: PayloadStore, wanted: JudgeExperts, before: HeldExperts, improved: Improved, plan: MixturePlan
) -> dict[int, Verdict]:
    names = [*wanted.used, wanted.other] if wanted.other else list(wanted.used)
    if not all(store.has(name) for name in names):
        return {}  # sketches live for a while only, and a worker may have taken longer
    sketches = [decode(sketch_from(store.get(name))) for name in names]
    used, other = sketches[: len(wanted.used)], sketches[-1] if wanted.other else None
    return audit(
        before.weights,
        improved,
        used,
        other,
        layer=wanted.layer,
        slots=_slots(wanted, plan),
        config=plan.model,
        trust=plan.training.trust,
    )


def _judged_fit(
    store: PayloadStore, wanted: JudgeExperts, before: HeldExperts, improved: Improved, plan: MixturePlan
) -> tuple[Improved, dict[int, Verdict]]:
    """Return the experts with surrogates that are as good as is said of them, and by slot which are not."""
    slots, new = _slots(wanted, plan), dict(improved.surrogates)
    doubts = unusable_surrogates(new, layer=wanted.layer, slots=slots)
    if not all(store.has(name) for name in wanted.used):
        # Sketches live for a while only: what cannot be looked at is not used.
        return msgspec.structs.replace(improved, surrogates=dict(before.surrogates)), doubts
    rows = sketched_rows([decode(sketch_from(store.get(name))) for name in wanted.used], plan.model)
    count = plan.training.fit.rows
    fit = judge_fit(before.surrogates, improved, rows, layer=wanted.layer, slots=slots, config=plan.model, count=count)
    new |= {"error": fit.errors, "progress": np.array(wanted.progress, np.int64)}
    return msgspec.structs.replace(improved, surrogates=new), fit.poor | doubts


def assembled_model(
    store: PayloadStore, shards: Sequence[str], experts: Sequence[Sequence[str]], plan: MixturePlan
) -> dict[str, np.ndarray]:
    """Return the ordinary model that the shards' saved states make, by the names of `models.latent_moe`.

    `experts`: under offload, payloads of each shard's experts, by layer.

    Raises:
        PlanetaryError: a payload is missing, damaged or of another model.
    """
    held = experts or ((),) * len(shards)
    composers = tuple(saved_composer(store, *named, plan) for named in zip(shards, held, strict=True))
    return merged_model(TrainingState(0, composers, None, SyncerState({}, {})), plan.model)
