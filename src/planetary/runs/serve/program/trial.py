"""A text with the results of the whole forward pass, as it travels to every worker. Needs no JAX."""

from __future__ import annotations

import msgspec
import numpy as np

from planetary.core import decoding
from planetary.core.errors import TrustError
from planetary.runs.serve.program.shape import PAGE, ServingShape

TOLERANCE = 5e-3
"""Accepted error of a log-probability, in nats, where nothing is rounded to 16 bits.

Two compilers add the same terms in different orders, which makes 2·10⁻⁵ over a few layers. A token at another place, a
key of another text or a masked one are errors of the order of one.
"""


class ServingTrial(msgspec.Struct, frozen=True):
    """A text, and the results of the whole forward pass.

    Attributes:
        tokens: of the text.
        ids: i32 [places, K], the likeliest tokens after each of them, in order.
        values: f32 [places, K], their log-probabilities, in nats.
        following: f32 [places], the log-probability of the text's own next token; of the last place, 0.
        hidden: f32 [places, C], the last hidden states; C is 0 where there are none.
        accepted: largest error of a log-probability, in nats, and of a mean of hidden states, as a fraction of the
            length.
    """

    tokens: tuple[int, ...]
    ids: bytes
    values: bytes
    following: bytes
    hidden: bytes
    accepted: float

    @property
    def likeliest(self) -> tuple[np.ndarray, np.ndarray]:
        """`ids` and `values` as arrays."""
        places = len(self.tokens)
        return (
            np.frombuffer(self.ids, "<i4").reshape(places, -1),
            np.frombuffer(self.values, "<f4").reshape(places, -1),
        )

    @property
    def states(self) -> np.ndarray:
        """`hidden` as an array."""
        return np.frombuffer(self.hidden, "<f4").reshape(len(self.tokens), -1)


def trial_length(shape: ServingShape) -> int:
    """Return how many tokens a trial's text has: so many the largest chunk is followed by another."""
    return min(shape.window, shape.chunks[-1] + 2 * PAGE + 3)


def spare_pages(shape: ServingShape) -> int:
    """Return how many pages the comparison with a trial takes: of its text, or of two that are decoded."""
    return max(shape.pages_for(trial_length(shape)), 2 * shape.pages_for(shape.chunks[0] + 1))


def encode_trial(trial: ServingTrial) -> bytes:
    return msgspec.msgpack.encode(trial)


def decode_trial(data: bytes, shape: ServingShape) -> ServingTrial:
    """Reverse `encode_trial`. Raises `TrustError` for anything else."""
    try:
        trial = decoding.from_msgpack(data, ServingTrial)
    except msgspec.MsgspecError as error:
        raise TrustError(f"the trial of the served model cannot be read: {error}") from error
    places, size = len(trial.tokens), 4 * shape.candidates
    fits = (
        len(trial.ids) == len(trial.values) == places * size
        and len(trial.following) == 4 * places
        and len(trial.hidden) == 4 * places * shape.hidden
    )
    if not fits or places != trial_length(shape) or not all(0 <= one < shape.vocabulary for one in trial.tokens):
        raise TrustError(f"the trial of the served model is of another shape: it has {places} tokens")
    return trial
