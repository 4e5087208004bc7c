"""How the next token of a text is drawn: a pure function of log-probabilities, options, seed and position.

Noise comes from a counter-based generator (Salmon et al. 2011, doi:10.1145/2063384.2063405) keyed by the request's seed
and the position in the text. So a text that goes on with another worker goes on with the same token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from planetary.core.errors import UserError

HOTTEST = 100.0
"""Largest temperature: tokens are as good as equally likely. Requests over HTTP have OpenAI's 2."""


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn, in OpenAI's words, and `top_k` and `min_p` as others have them.

    Attributes:
        temperature: divides log-probabilities; 0: always the likeliest token.
        top_p: the likeliest tokens with this probability together can be drawn.
        top_k: that many of the likeliest can be drawn; 0: all.
        min_p: tokens that are this part as likely as the likeliest can be drawn.
        seed: of the noise.
        presence_penalty: is taken from the log-probability of a token generated before.
        frequency_penalty: is taken as often as it was.
        logit_bias: token -> addend of the log-probability.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}

    def __post_init__(self) -> None:
        """Raise `UserError` for values that mean nothing."""
        for name, low, high in (
            ("temperature", 0.0, HOTTEST),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise UserError(f"{name} must be between {low:g} and {high:g}, found {value}")
        if self.top_k < 0:
            raise UserError(f"top_k must be 1 or more, or 0 for no limit, found {self.top_k}")
        if wrong := [f"{token}: {bias}" for token, bias in self.logit_bias.items() if not -100 <= bias <= 100]:
            raise UserError(f"logit_bias must be between -100 and 100, found {wrong[0]}")

    @property
    def changes_scores(self) -> bool:
        """Whether a token that is not among the likeliest may become one of them."""
        return bool(self.logit_bias) or self.counts_tokens

    @property
    def counts_tokens(self) -> bool:
        """Whether a draw depends on the tokens generated before."""
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def is_truncated(self) -> bool:
        """Whether unlikely tokens cannot be drawn."""
        return self.top_k > 0 or self.min_p > 0 or self.top_p < 1

    def needs_row(self, candidates: int) -> bool:
        """Whether the `candidates` likeliest tokens are not enough to draw from exactly."""
        greedy = self.temperature == 0 or self.top_k == 1
        return self.changes_scores or not (greedy or 0 < self.top_k <= candidates)


class Drawing(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a sequence's next token is drawn by a worker."""

    options: SamplingOptions
    ends: frozenset[int]  # tokens that end the sequence
    generated: tuple[int, ...] = ()  # tokens that are no part of the prompt, where penalties count them

    def after(self, token: int) -> Drawing:
        """Return how the token after `token` is drawn."""
        if not self.options.counts_tokens:
            return self
        return msgspec.structs.replace(self, generated=(*self.generated, token))


USUAL = SamplingOptions(temperature=0.8)
"""Options of `generate` where none are given."""
USUAL_TOKENS = 100
"""Most tokens that `generate` draws where no number is given."""


class Drawn(NamedTuple):
    """A token, with the log-probability in nats the model gave it, whatever the options are."""

    token: int
    logprob: float


class Scores(NamedTuple):
    """The results of a worker for each place after S tokens of a prompt.

    Attributes:
        values: f32 [S], log-probabilities in nats of the prompt's own tokens there.
        ids: i32 [S, K], the likeliest tokens there, in order.
        likeliest: f32 [S, K], their log-probabilities.
        hidden: f32 [C], the sum of the last hidden states; None: the model gives none.
    """

    values: np.ndarray
    ids: np.ndarray
    likeliest: np.ndarray
    hidden: np.ndarray | None = None


class Candidates(NamedTuple):
    """The results of a worker for the next token.

    Attributes:
        ids: i32 [K], the likeliest first.
        values: f32 [K], their log-probabilities in nats.
        row: f32 [V], those of all tokens; None: not requested.
        scores: of the prompt's tokens; None: not requested.
        drawn: the next token; None: the worker draws none.
    """

    ids: np.ndarray
    values: np.ndarray
    row: np.ndarray | None
    scores: Scores | None = None
    drawn: Drawn | None = None


def draw(
    found: Candidates,
    options: SamplingOptions,
    position: int,
    *,
    generated: Sequence[int] = (),
    most: int | None = None,
    allowed: np.ndarray | None = None,
) -> Drawn:
    """Return the next token.

    Args:
        found: with the row if `options.needs_row`.
        options: of the request.
        position: of the token in the sequence.
        generated: tokens before it that are no part of the prompt.
        most: tokens below this can be drawn; None: all.
        allowed: bool [V], tokens that can be drawn, one at least below `most`; with the row. None: all.
    """
    if found.row is None:
        ids, values = found.ids, found.values
    else:
        ids, values = np.arange(len(found.row)), found.row
    if most is not None and not (kept := ids < most).all():
        ids, values = ids[kept], values[kept]
    if allowed is not None:
        kept = allowed[ids]
        ids, values = ids[kept], values[kept]
    scores = _changed(ids, values.astype(np.float64), options, generated)
    if options.temperature == 0 or options.top_k == 1:
        best = int(np.argmax(scores))
        return Drawn(int(ids[best]), float(values[best]))
    scores = scores / options.temperature
    order = np.arange(len(scores))
    if options.is_truncated:
        order = np.argsort(-scores, kind="stable")
        order = order[: _kept(scores[order], options)]
        scores = scores[order]
    # The largest of log-probabilities plus Gumbel noise is a draw (Gumbel 1954). A token's noise depends only on the
    # id, so a rounding error elsewhere does not change the draw.
    noise = gumbel(options.seed, position, int(ids[order].max()) + 1)[ids[order]]
    best = int(order[int(np.argmax(scores + noise))])
    return Drawn(int(ids[best]), float(values[best]))


def choice_seed(seed: int, choice: int = 0) -> int:
    """Return the seed of a request's text, 0 to 2^63 − 1, from the request's own and the text's number.

    The first text has the request's seed if it is in this range. Others have a hash of it and of their number, so that
    no text of a seed is a text of the next seed.
    """
    return seed if choice == 0 and 0 <= seed < 2**63 else _hashed(f"choice {choice} of {seed}")


def continued_seed(seed: int, part: int) -> int:
    """Return the seed of a text's part of this number, from 1, which begins where the context before it was full."""
    return _hashed(f"part {part} of {seed}")


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def _changed(ids: np.ndarray, values: np.ndarray, options: SamplingOptions, generated: Sequence[int]) -> np.ndarray:
    if not options.changes_scores:
        return values
    scores = values.copy()
    changes: dict[int, float] = dict(options.logit_bias)
    counts: Mapping[int, int] = {}
    if options.counts_tokens:
        tokens, number = np.unique(np.asarray(generated, np.int64), return_counts=True)
        counts = dict(zip(tokens.tolist(), number.tolist(), strict=True))
    for token, count in counts.items():
        lost = options.presence_penalty + options.frequency_penalty * count
        changes[token] = changes.get(token, 0.0) - lost
    place = {int(token): index for index, token in enumerate(ids)} if changes else {}
    for token, change in changes.items():
        if token in place:
            scores[place[token]] += change
    return scores


def _kept(scores: np.ndarray, options: SamplingOptions) -> int:
    """Return how many of the likeliest tokens can be drawn; `scores` decrease."""
    kept = len(scores) if options.top_k == 0 else min(options.top_k, len(scores))
    if options.min_p > 0:
        kept = min(kept, int(np.count_nonzero(scores >= scores[0] + np.log(options.min_p))))
    if options.top_p < 1:
        weights = np.exp(scores[:kept] - scores[0])
        before = np.cumsum(weights) - weights
        kept = int(np.count_nonzero(before < options.top_p * weights.sum()))
    return max(kept, 1)


def gumbel(seed: int, position: int, count: int) -> np.ndarray:
    """Return the noise of the tokens below `count` at a position: f64 [count], a function of the arguments."""
    return -np.log(-np.log(_uniform(seed, position, count)))


def _uniform(seed: int, position: int, count: int) -> np.ndarray:
    """Return numbers between 0 and 1, neither of them included, that are a function of the arguments."""
    generator = np.random.Generator(np.random.Philox(key=seed & (2**64 - 1), counter=[0, 0, 0, position]))
    return (generator.integers(0, 2**53, count) + 0.5) * 2.0**-53
