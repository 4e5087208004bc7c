"""The memory of a device for a sequence between two calls. Needs no JAX."""

from __future__ import annotations

import msgspec

PAGE = 16  # tokens


class CacheKind(msgspec.Struct, frozen=True, tag_field="kind"):
    """How a model remembers the tokens of a sequence.

    Attributes:
        is_shared: whether sequences that begin alike can use the same pages.
        remembers: whether a call adds to the memory of the calls before it.
    """

    @property
    def is_shared(self) -> bool:
        return False

    @property
    def remembers(self) -> bool:
        return True

    def pages_for(self, tokens: int) -> int:
        """Return how many pages a sequence of so many tokens takes."""
        raise NotImplementedError


class KeyValueCache(CacheKind, frozen=True, tag="keys and values"):
    """Keys and values of every token, in pages of `PAGE` tokens."""

    @property
    def is_shared(self) -> bool:
        return True

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // PAGE)


class RecurrentState(CacheKind, frozen=True, tag="state"):
    """A state of fixed size: one page, whatever the sequence's length."""

    def pages_for(self, tokens: int) -> int:
        return min(tokens, 1)


class NoCache(CacheKind, frozen=True, tag="nothing"):
    """Nothing: every call computes the whole sequence again."""

    @property
    def remembers(self) -> bool:
        return False

    def pages_for(self, tokens: int) -> int:
        return 0


AnyCacheKind = KeyValueCache | RecurrentState | NoCache
