"""Fitting surrogates (PARALLAX, 4.8): Ê(u) = ReLU(u A)² B to E(u) on recent rows; of SwiGLU experts with their units,
of which A is gate and up side by side.

For a given A the best B is a ridge regression, so only A is searched: Adam on the remaining error (variable projection;
at the best B the gradient with respect to A needs no derivative of B). A starts from the current surrogate. Rows count
with g_e²: an error is felt after the gate.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from planetary.core.errors import NumericsError, TrustError, UserError
from planetary.core.tensors import Tensors
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.config import MoeConfig


class FitOptions(msgspec.Struct, frozen=True):
    """How surrogates are fitted.

    Attributes:
        steps: of Adam on A per refresh; 0: only B is solved again.
        rate: of Adam, relative to the root mean square of A's elements.
        ridge: added to the diagonal of the regression, relative to the mean.
        rows: per expert, at most.
        capacity: of the buffer of recent rows.
    """

    steps: int = MoeConfig().fit_steps
    rate: float = 0.03
    ridge: float = 1e-4
    rows: int = 512
    capacity: int = 4096

    def __post_init__(self) -> None:
        """Raise `UserError` for options outside their range."""
        if self.steps < 0 or self.rows < 1 or self.capacity < 1 or not (self.rate > 0 and self.ridge > 0):
            raise UserError(f"surrogate fitting: steps ≥ 0, rows, capacity ≥ 1, rate, ridge > 0; found {self}")


class Fitted(msgspec.Struct, frozen=True):
    """Surrogates of E experts after a fit.

    Attributes:
        a: float32 [E, d_e, r], of SwiGLU [E, d_e, 2r].
        b: float32 [E, r, d_e].
        error: float64 [E], root of the weighted squared error over the weighted energy of the outputs; 0 without rows.
    """

    a: np.ndarray
    b: np.ndarray
    error: np.ndarray


class SurrogateMessage(msgspec.Struct, frozen=True):
    """An owner's publication about one expert. A receiver keeps the newest version only."""

    layer: int
    expert: int
    owner: int
    version: int
    a: np.ndarray
    b: np.ndarray
    checksum: str


def are_copies(rank: int, config: LatentMoeConfig) -> bool:
    """Whether surrogates of this rank are exact copies, which need no fit."""
    return rank >= config.n_hidden


def expert_outputs(weights: Tensors, u: np.ndarray) -> np.ndarray:
    """Return outputs [E, n, d_e] of experts for u [E, n, d_e].

    ReLU(u W1)² W2 with W1 "up" [E, d_e, h] and W2 "down" [E, h, d_e]; with a third matrix "gate", SwiGLU.
    """
    return surrogate_outputs(*_as_surrogate(weights), u)


def surrogate_outputs(a: np.ndarray, b: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return outputs [E, n, d_e] of surrogates for u [E, n, d_e]."""
    return _units(u @ a, b.shape[1])[0] @ b


def _as_surrogate(weights: Tensors) -> tuple[np.ndarray, np.ndarray]:
    """Return experts as surrogates of their own width."""
    up, down = weights["up"], weights["down"]
    return (np.concatenate([weights["gate"], up], axis=-1) if "gate" in weights else up), down


def _units(read: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the units [E, n, r] of products u A, and their slopes: gradients of u A for gradients of one."""
    if read.shape[-1] == rank:
        positive = np.maximum(read, 0)
        return positive * positive, 2 * positive
    gate, up = read[..., :rank], read[..., rank:]
    open_ = 1 / (1 + np.exp(-gate))
    silu = gate * open_
    return silu * up, np.concatenate([up * (open_ + silu * (1 - open_)), silu], axis=-1)


def fit_surrogates(
    u: np.ndarray, weights: np.ndarray, targets: np.ndarray, *, a: np.ndarray, b: np.ndarray, options: FitOptions
) -> Fitted:
    """Fit E surrogates at once.

    Args:
        u: inputs float32 [E, n, d_e].
        weights: float32 [E, n], none negative; an expert whose weights are all 0 keeps the surrogate.
        targets: outputs of the real experts, float32 [E, n, d_e].
        a: float32 [E, d_e, r], the start; of SwiGLU [E, d_e, 2r].
        b: float32 [E, r, d_e], the present solution.
        options: see there.

    Raises:
        NumericsError: inputs, targets or the result are not finite.
    """
    if not (np.isfinite(u).all() and np.isfinite(targets).all() and np.isfinite(weights).all()):
        raise NumericsError("cannot fit surrogates: their calibration rows contain NaN or infinite numbers")
    root = np.sqrt(weights)[:, :, None].astype(np.float32)
    known = weights.sum(axis=1) > 0
    wanted = root * targets
    energy = np.sum(np.square(wanted, dtype=np.float64), axis=(1, 2))
    start = a
    mean, square = np.zeros_like(a), np.zeros_like(a)
    size = np.sqrt(np.mean(np.square(a), axis=(1, 2), keepdims=True)) + np.float32(1e-12)
    scale = np.where(energy > 0, 1 / np.maximum(energy, 1e-30), 0)[:, None, None].astype(np.float32)
    best_a, best_b, best = a, b, np.full(len(a), np.inf)
    for step in range(options.steps + 1):
        units, slopes = _units(u @ a, b.shape[1])
        features = root * units
        solved = _ridge(features, wanted, options.ridge)
        error = features @ solved - wanted
        left = np.sum(np.square(error, dtype=np.float64), axis=(1, 2))
        better = known & (left < best)
        best = np.where(better, left, best)
        best_a, best_b = (np.where(better[:, None, None], n, o) for n, o in ((a, best_a), (solved, best_b)))
        if step == options.steps:
            break
        pulled = (error * scale) @ solved.transpose(0, 2, 1) * root
        gradient = u.transpose(0, 2, 1) @ (np.tile(pulled, a.shape[2] // b.shape[1]) * slopes)
        mean = np.float32(0.9) * mean + np.float32(0.1) * gradient
        square = np.float32(0.99) * square + np.float32(0.01) * gradient * gradient
        unit = (mean / np.float32(1 - 0.9 ** (step + 1))) / (
            np.sqrt(square / np.float32(1 - 0.99 ** (step + 1))) + np.float32(1e-12)
        )
        a = a - np.float32(options.rate * (1 - step / options.steps)) * size * unit
    kept = known[:, None, None]
    new_a, new_b = np.where(kept, best_a, start), np.where(kept, best_b, b)
    if not (np.isfinite(new_a).all() and np.isfinite(new_b).all()):
        raise NumericsError("fitting surrogates gave NaN or infinite numbers")
    relative = np.where(known & (energy > 0), np.sqrt(best / np.maximum(energy, 1e-300)), 0.0)
    return Fitted(new_a.astype(np.float32), new_b.astype(np.float32), relative)


def initial_surrogates(weights: Tensors, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return surrogates to start from: evenly spaced hidden units of each expert, outputs scaled by h / r.

    With `rank` equal to the expert's width they are exact copies, above it exact copies and units that do nothing.

    Args:
        weights: of the experts, as `expert_outputs` takes them.
        rank: r.
    """
    whole, down = _as_surrogate(weights)
    hidden, latent = down.shape[-2:]
    if rank < 1:
        raise UserError(f"a surrogate's rank is at least 1, found {rank}")
    used = min(rank, hidden)
    chosen = np.arange(used) * hidden // used
    parts = []
    for matrix in np.split(whole, whole.shape[-1] // hidden, axis=-1):
        parts.append(np.zeros((*matrix.shape[:-1], rank), np.float32))
        parts[-1][..., :used] = matrix[..., chosen]
    b = np.zeros((*down.shape[:-2], rank, latent), np.float32)
    b[..., :used, :] = down[..., chosen, :] * np.float32(hidden / used)
    return np.concatenate(parts, axis=-1), b


def surrogate_message(
    layer: int, expert: int, *, owner: int, version: int, a: np.ndarray, b: np.ndarray
) -> SurrogateMessage:
    """Return the message with the checksum."""
    return SurrogateMessage(layer, expert, owner, version, a, b, _checksum((layer, expert, owner, version), a, b))


def newer_surrogate(held: int, message: SurrogateMessage, owner: int) -> bool:
    """Return whether a message replaces version `held`; older ones are dropped.

    Raises:
        TrustError: it is damaged, or comes from a composer that does not own the expert.
    """
    found = _checksum((message.layer, message.expert, message.owner, message.version), message.a, message.b)
    where = f"the surrogate of layer {message.layer} expert {message.expert}, version {message.version},"
    if found != message.checksum:
        raise TrustError(f"{where} is damaged: expected sha256 {message.checksum[:12]}…, found {found[:12]}…")
    if message.owner != owner:
        raise TrustError(f"{where} comes from composer {message.owner}, but composer {owner} owns that expert")
    return message.version > held


def _ridge(features: np.ndarray, wanted: np.ndarray, ridge: float) -> np.ndarray:
    gram = features.transpose(0, 2, 1) @ features
    rank = gram.shape[-1]
    level = np.trace(gram, axis1=1, axis2=2) / rank
    diagonal = (ridge * level + 1e-12)[:, None, None] * np.eye(rank)
    return np.linalg.solve(gram + diagonal, features.transpose(0, 2, 1) @ wanted).astype(np.float32)


def _checksum(place: tuple[int, ...], a: np.ndarray, b: np.ndarray) -> str:
    found = hashlib.sha256(f"{place}/{a.shape}/{b.shape}".encode())
    for array in (a, b):
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()
