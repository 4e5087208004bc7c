"""The rows an owner remembers for calibrating surrogates: the inputs and gates of the last steps."""

from __future__ import annotations

import msgspec
import numpy as np

from planetary.core.errors import UserError


class RecentRows(msgspec.Struct, frozen=True):
    """A ring buffer of one layer's expert inputs and gates, as a value.

    Attributes:
        inputs: float32 [capacity, d_e].
        gates: float32 [capacity, experts]; all 0 in rows not filled yet.
        next_row: where the next row goes.
    """

    inputs: np.ndarray
    gates: np.ndarray
    next_row: int = 0


def no_rows(capacity: int, latent: int, experts: int) -> RecentRows:
    """Return an empty buffer."""
    if min(capacity, latent, experts) < 1:
        raise UserError(f"a buffer of rows needs sizes above 0, found {capacity}, {latent}, {experts}")
    return RecentRows(np.zeros((capacity, latent), np.float32), np.zeros((capacity, experts), np.float32))


def remember(rows: RecentRows, inputs: np.ndarray, gates: np.ndarray) -> RecentRows:
    """Return the buffer after a step: the oldest rows are replaced; of more rows than fit, the last ones stay."""
    capacity = len(rows.inputs)
    inputs, gates = inputs[-capacity:], gates[-capacity:]
    place = (rows.next_row + np.arange(len(inputs))) % capacity
    kept_inputs, kept_gates = rows.inputs.copy(), rows.gates.copy()
    kept_inputs[place], kept_gates[place] = inputs, gates
    return RecentRows(kept_inputs, kept_gates, int((rows.next_row + len(inputs)) % capacity))


def calibration_rows(rows: RecentRows, experts: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the latest rows routed to each expert, and their weights g_e².

    Args:
        rows: the buffer.
        experts: numbers of E experts.
        count: rows per expert, at most; fewer are filled up with rows of weight 0.

    Returns:
        inputs float32 [E, count, d_e] and weights float32 [E, count].
    """
    capacity = len(rows.inputs)
    latest_first = (rows.next_row - 1 - np.arange(capacity)) % capacity
    inputs = np.zeros((len(experts), count, rows.inputs.shape[1]), np.float32)
    weights = np.zeros((len(experts), count), np.float32)
    for place, expert in enumerate(experts):
        if expert < 0:  # an empty slot
            continue
        gates = rows.gates[latest_first, expert]
        chosen = np.flatnonzero(gates)[:count]
        inputs[place, : len(chosen)] = rows.inputs[latest_first[chosen]]
        weights[place, : len(chosen)] = gates[chosen] ** 2
    return inputs, weights
