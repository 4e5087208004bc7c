"""The work of an expert worker (PARALLAX, 4.5, 4.11): experts of one layer from sketches to their next weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from planetary.core.step import GRADIENT, RATE
from planetary.core.tensors import Tensors
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.config import MixtureOptions
from planetary.runs.mixture.methods import ownership
from planetary.runs.mixture.methods.delta import Delta, Form, compress, expand
from planetary.runs.mixture.methods.recent_rows import RecentRows, calibration_rows
from planetary.runs.mixture.methods.sketch import EncodedSketch, Sketch, decode, dense_gates
from planetary.runs.mixture.methods.surrogate import FitOptions, expert_outputs, fit_surrogates
from planetary.runs.mixture.training.participant_states import computed_weights
from planetary.runtime.device_program import DeviceProgram, ResidentTensors, signature

_KEYS = MixtureOptions()


class HeldExperts(msgspec.Struct, frozen=True):
    """A shard's experts of one layer with all that is needed to improve them.

    Attributes:
        weights: float32 [slots, ...] by name.
        moments: of their optimizer.
        residuals: dropped by lossy updates so far, by weight; empty without.
        surrogates: "a" float32 [slots, d_e, r] and "b" [slots, r, d_e], their "error" float32 [slots], and the
            "progress" of the run when they were fitted, int64; empty where composers fit them.
    """

    weights: Tensors
    moments: Tensors
    residuals: Tensors = {}
    surrogates: Tensors = {}


class Improved(msgspec.Struct, frozen=True):
    """Experts of one layer after an update.

    Attributes:
        weights, moments: as `HeldExperts`.
        proxy_before, proxy_after: of each slot, 0 where they were not asked for.
        residuals: as `HeldExperts`.
        deltas: the weights' changes as they travel, by name; empty where the weights travel exactly.
        surrogates: of these weights, as `HeldExperts`; empty where they were not asked for.
    """

    weights: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    proxy_before: np.ndarray
    proxy_after: np.ndarray
    residuals: dict[str, np.ndarray] = {}
    deltas: dict[str, Delta] = {}
    surrogates: dict[str, np.ndarray] = {}


def improve(
    run: DeviceProgram,
    weights: Tensors,
    moments: Tensors,
    encoded: Sequence[EncodedSketch],
    *,
    rate: float,
    slots: np.ndarray,
    experts: int,
    inner_steps: int = _KEYS.inner_steps,
    trust: float = _KEYS.trust,
    proxies: bool = False,
) -> Improved:
    """Return the experts after `inner_steps` steps on the Taylor proxy ⟨G, E(u; θ+Δ) − E(u; θ)⟩ + λ/2 ‖Δ‖².

    The moments persist with the expert. With one inner step and λ = 0 this is the composer's own update.

    Raises:
        TrustError: a sketch is damaged.
    """
    sketches = [decode(sketch) for sketch in encoded]
    held = ResidentTensors(run)
    held.put({**weights, **moments})
    inputs = []
    for i, sketch in enumerate(sketches):
        arrays = _inputs(run, sketch, slots, experts)
        inputs.append({name: f"{name}/{i}" for name in arrays})
        held.put({f"{name}/{i}": value for name, value in arrays.items()})
    before = _proxies(held, inputs) if proxies else np.zeros(len(slots))
    for _ in range(inner_steps):
        _find_gradients(held, inputs)
        if trust:
            for name, start in weights.items():
                far = np.float32(trust) * (held.get([name])[name] - start)
                held.put({GRADIENT + name: held.get([GRADIENT + name])[GRADIENT + name] + far})
        held.call("update", arrays={RATE.name: np.array(rate, np.float32)})
    after = _proxies(held, inputs) if proxies else np.zeros(len(slots))
    now = held.get(weights)
    if trust and proxies:
        after = after + [
            trust / 2 * sum(float(np.sum(np.square(now[n][s] - w[s]))) for n, w in weights.items())
            for s in range(len(slots))
        ]
    return Improved(now, held.get(moments), before, after)


def returned(before: HeldExperts, improved: Improved, form: Form, keep: float) -> Improved:
    """Return the experts as their owner gets them, with the new residuals and the deltas that travel.

    A delta is a message per weight tensor of the layer. "exact" has the bits of the worker's own tensors. So travels a
    result that is not finite: no other form can represent it, and the judge refuses it.
    """
    if form == "exact" or not all(np.isfinite(value).all() for value in improved.weights.values()):
        return improved
    weights, left, deltas = {}, {}, {}
    for name, start in before.weights.items():
        delta, left[name] = compress(improved.weights[name] - start, before.residuals.get(name), form, keep=keep)
        weights[name], deltas[name] = start + expand(delta), delta
    return msgspec.structs.replace(improved, weights=weights, residuals=left, deltas=deltas)


def refitted(
    before: HeldExperts,
    improved: Improved,
    encoded: Sequence[EncodedSketch],
    *,
    progress: int,
    slots: np.ndarray,
    config: LatentMoeConfig,
    options: FitOptions,
) -> Improved:
    """Return the experts with surrogates fitted to their new weights on the sketches' tokens (4.5, 4.8).

    The start are the surrogates before. A result that is not finite keeps them, and is refused.

    Raises:
        TrustError: a sketch is damaged.
    """
    new = dict(before.surrogates)
    if all(np.isfinite(value).all() for value in improved.weights.values()):
        rows = sketched_rows([decode(sketch) for sketch in encoded], config)
        u, counts = calibration_rows(rows, slots, options.rows)
        wanted = expert_outputs(computed_weights(improved.weights, config), u)
        fitted = fit_surrogates(u, counts, wanted, a=new["a"], b=new["b"], options=options)
        new |= {"a": fitted.a, "b": fitted.b, "error": fitted.error.astype(np.float32)}
    return msgspec.structs.replace(improved, surrogates={**new, "progress": np.array(progress, np.int64)})


def sketched_rows(sketches: Sequence[Sketch], config: LatentMoeConfig) -> RecentRows:
    """Return all tokens of sketches of one layer as rows that surrogates are fitted on."""
    gates = [dense_gates(sketch, config.n_expert).astype(np.float32) for sketch in sketches]
    return RecentRows(np.concatenate([sketch.inputs for sketch in sketches]), np.concatenate(gates))


def _inputs(run: DeviceProgram, sketch: Sketch, slots: np.ndarray, experts: int) -> dict[str, np.ndarray]:
    """A sketch as the program takes it; fewer tokens than it is made for are filled up with rows of zeros."""
    matrix = ownership.slot_matrix(slots[None], experts)[0]
    gates = dense_gates(sketch, experts) @ matrix
    arrays = {"u": sketch.inputs, "g_y": sketch.output_gradients, "gates": gates}
    tokens = next(s.shape[0] for s in signature(run.program, "gradients").arguments if s.name == "u")
    missing = tokens - len(gates)
    return {name: np.pad(a, ((0, missing), (0, 0))) if missing else a for name, a in arrays.items()}


def _find_gradients(held: ResidentTensors, inputs: Sequence[Mapping[str, str]]) -> None:
    """Put the gradients of one layer's experts on the device: the mean over the sketches, in their order."""
    total: dict[str, np.ndarray] = {}
    for names in inputs:
        found = held.call("gradients", names)
        if len(inputs) > 1:  # one sketch's gradients need not leave the device
            new = held.get(found)
            total = {name: total[name] + value for name, value in new.items()} if total else new
    held.put({name: value / np.float32(len(inputs)) for name, value in total.items()})


def _proxies(held: ResidentTensors, inputs: Sequence[Mapping[str, str]]) -> np.ndarray:
    found = []
    for names in inputs:
        held.call("proxy", names)
        found.append(held.get(["proxy"])["proxy"])
    return np.mean(found, axis=0)
