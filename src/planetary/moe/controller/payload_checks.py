"""Whether what a composer sent can be, and its payload what the message says, before it counts and is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from planetary.artifacts.packed_arrays import Packed
from planetary.artifacts.payload_store import PayloadStore
from planetary.core.errors import PlanetaryError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fabric.protocol import messages as m
from planetary.moe.composer.composer_view import routing_from
from planetary.moe.methods.sketch import Sketch, decode
from planetary.moe.methods.surrogate import newer_surrogate
from planetary.moe.methods.tiers import Tier
from planetary.moe.payloads.payloads import fragment_from, sketch_from
from planetary.moe.payloads.shard_payload import shard_from
from planetary.moe.payloads.surrogate_payloads import changed_surrogates, surrogates_bytes, surrogates_from
from planetary.moe.plan.plan import MixturePlan
from planetary.moe.protocol import mixture_messages as mm

KINDS: Mapping[type[m.Message], str] = {
    mm.PublishFragment: "fragment",
    mm.PublishSurrogates: "surrogate",
    mm.SaveShard: "shard",
    mm.OfferSketches: "sketch",
    mm.ViewModel: "view",
}
"""What the payload of a message is, in the store's words."""


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
        """Check a message's payload and put it into the store; return its name, or what is wrong with it.

        Where it is a change of surrogates, it and what it makes are put there, and the name is that of the latter.
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
        damaged = [f"its payload is damaged: expected {said[:24]}…, found {n[:24]}…" for n, said in found if n != said]
        return name, "".join(damaged[:1])

    def defect(self, message: m.Message, data: Packed) -> str:
        """Return what is wrong with a message's payload, or ""."""
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
        shapes = (model.n_latent, rank), (rank, model.n_latent)
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
        """What expert workers would fail on."""
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


def impossible_steps(message: m.Message, plan: MixturePlan) -> str:
    """Return what a composer's message says of steps that cannot be, or ""."""
    progress = getattr(message, "progress", 0)
    if not 0 <= progress <= plan.steps:
        return f"it says that {progress} of the run's {plan.steps} steps are done"
    if isinstance(message, mm.StepTaken | mm.SaveShard) and not 0 <= message.step <= plan.most_steps:
        return f"it says that it has taken {message.step} of {plan.most_steps} steps"
    return ""


def _not_finite(tensors: Tensors) -> str:
    wrong = [name for name, value in tensors.items() if not np.isfinite(value).all()]
    return f"its {wrong[0]} contains NaN or infinite numbers" if wrong else ""
