"""Values an integer array of a batch may have, because a model picks rows of a table by it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

Interval = tuple[int, int]  # both ends included
Span = tuple[int, int, int]  # start, limit and stride of a slice


class IndexLimit(msgspec.Struct, frozen=True):
    """The legal values of an integer argument of a model, or of a part of it.

    Attributes:
        legal: ascending.
        rows: of the smallest table.
        part: slice of each dimension of an example.
        place: line of the author's source; "" where unknown.
    """

    legal: tuple[Interval, ...]
    rows: int
    part: tuple[Span, ...]
    place: str = ""

    def covers(self, example: Sequence[int]) -> bool:
        """Whether it is of all elements of an example of this shape."""
        return self.part == tuple((0, size, 1) for size in example)

    @property
    def expected(self) -> str:
        """The legal values, for people."""
        shown = [f"{low} to {high}" if low < high else f"{low}" for low, high in self.legal]
        if self.legal and self.legal[0][0] == -(2**31):
            shown[0] = f"at most {self.legal[0][1]}"
        return " or ".join(shown) or "none"

    def illegal(self, values: np.ndarray) -> np.ndarray:
        """Return which of the values are not legal, as booleans of the same shape."""
        found = np.ones(values.shape, bool)
        for low, high in self.legal:
            found &= (values < low) | (values > high)
        return found

    def first_illegal(self, values: np.ndarray) -> tuple[int, int] | None:
        """Return number and value of the first illegal example of `values` [n, …]; None where all are legal."""
        own = values[(slice(None), *(slice(*span) for span in self.part))]
        wrong = self.illegal(own)
        if not wrong.any():
            return None
        place = np.unravel_index(int(np.argmax(wrong)), own.shape)
        return int(place[0]), int(own[place])
