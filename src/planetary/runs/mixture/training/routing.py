"""How far composers agree about routing (PARALLAX, table 12): the overlap of their choices and the KL divergence."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from planetary.core.errors import LocalProtocolError
from planetary.core.tensors import Tensors
from planetary.runs.mixture.program.signature import in_layer

_SMALLEST = 1e-30  # a probability that underflowed counts as this


class RoutingAgreement(msgspec.Struct, frozen=True):
    """Means over tokens and over ordered pairs of composers.

    Attributes:
        overlap: part of the k chosen experts both chose; 1 when all composers route alike.
        divergence: KL(p_i ‖ p_j) of the router's probabilities, in nats; 0 when all are equal.
    """

    overlap: float
    divergence: float


def routing_agreement(probabilities: Sequence[np.ndarray], active: int) -> RoutingAgreement:
    """Return how far composers agree about the same tokens.

    Args:
        probabilities: per composer, softmax over all experts before the choice, float [tokens, experts].
        active: experts per token, k.

    Raises:
        LocalProtocolError: fewer than two composers, or shapes that differ.
    """
    shapes = {p.shape for p in probabilities}
    if len(probabilities) < 2 or len(shapes) != 1:
        raise LocalProtocolError(
            "agreement about routing is between two or more composers over the same tokens, found "
            f"{len(probabilities)} with probabilities of shapes {sorted(shapes)}"
        )
    chosen = [_chosen(p, active) for p in probabilities]
    logs = [np.log(np.maximum(p, _SMALLEST, dtype=np.float64)) for p in probabilities]
    pairs = [(i, j) for i in range(len(logs)) for j in range(len(logs)) if i != j]
    overlap = [np.mean(np.sum(chosen[i] & chosen[j], axis=1)) / active for i, j in pairs]
    divergence = [np.mean(np.sum(probabilities[i] * (logs[i] - logs[j]), axis=1)) for i, j in pairs]
    return RoutingAgreement(float(np.mean(overlap)), float(np.mean(divergence)))


def all_layers(evaluated: Tensors, layers: int) -> np.ndarray:
    """Return the probabilities of all layers, one below the other, in the result of a composer's `evaluate`."""
    return np.concatenate([evaluated[in_layer(i, "router", "probabilities")] for i in range(layers)])


def _chosen(probabilities: np.ndarray, active: int) -> np.ndarray:
    """Return which experts are among the `active` largest, bool [tokens, experts]; of equals the first."""
    ids = np.argsort(-probabilities, axis=1, kind="stable")[:, :active]
    chosen = np.zeros(probabilities.shape, bool)
    np.put_along_axis(chosen, ids, True, axis=1)
    return chosen
