"""The gateway's work on payloads, in threads: check one before it counts and is stored, merge fragments, judge expert
workers' results, assemble models. Blocks; decides nothing about the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import Packed
from planetary.artifacts.payload_store import PayloadStore
from planetary.core.errors import PlanetaryError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.protocol import messages as m
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.composer.view import routing_from
from planetary.runs.mixture.controller.events import ExpertsJudged, FragmentMade, JudgeExperts, MakeFragment, WorkOf
from planetary.runs.mixture.methods import averaging
from planetary.runs.mixture.methods.acceptance import Refusal, Verdict
from planetary.runs.mixture.methods.ownership import EMPTY, owned_slots
from planetary.runs.mixture.methods.sketch import Sketch, decode
from planetary.runs.mixture.methods.surrogate import newer_surrogate
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.payloads.experts import (
    change_bytes,
    experts_bytes,
    experts_from,
    improved_from,
    weights_bytes,
    work_bytes,
)
from planetary.runs.mixture.payloads.payloads import fragment_bytes, fragment_from, sketch_from
from planetary.runs.mixture.payloads.saved_composers import saved_composer
from planetary.runs.mixture.payloads.shard import shard_from
from planetary.runs.mixture.payloads.surrogates import changed_surrogates, surrogates_bytes, surrogates_from
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.training.audit import accept_slots, audit, disagreements, judge_fit, unusable_surrogates
from planetary.runs.mixture.training.expert_work import HeldExperts, Improved, sketched_rows
from planetary.runs.mixture.training.participant_states import SyncerState, TrainingState, merged_model
from planetary.runs.mixture.training.replicas import rule_of
from planetary.runs.mixture.training.routing import RoutingAgreement, routing_agreement


def make_fragment(store: PayloadStore, wanted: MakeFragment, plan: MixturePlan) -> FragmentMade:
    """Merge publications into a fragment's next version; a failure is in the answer."""
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
    """Return how far composers agree about routing, or None where some have sent no view.

    Raises:
        PlanetaryError: a payload is missing, damaged or of another model.
    """
    if len(views) < 2:
        return None
    return routing_agreement([routing_from(store.get(name), plan) for name in views], plan.model.n_active)


def expert_work(store: PayloadStore, wanted: WorkOf) -> memoryview:
    """Return an expert worker's input. Raises `PlanetaryError` where a part of it is gone."""
    return work_bytes(store.get(wanted.experts), [store.get(name) for name in wanted.work.payloads])


def expert_weights(store: PayloadStore, experts: str, plan: MixturePlan) -> memoryview:
    """Return the experts in a payload as composers get them. Raises `PlanetaryError`."""
    return weights_bytes(experts_from(store.get(experts)), plan.model)


def judge_experts(
    store: PayloadStore, wanted: JudgeExperts, results: Sequence[Packed], plan: MixturePlan
) -> ExpertsJudged:
    """Put the accepted part of an expert worker's result into the store; a failure is in the answer.

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
    broken = {Refusal.NOT_FINITE, Refusal.MOMENTS, Refusal.RESIDUAL}  # no honest worker's: they are in the journal
    reported = tuple((str(v.refusal), v.why) for v in verdicts if v in doubts.values() or v.refusal in broken)
    accepted = sum(v.accepted for v in verdicts)
    return ExpertsJudged(wanted.task, payload, accepted, dict(refused), change=change, doubts=reported)


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
    """Return the experts with their surrogates and recomputed errors, and by slot the poor ones."""
    slots, new = _slots(wanted, plan), dict(improved.surrogates)
    doubts = unusable_surrogates(new, layer=wanted.layer, slots=slots)
    if not all(store.has(name) for name in wanted.used):
        # Sketches live for a while only: a fit that cannot be checked is not used.
        return msgspec.structs.replace(improved, surrogates=dict(before.surrogates)), doubts
    rows = sketched_rows([decode(sketch_from(store.get(name))) for name in wanted.used], plan.model)
    count = plan.training.fit.rows
    fit = judge_fit(before.surrogates, improved, rows, layer=wanted.layer, slots=slots, config=plan.model, count=count)
    new |= {"error": fit.errors, "progress": np.array(wanted.progress, np.int64)}
    return msgspec.structs.replace(improved, surrogates=new), fit.poor | doubts


def assembled_model(
    store: PayloadStore, shards: Sequence[str], experts: Sequence[Sequence[str]], plan: MixturePlan
) -> dict[str, np.ndarray]:
    """Return the ordinary model the shards' saved states make, by the names of `models.latent_moe`.

    `experts`: under offload, payloads of each shard's experts, by layer.

    Raises:
        PlanetaryError: a payload is missing, damaged or of another model.
    """
    held = experts or ((),) * len(shards)
    composers = tuple(saved_composer(store, *named, plan) for named in zip(shards, held, strict=True))
    return merged_model(TrainingState(0, composers, None, SyncerState({}, {})), plan.model)


KINDS: Mapping[type[m.Message], str] = {
    mm.PublishFragment: "fragment",
    mm.PublishSurrogates: "surrogate",
    mm.SaveShard: "shard",
    mm.OfferSketches: "sketch",
    mm.ViewModel: "view",
}
"""The kind of a message's payload in the store."""


class PayloadChecks:
    """The checks of one mixture.

    Args:
        plan: of the mixture.
        dense: the parameters that are no routed experts.
        experts: weights of one layer's experts on one composer, [slots, ...].
    """

    def __init__(self, plan: MixturePlan, dense: Sequence[TensorSpec], experts: Sequence[TensorSpec]) -> None:
        self._plan = plan
        self._dense = {spec.name: spec.shape for spec in dense}
        self._experts = {spec.name: spec.shape for spec in experts}
        self._slots = plan.held_slots
        self._fragments = plan.fragments(dense, experts)

    def keep(self, store: PayloadStore, message: m.Message, data: Packed) -> tuple[str, str]:
        """Check a message's payload and put it into the store; return the name, or the defect.

        A change of surrogates is put there with the surrogates it makes, and the name is that of these.
        """
        change, whole = getattr(message, "change", ""), data
        try:
            if isinstance(message, mm.PublishSurrogates) and change:
                whole = self._changed(store.get(message.base), data)
            defect = self.defect(message, whole)
            if defect:
                return "", defect
            name = store.put(KINDS[type(message)], whole)
            found = [(name, getattr(message, "payload", ""))]
            if change:
                found.append((store.put("refresh", data), change))
        except PlanetaryError as error:
            return "", str(error)
        damaged = [f"its payload is damaged: expected {sent[:24]}…, found {n[:24]}…" for n, sent in found if n != sent]
        return name, "".join(damaged[:1])

    def defect(self, message: m.Message, data: Packed) -> str:
        """Return the defect of a message's payload, or ""."""
        try:
            match message:
                case mm.PublishFragment():
                    return self._fragment(message, fragment_from(data))
                case mm.PublishSurrogates():
                    return self._surrogates(message.of, data)
                case mm.SaveShard():
                    return self._shard(message, data)
                case mm.OfferSketches():
                    sketch = decode(sketch_from(data))
                    if (sketch.layer, sketch.step, sketch.composer) != (message.layer, message.step, message.shard):
                        return f"it is of layer {sketch.layer}, step {sketch.step}, composer {sketch.composer}"
                    return self._sketch(sketch)
                case mm.ViewModel():
                    routing_from(data, self._plan)
                    return ""
                case _:
                    return f"no payload is expected with {type(message).__name__}"
        except (PlanetaryError, ValueError, KeyError, IndexError) as error:
            return str(error) if isinstance(error, PlanetaryError) else f"its payload cannot be read: {error!r}"

    def _changed(self, base: Packed, change: Packed) -> memoryview:
        before = {(one.layer, one.expert): (one.a, one.b) for one in surrogates_from(base)}
        messages = changed_surrogates(change, lambda *place: before[place], self._plan.training)
        return surrogates_bytes(messages)

    def _surrogates(self, shard: int, data: Packed) -> str:
        """Of all experts of a shard, one by one: a bank to put them into would be as large as the model's."""
        if not 0 <= shard < self._plan.training.composers:
            return f"it has surrogates of shard {shard} of {self._plan.training.composers}"
        model, rank = self._plan.model, self._plan.training.rank
        shapes = (model.n_latent, model.read * rank), (rank, model.n_latent)
        left = {(int(layer), int(expert)) for layer, expert in np.argwhere(self._plan.owner_map == shard)}
        others = f"it has not the surrogates of all experts of shard {shard} and of no others"
        for one in surrogates_from(data):
            place = one.layer, one.expert
            if place not in left or not newer_surrogate(-1, one, shard):
                return others
            left.remove(place)
            for which, array, shape in zip("AB", (one.a, one.b), shapes, strict=True):
                name = f"{which} of layer {one.layer} expert {one.expert}"
                if array.dtype != np.float32 or array.shape != shape:
                    return f"its {name} is {array.dtype}{list(array.shape)}"
                if defect := _not_finite({name: array}):
                    return defect
        return others if left else ""

    def _fragment(self, message: mm.PublishFragment, tensors: Tensors) -> str:
        names = self._fragments.get((Tier(message.tier), message.fragment))
        if names is None:
            return f"there is no fragment {message.fragment} of tier {message.tier}"
        if set(tensors) != set(names):
            return f"it has {len(tensors)} tensors, the fragment has {len(names)} others"
        wrong = [n for n in names if tensors[n].shape != self._shape(n) or tensors[n].dtype != np.float32]
        if wrong:
            return f"its {wrong[0]} is {tensors[wrong[0]].dtype}{list(tensors[wrong[0]].shape)}"
        return _not_finite(tensors)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Of a fragment's tensor: a parameter, or one expert's weight `layers.2.experts.up.7`."""
        return self._dense[name] if name in self._dense else self._experts[name.split(".")[-2]][1:]

    def _sketch(self, sketch: Sketch) -> str:
        """Return the defect of a sketch on which expert workers would fail, or ""."""
        model, tokens = self._plan.model, len(sketch.ids)
        rows, chosen = (tokens, model.n_latent), (tokens, model.n_active)
        found = (sketch.inputs.shape, sketch.output_gradients.shape, sketch.ids.shape, sketch.gates.shape)
        if not 0 <= sketch.layer < model.n_layer:
            return f"it is of layer {sketch.layer} of {model.n_layer}"
        if found != (rows, rows, chosen, chosen) or tokens > self._plan.tokens_per_step:
            return f"it has arrays {[list(shape) for shape in found]} of at most {self._plan.tokens_per_step} tokens"
        if tokens and not (sketch.ids.min() >= 0 and sketch.ids.max() < model.n_expert):
            return f"it has experts {sketch.ids.min()} to {sketch.ids.max()} of {model.n_expert}"
        return _not_finite({"u": sketch.inputs, "g_y": sketch.output_gradients, "gates": sketch.gates})

    def _shard(self, message: mm.SaveShard, data: Packed) -> str:
        state, step, _ = shard_from(data, self._plan)
        if (state.number, step) != (message.shard, message.step):
            return f"it holds shard {state.number} after step {step}, not {message.shard} after {message.step}"
        missing = set(self._dense) - set(state.dense)
        if missing:
            return f"it lacks {sorted(missing)[0]} and {len(missing) - 1} other parameters"
        expected = self._slots[state.number]
        if state.slots.shape != expected.shape or (state.slots != expected).any():
            return f"its composer owns other experts than those of shard {state.number}"
        saved = dict(self._plan.training.expert_optimizer.in_shard(self._experts))
        for layer, weights in enumerate(state.experts):
            if {name: value.shape for name, value in weights.items()} != saved:
                return f"its experts of layer {layer} have other weights than {saved}"
        return _not_finite(state.dense) or "".join(_not_finite(layer) for layer in state.experts)


def _not_finite(tensors: Tensors) -> str:
    wrong = [name for name, value in tensors.items() if not np.isfinite(value).all()]
    return f"its {wrong[0]} contains NaN or infinite numbers" if wrong else ""
