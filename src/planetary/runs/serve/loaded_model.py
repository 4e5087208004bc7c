"""A model and its cache on a device: calls are computed, and tokens drawn, there.

A draw is a pure function of log-probabilities, options, seed and position (`scheduling.sampling`): the text is the same
whichever worker draws it, and the log-probabilities of a whole vocabulary stay at the worker. The gateway draws only
where a grammar limits the tokens, since it alone knows the grammar's state.
"""

from __future__ import annotations

import msgspec
import numpy as np

from planetary.core.errors import LocalProtocolError, ResourceError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.runs.serve.messages import ComputeCall
from planetary.runs.serve.program.shape import (
    CACHE,
    DRAWN,
    DRAWN_VALUES,
    HIDDEN,
    IDS,
    KEYS,
    PAGE,
    ROW,
    SCORE_IDS,
    SCORE_VALUES,
    SCORES,
    TARGETS,
    VALUES,
    ServingShape,
    gather_name,
)
from planetary.runs.serve.scheduling.sampling import Candidates, Drawing, draw
from planetary.runtime.device_program import DeviceProgram, ResidentTensors


class GatheredSequences(msgspec.Struct, frozen=True):
    """The sequences whose pages were copied for a decoding function, with the tokens added by calls since.

    Pages are the truth: every call writes them, and the copy is made again for any other calls than the next ones of
    the same sequences.

    Attributes:
        function: that takes the copy.
        page_tables: of each sequence.
        lengths: of each sequence, in tokens.
    """

    function: str
    page_tables: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    def serves(self, call: ComputeCall) -> bool:
        """Whether a call goes on with the same sequences; each may have further pages."""
        return (
            call.function == self.function
            and call.starts == self.lengths
            and all(new[: len(old)] == old for new, old in zip(call.page_tables, self.page_tables, strict=True))
        )

    def is_changed_by(self, call: ComputeCall) -> bool:
        """Whether a call of another kind writes to a page of the sequences."""
        mine = {page for pages in self.page_tables for page in pages}
        written = (pages[start // PAGE :] for start, pages in zip(call.starts, call.page_tables, strict=True))
        return any(page in mine for pages in written for page in pages)


class LoadedModel:
    """A model and a cache on a device. Used by one thread at a time.

    Attributes:
        resident: parameters and cache.
    """

    def __init__(self, run: DeviceProgram, shape: ServingShape, weights: Tensors) -> None:
        """`weights` are the model's parameters by name."""
        self.resident = ResidentTensors(run)
        self._run, self._shape = run, shape
        self._specs: dict[str, dict[str, TensorSpec]] = {}  # specs of each function's arguments
        self._sent: dict[str, np.ndarray] = {}
        self._adapters: dict[int, dict[str, str]] = {0: {}}  # names of A and B here, by an adapter's number
        self._gathered: GatheredSequences | None = None  # sequences with a copy of their pages on the device
        self._copied: tuple[str, ...] = ()  # names of the copy's tensors
        arguments = run.signature(shape.first_calls[0].name).arguments if weights else ()
        self.resident.place((spec for spec in arguments if spec.name in weights), weights)
        self.resident.put({CACHE: shape.cache.zeros()})

    def add_adapter(self, number: int, weights: Tensors) -> None:
        """Send an adapter's A and B, which calls with this number take in place of the model's own, zeros."""
        arguments = self._run.signature(self._shape.first_calls[0].name).arguments
        names = self._adapters[number] = {name: f"adapter {number} {name}" for name in weights}
        self.resident.place((spec for spec in arguments if spec.name in weights), weights, names)

    def compute(self, message: ComputeCall) -> dict[str, np.ndarray]:
        """Return the results of a call: one row for each sequence. Nothing is drawn.

        Raises:
            LocalProtocolError: there is no such function or adapter, or the call does not fit the function.
            ResourceError: the device fails.
        """
        signature = self._run.signature(message.function)
        names = self._adapters.get(message.adapter)
        if names is None:
            raise LocalProtocolError(f"the worker has {len(self._adapters) - 1} adapters, and not {message.adapter}")
        if message.function not in self._specs:
            self._specs[message.function] = {spec.name: spec for spec in signature.arguments}
        specs = self._specs[message.function]
        batch, count = specs["tokens"].shape
        context_pages, sequences = specs["pages"].shape[1], len(message.tokens)
        fits = sequences <= batch and all(0 < len(one) <= count for one in message.tokens)
        if not (fits and all(len(one) <= context_pages for one in message.page_tables)):
            raise LocalProtocolError(
                f"{message.function} takes {batch} sequences of {count} new tokens and {context_pages} pages, and was "
                f"called with {sequences} of {[len(one) for one in message.tokens]} tokens and "
                f"{[len(table) for table in message.page_tables]} pages"
            )
        arrays = {name: specs[name].zeros() for name in ("tokens", "start", "length", "pages")}
        arrays["length"][:] = 1  # places without a sequence: a token written to page 0
        for place, (new, start, pages) in enumerate(
            zip(message.tokens, message.starts, message.page_tables, strict=True)
        ):
            arrays["tokens"][place, : len(new)] = new
            arrays["pages"][place, : len(pages)] = pages
            arrays["start"][place], arrays["length"][place] = start, len(new)
        if TARGETS in specs:
            targets = arrays[TARGETS] = specs[TARGETS].zeros()
            after = message.following or (-1,) * sequences
            for place, (new, following) in enumerate(zip(message.tokens, after, strict=True)):
                targets[place, : len(new)] = [*new[1:], max(following, 0)]
        # A sequence that goes on has most arguments of the call before: `put` sends no array twice.
        for name, array in arrays.items():
            last = self._sent.get(name)
            if last is None or last.shape != array.shape or last.tobytes() != array.tobytes():
                self._sent[name] = array
        self.resident.put(self._sent)
        try:
            after = self._gather(message, batch, context_pages, gathers=f"{KEYS}0" in specs)
            self.resident.call(message.function, names)
        except ResourceError:
            # The call had the cache, which it overwrites. The gateway knows that the pages are lost.
            self.resident.drop(self._copied)
            self.resident.put({CACHE: self._shape.cache.zeros()})
            raise
        self._gathered = after
        scores = tuple(one.name for one in signature.results if one.name in (SCORES, SCORE_VALUES, SCORE_IDS, HIDDEN))
        needs_row = message.full or any(self._needs_row(drawing, message) for drawing in message.drawings)
        wanted = (VALUES, IDS, *((ROW,) if needs_row else ()), *(scores if message.following else ()))
        found = {name: array[:sequences] for name, array in self.resident.get(wanted).items()}
        self.resident.drop((VALUES, IDS, ROW, *scores))
        return found

    def _needs_row(self, drawing: Drawing | None, message: ComputeCall) -> bool:
        """Whether the likeliest tokens are not enough to draw from."""
        if drawing is None:
            return False
        bounded = message.vocabulary is not None and message.vocabulary < self._shape.vocabulary
        return bounded or drawing.options.needs_row(self._shape.candidates)

    def _gather(
        self, message: ComputeCall, batch: int, context_pages: int, *, gathers: bool
    ) -> GatheredSequences | None:
        """Copy the pages of a decoding call's sequences unless the copy exists; return the copy's sequences."""
        before, self._gathered = self._gathered, None  # a call that fails leaves none
        if not gathers:
            return None if before is None or before.is_changed_by(message) else before
        if before is None or not before.serves(message):
            self.resident.drop(self._copied)  # or both copies would be there for a moment
            self._copied = tuple(spec.name for spec in self._shape.gathered(batch, context_pages))
            self.resident.call(gather_name(batch, context_pages))
        starts = tuple(start + 1 for start in message.starts)
        return GatheredSequences(message.function, message.page_tables, starts)


def with_draws(message: ComputeCall, found: Tensors) -> dict[str, np.ndarray]:
    """Return the results of a call as they are sent.

    Args:
        message: B sequences.
        found: results of the functions, with the row where a draw needs it.

    Returns:
        `found` with `drawn` i32 [B] and `drawn_values` f32 [B], the drawn tokens and their log-probabilities in nats (0
        where nothing is drawn), without the row unless the gateway draws, and with no more of the likeliest tokens than
        are given out, but one at least.
    """
    tokens, values = np.zeros(len(message.tokens), np.int32), np.zeros(len(message.tokens), np.float32)
    for place, drawing in enumerate(message.drawings):
        if drawing is not None:
            row = found[ROW][place] if ROW in found else None
            position = message.starts[place] + len(message.tokens[place])
            one = Candidates(found[IDS][place], found[VALUES][place], row)
            drawn = draw(one, drawing.options, position, generated=drawing.generated, most=message.vocabulary)
            tokens[place], values[place] = drawn
    sent = {name: array for name, array in found.items() if name != ROW or message.full}
    for name in (IDS, VALUES):
        sent[name] = np.ascontiguousarray(found[name][:, : max(1, message.likeliest)])
    return {**sent, DRAWN: tokens, DRAWN_VALUES: values}


def next_call(message: ComputeCall, sent: Tensors) -> ComputeCall | None:
    """Return the call after `message`, of which `sent` are the results; None: the gateway sends the next one.

    That is so after `message.extra_steps` further calls, and as soon as a sequence has ended: another may take the
    slot.
    """
    if not message.extra_steps:
        return None
    tokens = [int(token) for token in sent[DRAWN]]
    following: list[Drawing] = []
    for token, drawing in zip(tokens, message.drawings, strict=True):
        if drawing is None or token in drawing.ends:
            return None
        following.append(drawing.after(token))
    starts = tuple(start + len(new) for start, new in zip(message.starts, message.tokens, strict=True))
    return msgspec.structs.replace(
        message,
        tokens=tuple((token,) for token in tokens),
        starts=starts,
        drawings=tuple(following),
        extra_steps=message.extra_steps - 1,
    )
