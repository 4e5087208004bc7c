"""How a text is continued: the defaults and ranges of `Run.generate` and of `planetary generate`. Without JAX."""

from __future__ import annotations

import msgspec

from planetary.core.configuration.ranges import Count, Index, NotNegative, check_ranges


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is drawn, and how many are.

    Raises:
        UserError: a value is out of its range.
    """

    temperature: NotNegative = 0.8  # divides the logits; 0: always the likeliest token
    top_k: Index = 0  # only the k likeliest tokens can be drawn; 0: all
    seed: int = 0  # seed of the draws
    max_tokens: Count = 100  # the end of a document ends a text earlier

    def __post_init__(self) -> None:
        """Check every field."""
        check_ranges(self)


USUAL = Sampling()
