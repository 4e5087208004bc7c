"""A sequence that is being continued, wherever it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from planetary.runs.serve.scheduling.constraint import Constraint
from planetary.runs.serve.scheduling.page_pool import Prefix, prefixes
from planetary.runs.serve.scheduling.sampling import SamplingOptions

FinishReason = Literal["stop", "length", "error"]


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence to continue.

    Attributes:
        number: unique number of the sequence.
        user: whose it is; users get equal shares.
        prompt: tokens, one at least.
        most: how many tokens to generate at most, 1 at least.
        options: how they are drawn.
        ends: tokens that end the sequence; they are not given out.
        likeliest: for how many of the likeliest tokens log-probabilities are wanted beside the drawn one's.
        scores_prompt: whether the prompt's own log-probabilities are wanted.
        embeds: whether the mean of the prompt's last hidden states is wanted, and no token.
        adapter: of the model that computes it, from 1; 0: none.
        constraint: that the generated tokens obey; None: there is none. It is this sequence's alone.
    """

    number: int
    user: str = ""
    prompt: tuple[int, ...]
    most: int
    options: SamplingOptions = SamplingOptions()
    ends: frozenset[int] = frozenset()
    likeliest: int = 0
    scores_prompt: bool = False
    embeds: bool = False
    adapter: int = 0
    constraint: Constraint | None = None


class Token(msgspec.Struct, frozen=True):
    """A token of a sequence.

    Attributes:
        token: token id.
        logprob: that the model gave it, in nats; None for the first token of a prompt.
        likeliest: ids and log-probabilities of the likeliest at this place, in order.
    """

    token: int
    logprob: float | None
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass
class SequenceState:
    """How far a sequence is. All of it but pages and cached tokens outlasts the worker.

    Attributes:
        request: prompt and options.
        tokens: the prompt, and the generated ones.
        page_table: pages in the cache of the worker.
        cached: number of tokens that have keys and values there.
        scored: how many tokens of the prompt have been given out with their log-probabilities.
        hidden: sum of the last hidden states of the cached tokens; None: there are none.
        failures: workers that were lost while they computed it, since the last token.
        turn: when it was last part of a call; those that have waited longest come first.
    """

    request: SequenceRequest
    tokens: list[int] = field(default_factory=list)
    page_table: list[int] = field(default_factory=list)
    cached: int = 0
    scored: int = 0
    hidden: np.ndarray | None = None
    failures: int = 0
    turn: int = 0
    known_prefixes: list[Prefix] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with the prompt."""
        self.tokens = list(self.request.prompt)

    @property
    def generated(self) -> Sequence[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def missing(self) -> int:
        """How many tokens are not in the cache."""
        return len(self.tokens) - self.cached

    @property
    def scores(self) -> bool:
        """Whether log-probabilities or hidden states of the prompt's tokens are still to be found."""
        request = self.request
        return request.embeds or (request.scores_prompt and self.scored < len(request.prompt))

    @property
    def prefills(self) -> bool:
        """Whether a whole chunk of it is computed next."""
        return self.missing > 1 or self.scores

    def prefix(self, page: int) -> Prefix:
        """Return the key of the sequence up to the end of the page of this number, which is full."""
        if len(self.known_prefixes) <= page:
            self.known_prefixes = list(prefixes(self.tokens, self.request.adapter))
        return self.known_prefixes[page]

    def release_pages(self) -> list[int]:
        """Forget where it is computed; return the pages there."""
        pages, self.page_table, self.cached, self.hidden = self.page_table, [], 0, None
        return pages
