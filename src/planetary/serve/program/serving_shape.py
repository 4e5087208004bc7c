"""What a served model is compiled for: sizes of batches, of chunks, and of the cache. Needs no JAX."""

from __future__ import annotations

import msgspec

from planetary.core.errors import UserError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec

PAGE = 16  # tokens
CANDIDATES = 64
"""The likeliest tokens that every function returns; the rest stays on the device unless it is asked for."""

CACHE, VALUES, IDS, ROW = "cache", "values", "ids", "row"


class ServingShape(msgspec.Struct, frozen=True):
    """The sizes that a served model's functions are compiled for.

    Attributes:
        vocabulary: tokens that the model knows.
        window: the longest text, in tokens; a multiple of `PAGE`.
        pages: of the cache, each of `PAGE` tokens; page 0 takes what nobody reads.
        page_shape: of one page: keys and values of all layers, tokens, heads, width of a head.
        element: type of the cache's numbers.
        batches: how many texts one decoding call may continue by a token each; increasing.
        chunks: how many tokens of one text one prefilling call may take; increasing multiples of `PAGE`.
        reaches: how many pages of a text a call may look at; increasing, the last one `window`'s.
    """

    vocabulary: int
    window: int
    pages: int
    page_shape: tuple[int, int, int, int]
    element: str = "f32"
    batches: tuple[int, ...] = (1, 4, 8)
    chunks: tuple[int, ...] = (64, 256)
    reaches: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise `UserError` for sizes that do not fit together."""
        if self.window % PAGE or self.window < PAGE or any(chunk % PAGE for chunk in self.chunks):
            raise UserError(f"windows and chunks are multiples of {PAGE} tokens, found {self.window} and {self.chunks}")
        if self.pages <= self.reaches[-1]:
            raise UserError(
                f"a cache of {self.pages} pages does not hold one text of {self.window} tokens: expected "
                f"{self.reaches[-1] + 1} at least"
            )

    @property
    def candidates(self) -> int:
        """How many of the likeliest tokens a function returns."""
        return min(CANDIDATES, self.vocabulary)

    @property
    def cache(self) -> TensorSpec:
        """The cache."""
        return TensorSpec(CACHE, self.element, (self.pages, *self.page_shape))

    def page_of(self, position: int) -> int:
        """Return which page of a text has a position."""
        return position // PAGE

    def batch_for(self, texts: int) -> int:
        """Return the smallest batch for so many texts."""
        return next(size for size in self.batches if size >= texts)

    def chunk_for(self, tokens: int) -> int:
        """Return the smallest chunk for so many tokens, or the largest there is."""
        return next((size for size in self.chunks if size >= tokens), self.chunks[-1])

    def reach_for(self, pages: int) -> int:
        """Return the smallest reach for so many pages."""
        return next(size for size in self.reaches if size >= pages)

    def functions(self, params: tuple[TensorSpec, ...]) -> dict[str, FunctionSpec]:
        """Return the signatures of all functions, by name, for a model with these parameters."""
        found = {}
        for reach in self.reaches:
            for batch in self.batches:
                found[decode_name(batch, reach)] = self.function(params, batch, 1, reach)
            for chunk in self.chunks:
                found[prefill_name(chunk, reach)] = self.function(params, 1, chunk, reach)
        return found

    def function(self, params: tuple[TensorSpec, ...], batch: int, tokens: int, reach: int) -> FunctionSpec:
        """Return the signature of a call with `batch` texts of `tokens` new tokens each."""
        arguments = (
            *params,
            TensorSpec("tokens", "i32", (batch, tokens)),
            TensorSpec("start", "i32", (batch,)),
            TensorSpec("length", "i32", (batch,)),
            TensorSpec("pages", "i32", (batch, reach)),
            self.cache,
        )
        results = (
            self.cache,
            TensorSpec(VALUES, "f32", (batch, self.candidates)),
            TensorSpec(IDS, "i32", (batch, self.candidates)),
            TensorSpec(ROW, "f32", (batch, self.vocabulary)),
        )
        return FunctionSpec(arguments, results)

    @property
    def integers_below(self) -> int:
        """What every integer argument may be in a trial on random numbers."""
        return min(self.vocabulary, self.pages, self.reaches[0] * PAGE)


def decode_name(batch: int, reach: int) -> str:
    """Return the name of the function that continues `batch` texts by a token, of at most `reach` pages each."""
    return f"decode_b{batch}_p{reach}"


def prefill_name(chunk: int, reach: int) -> str:
    """Return the name of the function that takes `chunk` tokens of one text of at most `reach` pages."""
    return f"prefill_s{chunk}_p{reach}"


def reaches_of(window: int) -> tuple[int, ...]:
    """Return how many pages calls look at, for a window in tokens: each four times the one before, then all."""
    pages, found = window // PAGE, [8]
    while found[-1] < pages:
        found.append(4 * found[-1])
    return tuple(dict.fromkeys(min(reach, pages) for reach in found))
