"""The sizes of a served model's functions: of batches, of chunks, and of the cache. Needs no JAX."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

import msgspec

from planetary.core.errors import UserError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec
from planetary.runs.serve.program.cache_kinds import PAGE, AnyCacheKind, KeyValueCache

CANDIDATES = 64
"""The likeliest tokens every function returns; the rest stays on the device unless it is asked for."""

LIKELIEST = 20
"""The likeliest tokens a scoring function returns at every place of a prompt."""

CACHE, VALUES, IDS, ROW = "cache", "values", "ids", "row"
DRAWN, DRAWN_VALUES = "drawn", "drawn_values"
TARGETS, SCORES, SCORE_VALUES, SCORE_IDS = "targets", "scores", "score_values", "score_ids"
HIDDEN = "hidden"
KEYS, CACHED_VALUES = "gathered_keys.", "gathered_values."  # prefixes of a layer's number


class CallKind(StrEnum):
    """The kinds of calls."""

    DECODE = "decode"
    PREFILL = "prefill"
    SCORE = "score"


class CallSize(msgspec.Struct, frozen=True):
    """The sizes of one function: `batch` sequences of `tokens` new tokens each, and of at most `context_pages` pages.

    A scoring function returns log-probabilities at every place, and not of the next token alone.
    """

    kind: CallKind
    batch: int
    tokens: int
    context_pages: int

    @property
    def scores(self) -> bool:
        """Whether it is a scoring function."""
        return self.kind is CallKind.SCORE

    @property
    def name(self) -> str:
        """Name of the function."""
        match self.kind:
            case CallKind.DECODE:
                return decode_name(self.batch, self.context_pages)
            case CallKind.PREFILL:
                return prefill_name(self.tokens, self.context_pages, self.batch)
            case CallKind.SCORE:
                return score_name(self.tokens, self.context_pages)


class ServingShape(msgspec.Struct, frozen=True):
    """The sizes a served model's functions are compiled for.

    Attributes:
        vocabulary: tokens the model knows.
        window: the longest sequence, in tokens; a multiple of `PAGE`.
        pages: of the cache, each of `PAGE` tokens; page 0 takes writes that no sequence reads.
        page_shape: of one page: of keys and values: both of all layers, heads, tokens, width of a head; of a state: the
            numbers.
        element: type of the cache's numbers.
        batches: how many sequences one decoding call may continue by a token each; increasing.
        chunks: how many tokens of one sequence one prefilling call may take; increasing multiples of `PAGE`.
        prefills: how many sequences one prefilling call may take a chunk of; increasing.
        context_sizes: pages of context that a call reads; increasing, the last one `window`'s.
        cache_kind: form of the cache between two calls.
        most_candidates: how many of the likeliest tokens a function returns, as far as there are so many.
        scores_prompts: whether there are functions that score a prompt.
        hidden: width of the last hidden states, whose sums scoring functions return; 0: there are none.
        spare: pages behind the others for comparisons, which go on beside sequences; 0: comparisons have the others.
    """

    vocabulary: int
    window: int
    pages: int
    page_shape: tuple[int, ...]
    element: str = "f32"
    batches: tuple[int, ...] = (1, 4, 8)
    chunks: tuple[int, ...] = (64, 256)
    prefills: tuple[int, ...] = (1,)
    context_sizes: tuple[int, ...] = ()
    cache_kind: AnyCacheKind = KeyValueCache()
    most_candidates: int = CANDIDATES
    scores_prompts: bool = True
    hidden: int = 0
    spare: int = 0

    def __post_init__(self) -> None:
        """Raise `UserError` for sizes that do not fit together."""
        if self.window % PAGE or self.window < PAGE or any(chunk % PAGE for chunk in self.chunks):
            raise UserError(f"windows and chunks are multiples of {PAGE} tokens, found {self.window} and {self.chunks}")
        if self.pages <= self.context_sizes[-1]:
            raise UserError(
                f"a cache of {self.pages} pages does not hold one sequence of {self.window} tokens: expected "
                f"{self.context_sizes[-1] + 1} at least"
            )

    @property
    def candidates(self) -> int:
        """How many of the likeliest tokens a function returns."""
        return min(self.most_candidates, self.vocabulary)

    @property
    def cache(self) -> TensorSpec:
        return TensorSpec(CACHE, self.element, (self.pages + self.spare, *self.page_shape))

    def page_of(self, position: int) -> int:
        """Return which page of a text has a position."""
        return position // PAGE

    def pages_for(self, tokens: int) -> int:
        """Return how many pages a sequence of so many tokens takes."""
        return self.cache_kind.pages_for(tokens)

    @property
    def scored_chunks(self) -> tuple[int, ...]:
        """How many tokens of a prompt one scoring call may take. One size is enough where a next call can go on."""
        if not self.scores_prompts:
            return ()
        return self.chunks[:1] if self.cache_kind.remembers else self.chunks

    def functions(
        self, params: tuple[TensorSpec, ...], calls: Sequence[CallSize] | None = None
    ) -> dict[str, FunctionSpec]:
        """Return the signatures of the functions of `calls`, None: of all, for a model with these parameters."""
        sizes = self.calls if calls is None else calls
        found = {
            one.name: self.function(params, one.batch, one.tokens, one.context_pages, scores=one.scores)
            for one in sizes
        }
        for one in sizes:
            if one.tokens == 1 and (copy := self.gathered(one.batch, one.context_pages)):
                pages = TensorSpec("pages", "i32", (one.batch, one.context_pages))
                found[gather_name(one.batch, one.context_pages)] = FunctionSpec((*params, pages, self.cache), copy)
        return found

    def params_of(self, functions: Mapping[str, FunctionSpec]) -> tuple[TensorSpec, ...]:
        """Return the model's parameters, which the functions of this shape take before all else."""
        one = next(one for one in self.calls if one.name in functions)
        arguments = functions[one.name].arguments
        data = self.function((), one.batch, one.tokens, one.context_pages, scores=one.scores).arguments
        return arguments[: len(arguments) - len(data)]

    def gathered(self, batch: int, context_pages: int) -> tuple[TensorSpec, ...]:
        """Return keys [B, G, D, T] and values [B, G, T, D] of each layer, of `batch` sequences of `context_pages`
        pages.

        Decoding calls read this copy of pages, which stays from call to call. There is none, (), where it would be
        larger than the cache, and no cache of pages. Layers are tensors of their own: IREE copies a part of a tensor
        before a product reads it.
        """
        paged = isinstance(self.cache_kind, KeyValueCache) and len(self.page_shape) == 4
        if not paged or batch * context_pages > self.pages:
            return ()
        parts, heads, page, width = self.page_shape
        tokens = context_pages * page
        return tuple(
            spec
            for layer in range(parts // 2)
            for spec in (
                TensorSpec(f"{KEYS}{layer}", self.element, (batch, heads, width, tokens)),
                TensorSpec(f"{CACHED_VALUES}{layer}", self.element, (batch, heads, tokens, width)),
            )
        )

    @property
    def calls(self) -> tuple[CallSize, ...]:
        """The sizes of all functions. Without a memory there are no calls of single tokens."""
        found = []
        for context_pages in self.context_sizes:
            if self.cache_kind.remembers:
                found += [CallSize(CallKind.DECODE, batch, 1, context_pages) for batch in self.batches]
            found += [
                CallSize(CallKind.PREFILL, sequences, chunk, context_pages)
                for chunk in self.chunks
                for sequences in self.prefills
            ]
            found += [CallSize(CallKind.SCORE, 1, chunk, context_pages) for chunk in self.scored_chunks]
        return tuple(found)

    @property
    def first_calls(self) -> tuple[CallSize, ...]:
        """Sizes with which every sequence can be computed, one at a time; the others are faster for some sequences.

        A scoring function also takes prompts that need no scores.
        """
        chunk = self.chunks[0] if self.cache_kind.remembers else self.chunks[-1]
        least = {CallKind.DECODE: (self.batches[0], 1)}
        least |= {CallKind.SCORE: (1, chunk)} if self.scores_prompts else {CallKind.PREFILL: (self.prefills[0], chunk)}
        return tuple(
            one
            for one in self.calls
            if one.context_pages == self.context_sizes[-1] and (one.batch, one.tokens) == least.get(one.kind)
        )

    def calls_of(self, names: Collection[str]) -> tuple[CallSize, ...]:
        """Return the sizes of these functions."""
        return tuple(one for one in self.calls if one.name in names)

    def function(
        self, params: tuple[TensorSpec, ...], batch: int, tokens: int, context_pages: int, *, scores: bool = False
    ) -> FunctionSpec:
        """Return the signature of a call with `batch` sequences of `tokens` new tokens each."""
        gathered = self.gathered(batch, context_pages) if tokens == 1 else ()
        arguments = (
            *params,
            TensorSpec("tokens", "i32", (batch, tokens)),
            TensorSpec("start", "i32", (batch,)),
            TensorSpec("length", "i32", (batch,)),
            TensorSpec("pages", "i32", (batch, context_pages)),
            *((TensorSpec(TARGETS, "i32", (batch, tokens)),) if scores else ()),
            self.cache,
            *gathered,
        )
        likeliest = (batch, tokens, min(LIKELIEST, self.candidates))
        scored = (
            TensorSpec(SCORES, "f32", (batch, tokens)),
            TensorSpec(SCORE_VALUES, "f32", likeliest),
            TensorSpec(SCORE_IDS, "i32", likeliest),
            *((TensorSpec(HIDDEN, "f32", (batch, self.hidden)),) if self.hidden else ()),
        )
        results = (
            self.cache,
            *gathered,
            TensorSpec(VALUES, "f32", (batch, self.candidates)),
            TensorSpec(IDS, "i32", (batch, self.candidates)),
            TensorSpec(ROW, "f32", (batch, self.vocabulary)),
            *(scored if scores else ()),
        )
        return FunctionSpec(arguments, results, ((IDS, VALUES), *(((SCORE_IDS, SCORE_VALUES),) if scores else ())))

    @property
    def integers_below(self) -> int:
        """The limit of integer arguments in a trial on random numbers."""
        return min(self.vocabulary, self.pages, self.context_sizes[0] * PAGE)


def decode_name(batch: int, context_pages: int) -> str:
    """Return the name of the function that continues `batch` sequences by a token, of at most `context_pages` pages
    each.
    """
    return f"decode_b{batch}_p{context_pages}"


def gather_name(batch: int, context_pages: int) -> str:
    """Return the name of the function that copies the pages of `batch` sequences for decoding calls."""
    return f"gather_b{batch}_p{context_pages}"


def prefill_name(chunk: int, context_pages: int, sequences: int = 1) -> str:
    """Return the name of the function that takes `chunk` tokens of each of `sequences` sequences of at most
    `context_pages` pages.
    """
    return f"prefill_s{chunk}_p{context_pages}" if sequences == 1 else f"prefill_b{sequences}_s{chunk}_p{context_pages}"


def score_name(chunk: int, context_pages: int) -> str:
    """Return the name of the function that scores `chunk` tokens of one prompt of at most `context_pages` pages."""
    return f"score_s{chunk}_p{context_pages}"


def context_sizes_of(window: int) -> tuple[int, ...]:
    """Return how many pages calls look at, for a window in tokens: each four times the one before, then all."""
    pages, found = window // PAGE, [8]
    while found[-1] < pages:
        found.append(4 * found[-1])
    return tuple(dict.fromkeys(min(context_pages, pages) for context_pages in found))
