"""Which of an expert worker's updates count: norms and moments of each (`accept_slots`), and audits (PARALLAX, 4.12 and
the outlook), which recompute the gain on the worker's sketches and the effect on another sketch, and compare it with
the result of a second worker.

Their power, measured on a small run: a gain computed again differs from an honest claim by less than 10⁻⁴ of it, so a
false one is found at once, and with it an update in a wrong direction. A sketch of other tokens is weak evidence on one
update: honest ones change the experts' outputs at a cosine of -0.03 ± 0.1 to those tokens'
    output
gradients late in training, where their opposite has 0.03 ± 0.1. So only a cosine far from both is refused. Two workers'
results differ where a worker errs in the weights it returns, whatever it claims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
import numpy as np

from planetary.core.tensors import Tensors
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.config import MixtureOptions
from planetary.runs.mixture.methods import ownership
from planetary.runs.mixture.methods.acceptance import ExpertState, Policy, Refusal, Update, Verdict, judge
from planetary.runs.mixture.methods.moments import COUNT, MomentRule, too_much_left, wrong_count
from planetary.runs.mixture.methods.recent_rows import RecentRows, calibration_rows
from planetary.runs.mixture.methods.sketch import Sketch, dense_gates
from planetary.runs.mixture.methods.surrogate import expert_outputs, surrogate_outputs
from planetary.runs.mixture.training.expert_work import HeldExperts, Improved
from planetary.runs.mixture.training.participant_states import computed_weights
from planetary.runs.mixture.training.settings import MoeTraining

_KEYS = MixtureOptions()

SAME_CLAIM = 0.01
"""How far a claimed gain may be from the one computed again, relative to it."""

MOST_HARM = 0.3
"""Cosine between an update's effect and other tokens' output gradients; of 474 honest updates one had more."""

FEW_ROWS = 32
"""Tokens of an expert below which that cosine is noise."""

SAME_RESULT = 0.05
"""How far two workers' deltas may be apart, relative to the first: processors round differently."""


SAME_ERROR = 1.02
"""Largest squared error of a surrogate over that of the one before, both on the new weights: a ridge is added."""


class Effect(msgspec.Struct, frozen=True):
    """The effect of new weights of experts on a sketch, float64 [slots].

    Attributes:
        change: of the Taylor proxy Σ ⟨g_e g_y, E(u)⟩ (13.5); below 0: the loss falls.
        cosine: that over Σ ‖g_e g_y‖ ‖ΔE(u)‖; 0 where nothing changes.
        size: Σ |⟨g_e g_y, E(u)⟩| before: the scale of rounding errors.
        rows: tokens of the expert.
    """

    change: np.ndarray
    cosine: np.ndarray
    size: np.ndarray
    rows: np.ndarray


def effect(before: Tensors, after: Tensors, sketch: Sketch, slots: np.ndarray, config: LatentMoeConfig) -> Effect:
    """Return the effect of `after` in place of `before`, both [slots, ...] by name; `slots` i32: one layer's."""
    old, new = computed_weights(before, config), computed_weights(after, config)
    gates = dense_gates(sketch, config.n_expert)
    found = np.zeros((4, len(slots)))
    for slot, expert in enumerate(slots):
        if expert == ownership.EMPTY:
            continue
        rows = np.flatnonzero(gates[:, expert])
        u = sketch.inputs[rows][None]
        one, other = (expert_outputs({n: v[slot : slot + 1] for n, v in w.items()}, u)[0] for w in (old, new))
        wanted = gates[rows, expert, None] * sketch.output_gradients[rows]
        change = other.astype(np.float64) - one
        found[0, slot] = np.sum(wanted * change)
        most = np.sum(np.linalg.norm(wanted, axis=1) * np.linalg.norm(change, axis=1))
        found[1, slot] = found[0, slot] / most if most > 0 else 0.0
        found[2, slot] = np.sum(np.abs(np.sum(wanted * one, axis=1)))
        found[3, slot] = len(rows)
    return Effect(*found)


def audit(
    before: Tensors,
    improved: Improved,
    used: Sequence[Sketch],
    other: Sketch | None,
    *,
    layer: int,
    slots: np.ndarray,
    config: LatentMoeConfig,
    trust: float = _KEYS.trust,
) -> dict[int, Verdict]:
    """Return by slot the defect of an update; slots without one are not in it.

    Args:
        before: experts' weights, [slots, ...] by name.
        improved: the result. An update that is not finite is left to `acceptance.judge`; in a lossy form the gain is
            not checked, as it is claimed for the original update.
        used: the sketches the worker had.
        other: one it had not.
        layer: for words.
        slots: experts in the slots.
        config: the model.
        trust: λ of the proximal term, which a claim contains.
    """
    if not all(np.isfinite(value).all() for value in improved.weights.values()):
        return {}
    found: dict[int, Verdict] = {}
    owned = [(slot, int(expert)) for slot, expert in enumerate(slots) if expert != ownership.EMPTY]
    if not improved.deltas:
        effects = [effect(before, improved.weights, sketch, slots, config) for sketch in used]
        change, size = (np.mean([getattr(e, what) for e in effects], axis=0) for what in ("change", "size"))
        for slot, expert in owned:
            moved = sum(float(np.sum(np.square(improved.weights[n][slot] - v[slot]))) for n, v in before.items())
            gain = -(change[slot] + trust / 2 * moved)
            claim = float(improved.proxy_before[slot] - improved.proxy_after[slot])
            # Proxies are sums in float32, of which a gain is a small difference.
            if not abs(claim - gain) <= SAME_CLAIM * abs(gain) + 1e-5 * size[slot]:
                why = f"layer {layer} expert {expert}: it claims a gain of {claim:.3g}, its weights have {gain:.3g}"
                found[slot] = Verdict(Refusal.FALSE_CLAIM, why)
    if other is not None:
        there = effect(before, improved.weights, other, slots, config)
        for slot, expert in owned:
            if there.rows[slot] >= FEW_ROWS and there.cosine[slot] > MOST_HARM:
                why = (
                    f"layer {layer} expert {expert}: on other tokens it raises the loss, at a cosine of "
                    f"{there.cosine[slot]:.2f} (at most {MOST_HARM})"
                )
                found.setdefault(slot, Verdict(Refusal.HARMFUL, why))
    return found


def disagreements(
    before: Tensors, first: Improved, second: Improved, *, layer: int, slots: np.ndarray
) -> dict[int, Verdict]:
    """Return by slot where two workers that had the same work returned different experts: neither counts then."""
    found = {}
    for slot, expert in enumerate(slots):
        if expert == ownership.EMPTY:
            continue
        apart = _norm([first.weights[n][slot] - second.weights[n][slot] for n in before])
        moved = _norm([first.weights[n][slot] - v[slot] for n, v in before.items()])
        if not apart <= SAME_RESULT * moved:  # not finite: neither
            why = f"layer {layer} expert {expert}: two workers' updates are {apart:.3g} apart, the first is {moved:.3g}"
            found[slot] = Verdict(Refusal.DISAGREEMENT, why)
    return found


def unusable_surrogates(surrogates: Tensors, *, layer: int, slots: np.ndarray) -> dict[int, Verdict]:
    """Return by slot which surrogates an expert worker returned with NaN or infinite numbers in them."""
    found = {}
    for slot, expert in enumerate(slots):
        if expert != ownership.EMPTY and not all(np.isfinite(v[slot]).all() for v in surrogates.values() if v.ndim):
            why = f"layer {layer} expert {expert}: its surrogate contains NaN or infinite numbers"
            found[slot] = Verdict(Refusal.NOT_FINITE, why)
    return found


class JudgedFit(msgspec.Struct, frozen=True):
    """Attributes:
    poor: by slot, surrogates that stand for the new weights worse than those before.
    errors: relative error of each, float32 [slots].
    """

    poor: dict[int, Verdict]
    errors: np.ndarray


def judge_fit(
    before: Tensors,
    improved: Improved,
    rows: RecentRows,
    *,
    layer: int,
    slots: np.ndarray,
    config: LatentMoeConfig,
    count: int,
) -> JudgedFit:
    """Return how well an expert worker's surrogates stand for the new weights, on the rows it had.

    A fit keeps the best it has seen, the first of which is the start with the best B for it: an honest one is no worse
    than the surrogates before.

    Args:
        before: surrogates the fit started from.
        improved: experts and their new surrogates.
        rows: tokens of the sketches the worker had.
        layer: for words.
        slots: experts in the slots.
        config: the model.
        count: of rows per expert, at most.
    """
    u, weights = calibration_rows(rows, slots, count)
    wanted = expert_outputs(computed_weights(improved.weights, config), u)

    def weighed(values: np.ndarray) -> np.ndarray:
        return np.sum(weights[:, :, None] * np.square(values, dtype=np.float64), (1, 2))

    pairs = before, improved.surrogates
    old, new = (weighed(surrogate_outputs(pair["a"], pair["b"], u) - wanted) for pair in pairs)
    poor = {}
    for slot, expert in enumerate(slots):
        if expert != ownership.EMPTY and not new[slot] <= SAME_ERROR * old[slot]:
            why = (
                f"layer {layer} expert {expert}: the squared error of its surrogate is {new[slot]:.3g}, that of the "
                f"one before is {old[slot]:.3g}"
            )
            poor[slot] = Verdict(Refusal.POOR_SURROGATE, why)
    return JudgedFit(poor, np.sqrt(new / np.maximum(weighed(wanted), 1e-30)).astype(np.float32))


def _norm(arrays: Sequence[np.ndarray]) -> float:
    return float(np.sqrt(sum(float(np.sum(np.square(array, dtype=np.float64))) for array in arrays)))


def accept_slots(
    before: HeldExperts,
    improved: Improved,
    training: MoeTraining,
    *,
    layer: int,
    owner: int,
    slots: np.ndarray,
    versions: tuple[int, int] = (0, 0),
    doubts: Mapping[int, Verdict] = MappingProxyType({}),
) -> tuple[HeldExperts, list[Verdict]]:
    """Return the experts with the accepted ones' updates only, and the verdict of every owned expert.

    Nothing of a refused one stays. Moments that are not per expert (the optimizer's count) go on for the whole layer
    where any update counts; where none does, the experts are those before.

    Args:
        before: the experts.
        improved: the result, with arrays of the same names, shapes and types.
        training: how they are trained, and which updates count.
        layer, owner: whose they are.
        slots: which expert is in each slot.
        versions: of these experts, and of those the sketches were made with; equal in lock step.
        doubts: by slot, defects that other checks found.
    """
    policy = training.acceptance or Policy()
    rule = MomentRule(training.experts)
    doubts = {**_layer_doubts(before, improved, training, layer, slots), **doubts}
    steps = max((int(v) for n, v in before.moments.items() if n.endswith(COUNT)), default=0) + training.inner_steps
    old_weights = before.weights
    weights = {name: value.copy() for name, value in improved.weights.items()}
    moments = {name: value.copy() for name, value in improved.moments.items()}
    # A result that is not finite travels exactly in a lossy run, too: then the earlier residuals still wait.
    residuals = {name: value.copy() for name, value in (improved.residuals or before.residuals).items()}
    surrogates = {name: value.copy() for name, value in (improved.surrogates or before.surrogates).items()}
    verdicts = []

    def put_back(slot: int) -> None:
        for name, value in old_weights.items():
            weights[name][slot] = value[slot]
        for name, value in before.moments.items():
            if value.ndim:
                moments[name][slot] = value[slot]
        for name, value in surrogates.items():
            if value.ndim:
                value[slot] = before.surrogates[name][slot]
        for name, value in residuals.items():
            value[slot] = before.residuals[name][slot] if name in before.residuals else 0

    for slot, expert in enumerate(slots):
        if expert == ownership.EMPTY:
            put_back(slot)  # whatever came for it
            continue
        held = {n: v[slot] for n, v in old_weights.items()}
        state = ExpertState(layer, int(expert), owner, versions[0], held, steps)
        update = Update(
            layer,
            int(expert),
            owner,
            versions[1],
            {n: improved.weights[n][slot] - v[slot] for n, v in old_weights.items()},
            {n: v[slot] for n, v in improved.moments.items() if v.ndim},
            float(improved.proxy_before[slot]),
            float(improved.proxy_after[slot]),
            {n: v[slot] for n, v in improved.residuals.items()},
        )
        verdict = judge(state, update, policy, rule)
        if verdict.accepted:
            verdict = doubts.get(slot, verdict)
        verdicts.append(verdict)
        if not verdict.accepted:
            put_back(slot)
    if not any(verdict.accepted for verdict in verdicts):
        return before, verdicts
    return HeldExperts(weights, moments, residuals, surrogates), verdicts


def _layer_doubts(
    before: HeldExperts, improved: Improved, training: MoeTraining, layer: int, slots: np.ndarray
) -> dict[int, Verdict]:
    """Return by slot the defects of the shared state, and those that show over all experts only."""
    owned = {slot: int(expert) for slot, expert in enumerate(slots) if expert != ownership.EMPTY}
    wrong = wrong_count(before.moments, improved.moments, training.inner_steps)
    if wrong:
        return {slot: Verdict(Refusal.MOMENTS, f"layer {layer} expert {e}: {wrong}") for slot, e in owned.items()}
    form, keep = training.update_form, training.update_keep
    left = too_much_left(before.weights, improved.weights, improved.residuals, form, keep)
    return {
        slot: Verdict(Refusal.RESIDUAL, f"layer {layer} expert {owned[slot]}: {why}")
        for slot, why in left.items()
        if slot in owned
    }
