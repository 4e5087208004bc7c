"""How a composer sees the model: the loss with surrogates in it, and where the router sends tokens (table 12)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import Packed, pack_arrays, unpack_arrays
from planetary.core.errors import RemoteProtocolError
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.composer.data import Batch
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.training.composer import ResidentComposer
from planetary.runs.mixture.training.participant_states import Surrogates
from planetary.runs.mixture.training.routing import all_layers

ROWS = 128
"""Tokens whose routing composers compare."""


class ComposerView(msgspec.Struct, frozen=True):
    """Mean cross-entropy with own experts and others' surrogates, and with surrogates only; the router's choices.

    Attributes:
        mixed, surrogates: nats per token.
        probabilities: of the router for the first batch's first tokens in every layer, f32 [rows, experts].
    """

    mixed: float
    surrogates: float
    probabilities: np.ndarray


def composer_view(
    composer: ResidentComposer, model: LatentMoeConfig, bank: Surrogates, batches: Sequence[Batch]
) -> ComposerView:
    """Evaluate a composer's view on held-out batches."""
    losses: dict[bool, list[float]] = {True: [], False: []}
    first: np.ndarray | None = None
    for tokens, targets in batches:
        for own in (True, False):
            found = composer.evaluate(bank, tokens, targets, own=own)
            losses[own].append(float(found["cross_entropy"]))
            if first is None:
                every = all_layers(found, model.n_layer).reshape(model.n_layer, -1, model.n_expert)
                first = every[:, :ROWS].reshape(-1, model.n_expert)
    assert first is not None
    return ComposerView(float(np.mean(losses[True])), float(np.mean(losses[False])), first)


def view_bytes(view: ComposerView) -> memoryview:
    """Return the router's choices as a payload of kind `view`."""
    return pack_arrays("view", None, {"probabilities": view.probabilities})


def routing_from(data: Packed, plan: MixturePlan) -> np.ndarray:
    """Return the router's choices f32 [rows, experts], or raise `RemoteProtocolError`."""
    found = unpack_arrays(data, "view")[1].get("probabilities", np.zeros(0))
    rows = plan.model.n_layer * min(ROWS, plan.tokens_per_step)
    if found.shape != (rows, plan.model.n_expert) or not np.isfinite(found).all():
        raise RemoteProtocolError(f"routing is finite and [{rows}, {plan.model.n_expert}], found {list(found.shape)}")
    return found
