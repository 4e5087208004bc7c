"""A composer whose parameters, optimizer state, experts and surrogates stay on its device from step to step."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec
import numpy as np

from planetary.core.step import GRADIENT, RATE
from planetary.core.tensors import Tensors
from planetary.moe.program.signature import in_layer
from planetary.moe.training.composer import ComposerSteps, owned_by
from planetary.moe.training.states import ComposerState, Surrogates
from planetary.runtime.device_program import ResidentTensors
from planetary.runtime.program_runner import Runner, signature

replace = msgspec.structs.replace


class ResidentComposer:
    """The transitions of `ComposerSteps` on the device. Used by one thread at a time.

    Everything that a step takes besides its batch is sent when it has changed on the host, and read when the host asks
    for it. Experts are taken as they are: what is trained, or under offload what they compute with.

    Args:
        steps: the same transitions from host to host.
        run: the mixture's whole program.
        state: where it starts.
    """

    def __init__(self, steps: ComposerSteps, run: Runner, state: ComposerState) -> None:
        self._steps, self._held = steps, ResidentTensors(run)
        gradients = signature(run.program, "composer_gradients")
        self._found = [s.name for s in gradients.results]
        self._rest = state  # without what is on the device
        self._names: tuple[dict[str, str], ...] = ()
        self._layers: list[tuple[dict[str, str], dict[str, str]]] = []
        self._slots: np.ndarray | None = None
        self.replace_state(state)

    @property
    def state(self) -> ComposerState:
        """Everything, on the host."""
        dense, moments = (self._group(names) for names in self._names)
        return replace(self.without_dense, dense=dense, dense_moments=moments)

    @property
    def without_dense(self) -> ComposerState:
        """Experts and their moments on the host; of the dense parameters nothing."""
        experts = tuple(self._group(names) for names, _ in self._layers)
        moments = tuple(self._group(names) for _, names in self._layers)
        return replace(self._rest, experts=experts, expert_moments=moments)

    def replace_state(self, state: ComposerState) -> None:
        """Go on from another state. Arrays that are the ones here already are not sent again."""
        before = {path for names in self._every() for path in names.values()}
        self._names = ({n: n for n in state.dense}, {n: f"moments/{n}" for n in state.dense_moments})
        self._layers = [
            ({n: in_layer(i, "experts", n) for n in held}, {n: f"expert_moments/{i}/{n}" for n in moments})
            for i, (held, moments) in enumerate(
                zip(state.experts, state.expert_moments or ({},) * len(state.experts), strict=True)
            )
        ]
        groups = [state.dense, state.dense_moments]
        for i, held in enumerate(state.experts):
            groups += [held, state.expert_moments[i] if state.expert_moments else {}]
        every = self._every()
        self._held.drop(before - {path for names in every for path in names.values()})
        for names, group in zip(every, groups, strict=True):
            self._held.put({names[name]: value for name, value in group.items()})
        if self._slots is None or not np.array_equal(self._slots, state.slots):
            self._slots = state.slots
            self._held.put(owned_by(state.slots, self._steps.config))
        nothing = tuple({} for _ in state.experts)
        self._rest = replace(state, dense={}, dense_moments={}, experts=nothing, expert_moments=nothing)

    def named(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Return tensors of a fragment on the host; see `ComposerState.named`."""
        dense = self._held.get(name for name in names if name in self._names[0])
        if len(dense) == len(names):
            return dense
        return replace(self.without_dense, dense=dense).named(names)

    def adopt(self, tensors: Tensors) -> None:
        """Take tensors of a fragment in place of those here; see `ComposerState.with_named`."""
        if all(name in self._names[0] for name in tensors):
            self._held.put(tensors)
        else:
            self.replace_state(self.state.with_named(tensors))

    def replace_experts(self, layer: int, weights: Tensors, fitted: Tensors) -> None:
        """Take one layer's experts and the surrogates that expert workers fitted to them."""
        self._layers[layer] = ({n: in_layer(layer, "experts", n) for n in weights}, self._layers[layer][1])
        self._held.put({in_layer(layer, "experts", n): value for n, value in weights.items()})
        every = list(self._rest.fitted or ({} for _ in self._layers))
        every[layer] = fitted
        self._rest = replace(self._rest, fitted=tuple(every))

    def gradients(self, bank: Surrogates | None, tokens: np.ndarray, targets: np.ndarray) -> float:
        """Compute the gradients on a batch i32 [batch, T]; return the cross-entropy. `update` takes them."""
        self._put_bank(bank)
        self._held.call("composer_gradients", arrays={"tokens": tokens, "targets": targets})
        return float(self._held.get(["cross_entropy"])["cross_entropy"])

    def update(self, step: int, *, experts: bool) -> None:
        """Take an optimizer step of the dense parameters, and with `experts` of the own ones (direct ownership)."""
        training = self._steps.training
        rate = {RATE.name: np.array(training.dense_schedule.rate(step), np.float32)}
        self._held.call("composer_update", self._names[1], arrays=rate)
        self._held.drop(["gradient_norm"])
        if not experts:
            return
        rate = {RATE.name: np.array(training.expert_schedule.rate(step), np.float32)}
        for i, (held, moments) in enumerate(self._layers):
            gradients = {GRADIENT + n: GRADIENT + in_layer(i, "experts", n) for n in held}
            self._held.call("expert_update", {**held, **moments, **gradients}, arrays=rate)
            self._held.drop(["gradient_norm"])
        self._rest = replace(self._rest, residuals=tuple({} for _ in self._layers))

    def seen(self, layers: Iterable[int], parts: Iterable[str] = ("u", "g_y", "gates")) -> dict[str, np.ndarray]:
        """Return what layers' experts saw at the last `gradients`, by full name."""
        parts = tuple(parts)
        return self._held.get(in_layer(layer, "seen", part) for layer in layers for part in parts)

    def end_step(self) -> None:
        """Remember the rows that surrogates are fitted on, and free what the step has left."""
        if self._steps.remembers:
            rows = self.seen(range(len(self._layers)), ("u", "gates"))
            self._rest = self._steps.remember(self._rest, rows)
        self._held.drop(self._found)

    def evaluate(
        self, bank: Surrogates, tokens: np.ndarray, targets: np.ndarray, *, own: bool = True
    ) -> dict[str, np.ndarray]:
        """Return the results of `composer_evaluate`; not `own`: with surrogates in place of all experts."""
        self._put_bank(bank)
        nothing = {} if own else owned_by(self._rest.owning_nothing().slots, self._steps.config)
        batch = {"tokens": tokens, "targets": targets}
        found = self._held.call("composer_evaluate", arrays={**nothing, **batch})
        results = self._held.get(found)
        self._held.drop(found)
        return results

    def _put_bank(self, bank: Surrogates | None) -> None:
        for layer, (a, b) in enumerate(zip(bank.a, bank.b, strict=True) if bank is not None else ()):
            self._held.put({in_layer(layer, "surrogates", "a"): a, in_layer(layer, "surrogates", "b"): b})

    def _every(self) -> list[dict[str, str]]:
        return [*self._names, *(names for pair in self._layers for names in pair)]

    def _group(self, names: dict[str, str]) -> Tensors:
        found = self._held.get(names.values())
        return {name: found[path] for name, path in names.items()}
