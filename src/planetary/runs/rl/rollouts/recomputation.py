"""Whether rollouts were drawn from a policy: log-probabilities are computed again, and every draw is repeated.

A token is a function of the distribution, the gateway's seed, and the position. So a worker that uses other weights,
invents log-probabilities, or copies another completion is found by one forward pass. It is computed with XLA at the
gateway, and compared within a tolerance: workers may have any device of the same numeric class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from planetary.core.tensors import Tensors, TensorSpec
from planetary.models.context import WholeText
from planetary.runs.rl.rollouts.dialogues import Dialogue
from planetary.runs.serve.program.program import Decode
from planetary.runs.serve.scheduling.sampling import gumbel


class Recomputation:
    """Computes rollouts of workers again. Used from one thread at a time."""

    def __init__(
        self,
        decode: Decode,
        params: Any,
        specs: Sequence[TensorSpec],
        *,
        length: int,
        vocabulary: int,
        tolerance: float,
        rows: int = 16,
    ) -> None:
        """Compile nothing yet.

        Args:
            decode: of the model.
            params: a pytree of the policy's shape; only the structure is used.
            specs: leaves, by name in order.
            length: tokens of the longest rollout, the first one not counted.
            vocabulary: tokens below it can be drawn.
            tolerance: by which a log-probability may differ, in nats.
            rows: rollouts computed at once.
        """
        self._names = [spec.name for spec in specs]
        self._tree = jax.tree.structure(params)
        self._length, self._vocabulary, self._tolerance, self._rows = length, vocabulary, tolerance, rows
        self._distributions = _distributions_of(decode)

    def defect(self, dialogues: Sequence[Dialogue], weights: Tensors) -> str:
        """Return the proof that the newest turns of dialogues were not drawn from these weights; "": there is none."""
        params = jax.tree.unflatten(self._tree, [weights[name] for name in self._names])
        for start in range(0, len(dialogues), self._rows):
            part = dialogues[start : start + self._rows]
            tokens = np.zeros((self._rows, self._length), np.int32)
            for i, one in enumerate(part):
                tokens[i, : len(one.tokens) - 1] = one.tokens[:-1]
            rows = np.asarray(self._distributions(params, tokens))
            for i, one in enumerate(part):
                if defect := self._defect_of(one, rows[i]):
                    return defect
        return ""

    def _defect_of(self, one: Dialogue, rows: np.ndarray) -> str:
        turn = one.turns[-1]
        for position in range(turn.start, turn.start + turn.count):
            row, token = rows[position - 1].astype(np.float64), one.tokens[position]
            away = abs(row[token] - one.sampled[position])
            if not away <= self._tolerance:
                return (
                    f"a token's log-probability was sent as {one.sampled[position]:.4f}, and the weights give "
                    f"{row[token]:.4f} (accepted: {self._tolerance:g})"
                )
            scores = row[: self._vocabulary]
            if turn.temperature:
                scores = scores + gumbel(turn.seed, position, self._vocabulary)
            # Two tokens whose scores are as close as the tolerance may be either.
            if scores.max() - scores[token] > 2 * self._tolerance:
                return f"the token at position {position} was not drawn with the seed of its rollout"
        return ""


@functools.lru_cache(maxsize=4)
def _distributions_of(decode: Decode) -> Callable[[Any, np.ndarray], jax.Array]:
    """Return log-probabilities f32 [B, T, V] as a function of parameters and tokens i32 [B, T]; compiled once."""

    def distributions(params: Any, tokens: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(decode(params, tokens, WholeText(tokens)).astype(jnp.float32))

    return jax.jit(distributions)
