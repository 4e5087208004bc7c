"""Which sequences are computed next, and where.

A worker computes one call at a time: a chunk of one sequence's prompt, or the next token of several sequences. Between
two calls sequences come and go (Yu et al. 2022, "Orca", section 3). A long prompt and running sequences take
turns (Agrawal et al. 2024, arXiv:2403.02310), so neither waits for the other's end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from planetary.runs.serve.program.cache_kinds import CacheKind
from planetary.runs.serve.program.shape import PAGE, CallKind, CallSize, ServingShape
from planetary.runs.serve.scheduling.page_pool import PagePool
from planetary.runs.serve.scheduling.sampling import Candidates, Drawing, Drawn, draw
from planetary.runs.serve.scheduling.sequences import FinishReason, SequenceRequest, SequenceState, Token

MOST_FAILURES = 5
"""Workers in a row that may be lost while they compute a sequence, before it is given up."""


@dataclass(frozen=True)
class Slot:
    """One sequence in a call.

    Attributes:
        sequence: number of the sequence.
        tokens: new tokens.
        start: position of the first new token.
        page_table: pages of the sequence, in order, as many as hold the new tokens.
        ends: whether the new tokens reach the end of the sequence, so the next one can be drawn.
        following: the token after the new ones; -1: there is none yet.
        drawing: how the worker draws the next token; None: it draws none.
    """

    sequence: int
    tokens: tuple[int, ...]
    start: int
    page_table: tuple[int, ...]
    ends: bool
    following: int = -1
    drawing: Drawing | None = None


@dataclass(frozen=True)
class Call:
    """One function call of a worker.

    Attributes:
        function: of the program.
        slots: the sequences, as many as the function has places, or fewer.
        full: whether the log-probabilities of all tokens are needed, since a next token is drawn here.
        likeliest: how many of the likeliest tokens are given out.
        scores: whether the tokens of a prompt are scored.
        extra_steps: further calls by the worker itself, each with the tokens drawn from the previous one (multi-step
            scheduling).
        adapter: of all the sequences, from 1; 0: none.
    """

    function: str
    slots: tuple[Slot, ...]
    full: bool
    likeliest: int = 0
    scores: bool = False
    extra_steps: int = 0
    adapter: int = 0


@dataclass(frozen=True)
class SequenceOutput:
    """New tokens of a sequence.

    Attributes:
        sequence: number of the sequence.
        tokens: in order; prompt tokens first, where their log-probabilities are wanted.
        finished: why nothing follows; "" while something does.
        embedding: f32 [C], the mean of the prompt's last hidden states; None: it was not wanted.
    """

    sequence: int
    tokens: tuple[Token, ...]
    finished: FinishReason | Literal[""] = ""
    embedding: np.ndarray | None = None


@dataclass
class WorkerState:
    """A worker with sequences and a KV cache.

    Attributes:
        pool: pages of the cache.
        cache_kind: form of the cache.
        sequences: running sequences, by number.
        call: under way; None: none.
        calls: sizes of the functions that the worker has.
        lacking: functions that the worker has not, in whose place others were called; a set, in order.
    """

    pool: PagePool
    cache_kind: CacheKind
    calls: tuple[CallSize, ...]
    lacking: dict[str, None] = field(default_factory=dict)
    sequences: dict[int, SequenceState] = field(default_factory=dict)
    call: Call | None = None
    prefilled: bool = False  # the last call was a chunk of a prompt

    def invariants(self) -> Iterator[tuple[bool, str]]:
        """Yield the invariants, each with a sentence for a violation."""
        yield from self.pool.invariants()
        for number, sequence in self.sequences.items():
            enough = self.cache_kind.pages_for(sequence.cached) <= len(sequence.page_table)
            yield enough, f"sequence {number} has {sequence.cached} tokens in {len(sequence.page_table)} pages"
            yield sequence.cached < len(sequence.tokens), f"sequence {number} is cached to its end, and nothing follows"


class Scheduler:
    """The sequences and workers of one gateway; a pure state machine.

    Attributes:
        workers: the workers, by session.
        waiting: sequences without a worker, the oldest first.
        extra_steps: most calls of a worker by itself after a scheduled one, while no sequence waits. A new sequence
            then waits for them.
    """

    def __init__(self, shape: ServingShape, vocabulary: int) -> None:
        """`vocabulary`: tokens below it can be drawn; a model may have more than the tokenizer."""
        self._shape, self._vocabulary, self._calls = shape, vocabulary, shape.calls
        self.workers: dict[int, WorkerState] = {}
        self.waiting: list[SequenceState] = []
        self.extra_steps = 0
        self._turn = 0

    # --- workers ----------------------------------------------------------------------------------------------

    def join(self, session: int, functions: Collection[str] | None = None) -> None:
        """A worker with an empty cache takes calls.

        `functions`: those that the worker has beside the shape's first ones; None: all.
        """
        calls = self._calls if functions is None else self._shape.first_calls
        self.workers[session] = WorkerState(PagePool(self._shape.pages), self._shape.cache_kind, calls)
        if functions:
            self.extend(session, functions)

    def extend(self, session: int, functions: Collection[str]) -> None:
        """A worker has further functions."""
        worker = self.workers[session]
        worker.calls = self._shape.calls_of({*functions, *(one.name for one in worker.calls)})

    def lose(self, session: int, *, blames: bool = True) -> list[SequenceOutput]:
        """A worker is gone. The worker's sequences wait for another, before those that came later.

        `blames`: the sequences of the call may be the reason; not if it was asked to go.

        Returns the sequences abandoned after being on too many lost workers.
        """
        worker = self.workers.pop(session, None)
        if worker is None:
            return []
        given_up = []
        for slot in worker.call.slots if worker.call is not None and blames else ():
            sequence = worker.sequences.get(slot.sequence)
            if sequence is None:
                continue
            sequence.failures += 1
            if sequence.failures >= MOST_FAILURES:
                del worker.sequences[slot.sequence]
                given_up.append(SequenceOutput(slot.sequence, (), "error"))
        for sequence in worker.sequences.values():
            sequence.release_pages()
        self.waiting = sorted([*worker.sequences.values(), *self.waiting], key=lambda sequence: sequence.request.number)
        return given_up

    # --- sequences ------------------------------------------------------------------------------------------------

    def submit(self, request: SequenceRequest) -> None:
        """Take a sequence; the prompt is shorter than the window."""
        self.waiting.append(SequenceState(request))

    def cancel(self, number: int) -> bool:
        """Forget a sequence; return whether there was one."""
        for sequence in self.waiting:
            if sequence.request.number == number:
                self.waiting.remove(sequence)
                return True
        for worker in self.workers.values():
            if number in worker.sequences:
                self._remove(worker, number)
                return True
        return False

    def request(self, number: int) -> SequenceRequest:
        """Return the request of a sequence a worker computes."""
        return next(worker.sequences[number] for worker in self.workers.values() if number in worker.sequences).request

    def has(self, number: int) -> bool:
        """Whether a sequence is neither finished nor cancelled."""
        return any(sequence.request.number == number for sequence in self.waiting) or any(
            number in worker.sequences for worker in self.workers.values()
        )

    @property
    def running(self) -> int:
        """How many sequences have a worker."""
        return sum(len(worker.sequences) for worker in self.workers.values())

    @property
    def used_share(self) -> float:
        """Which part of all workers' pages sequences use, 0 to 1."""
        shares = [worker.pool.used_share for worker in self.workers.values()]
        return sum(shares) / len(shares) if shares else 0.0

    # --- calls ------------------------------------------------------------------------------------------------

    def next_calls(self) -> list[tuple[int, Call]]:
        """Give waiting sequences to workers, and return the next calls of idle workers, by session."""
        found: list[tuple[int, Call]] = []
        while True:
            self._admit()
            before = len(found)
            for session, worker in self.workers.items():
                if worker.call is None and (call := self._next_call(worker)) is not None:
                    worker.call = call
                    found.append((session, call))
            # A preempted sequence may go to an idle worker.
            if len(found) == before or not self.waiting:
                return found

    def computed(self, session: int, results: Sequence[Candidates], *, last: bool = True) -> list[SequenceOutput]:
        """Take the results of a worker's call, in the order of the slots; return the sequences' new tokens.

        `last`: whether the worker has no further results of the call.
        """
        worker = self.workers[session]
        assert worker.call is not None
        call, worker.call = worker.call, None
        found = []
        following = []  # slots of the call the worker makes by itself
        for slot, candidates in zip(call.slots, results, strict=True):
            sequence = worker.sequences.get(slot.sequence)
            if sequence is None:
                following.append(slot)
                continue  # cancelled meanwhile
            sequence.failures = 0
            self._cache(worker, sequence, slot)
            output = self._go_on(sequence, slot, candidates)
            if output is not None:
                found.append(output)
                if output.finished:
                    self._remove(worker, slot.sequence)
            following.append(replace(slot, tokens=(sequence.tokens[-1],), start=sequence.cached))
        if not last:
            worker.call = replace(call, slots=tuple(following), extra_steps=call.extra_steps - 1)
        return found

    def invariants(self) -> Iterator[tuple[bool, str]]:
        """Yield the invariants, each with a sentence for a violation."""
        numbers = [sequence.request.number for sequence in self.waiting]
        for worker in self.workers.values():
            yield from worker.invariants()
            numbers += worker.sequences
        yield len(numbers) == len(set(numbers)), f"a sequence is in two places: {sorted(numbers)}"
        yield (
            not any(sequence.page_table or sequence.cached for sequence in self.waiting),
            "a sequence that waits has pages",
        )

    def idle_for_no_reason(self) -> str:
        """Return the work of a worker that is idle after `next_calls`; "" if there is none."""
        for session, worker in self.workers.items():
            if worker.call is None and (worker.sequences or self.waiting):
                return f"worker {session} is idle with {len(worker.sequences)} sequences, and {len(self.waiting)} wait"
        return ""

    # --- admission --------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give sequences to workers while there is room; the user with the fewest running sequences comes first."""
        while self.waiting and self.workers:
            running: dict[str, int] = {}
            for worker in self.workers.values():
                for sequence in worker.sequences.values():
                    running[sequence.request.user] = running.get(sequence.request.user, 0) + 1
            sequence = min(self.waiting, key=lambda one: (running.get(one.request.user, 0), one.request.number))
            needed = self._shape.pages_for(len(sequence.tokens) + 1)
            able = [
                worker
                for worker in self.workers.values()
                if len(worker.sequences) < self._shape.batches[-1] and worker.pool.available >= needed
            ]
            if not able:
                return
            self.waiting.remove(sequence)
            worker = max(able, key=lambda one: (-len(one.sequences), one.pool.available))
            if self._shape.cache_kind.is_shared and not sequence.scores:
                sequence.page_table = worker.pool.shared(sequence.tokens, sequence.request.adapter)
                sequence.cached = PAGE * len(sequence.page_table)
            worker.sequences[sequence.request.number] = sequence

    # --- calls of a worker -----------------------------------------------------------------------------------

    def _next_call(self, worker: WorkerState) -> Call | None:
        """Return a worker's next call; None without sequences.

        Room for one sequence may preempt others, or itself. The oldest one always gets room, so one of them has a call.
        """
        self._turn += 1
        kinds = (self._next_decode, self._next_prefill) if worker.prefilled else (self._next_prefill, self._next_decode)
        for next_of_kind in kinds:
            call = next_of_kind(worker)
            if call is not None:
                worker.prefilled = next_of_kind == self._next_prefill
                return call
        return None

    def _next_prefill(self, worker: WorkerState) -> Call | None:
        sequences = sorted(
            (sequence for sequence in worker.sequences.values() if self._prefills(sequence)),
            key=lambda sequence: sequence.turn,
        )
        for place, sequence in enumerate(sequences):
            if (
                sequence.request.number in worker.sequences
                and (call := self._prefill(worker, sequence, sequences[place + 1 :])) is not None
            ):
                return call
        return None

    def _next_decode(self, worker: WorkerState) -> Call | None:
        sequences = sorted(
            (sequence for sequence in worker.sequences.values() if not self._prefills(sequence)),
            key=lambda sequence: sequence.turn,
        )
        return self._decode(worker, sequences)

    def _prefills(self, sequence: SequenceState) -> bool:
        """Whether a whole chunk of a sequence is computed next."""
        return sequence.prefills or not self._shape.cache_kind.remembers

    def _prefill(self, worker: WorkerState, sequence: SequenceState, others: Sequence[SequenceState]) -> Call | None:
        """Return the call for the next chunk of a sequence, and of others with a chunk of the same size."""
        scores, size = sequence.scores, self._prefill_size(worker, sequence)
        chunk = size.tokens
        if not self._reserve(worker, sequence, sequence.cached + min(chunk, sequence.missing)):
            return None
        chosen = [sequence]
        has_all = len(worker.calls) == len(self._calls)
        for other in others if has_all and not scores else ():
            if len(chosen) == self._shape.prefills[-1]:
                break
            if other.request.adapter == sequence.request.adapter and self._may_prefill_with(worker, other, chunk):
                chosen.append(other)
        for one in chosen:
            one.turn = self._turn
        slots = tuple(self._slot(one, min(chunk, one.missing)) for one in chosen)
        if len(chosen) > 1:
            needed = max(len(one.page_table) for one in chosen)
            size = self._pick(
                worker,
                lambda one: one.tokens == chunk and one.kind is CallKind.PREFILL and one.batch >= len(chosen),
                context_pages=needed,
                sequences=len(chosen),
            )
        return _call(size.name, chosen, slots, scores=scores)

    def _prefill_size(self, worker: WorkerState, sequence: SequenceState) -> CallSize:
        """Return the size of the call that takes the next chunk of a sequence."""
        missing = sequence.missing
        kinds = {CallKind.SCORE} if sequence.scores else {CallKind.PREFILL, CallKind.SCORE}

        def fits(one: CallSize) -> bool:
            whole = self._shape.cache_kind.remembers or one.tokens >= missing
            needed = self._shape.pages_for(sequence.cached + min(one.tokens, missing))
            return one.kind in kinds and whole and needed <= one.context_pages

        return self._pick(worker, fits, context_pages=len(sequence.page_table), tokens=missing)

    def _pick(
        self,
        worker: WorkerState,
        fits: Callable[[CallSize], bool],
        *,
        context_pages: int,
        sequences: int = 1,
        tokens: int = 1,
    ) -> CallSize:
        """Return the size of the worker's function that takes most of the tokens, with the least work.

        The worker lacks the function that would be chosen of all.
        """

        def cost(one: CallSize) -> tuple[int, ...]:
            taken = min(one.tokens, tokens), min(one.batch, sequences)
            return -taken[0], -taken[1], one.scores, one.tokens, one.batch, one.context_pages

        best, nearest = (
            min((one for one in calls if one.context_pages >= context_pages and fits(one)), key=cost)
            for calls in (self._calls, worker.calls)
        )
        if best != nearest:
            worker.lacking[best.name] = None
        return nearest

    def _may_prefill_with(self, worker: WorkerState, sequence: SequenceState, chunk: int) -> bool:
        """Whether a sequence takes the next chunk in the same call as another; then it has the pages. No sequence is
        preempted.
        """
        if (
            sequence.request.number not in worker.sequences
            or sequence.scores
            or self._prefill_size(worker, sequence).tokens != chunk
        ):
            return False
        lacking = self._shape.pages_for(sequence.cached + min(chunk, sequence.missing)) - len(sequence.page_table)
        if lacking > worker.pool.available:
            return False
        sequence.page_table += [worker.pool.allocate() for _ in range(lacking)]
        return True

    def _decode(self, worker: WorkerState, sequences: Sequence[SequenceState]) -> Call | None:
        chosen: list[SequenceState] = []
        for sequence in sequences[: self._shape.batches[-1]]:
            if chosen and sequence.request.adapter != chosen[0].request.adapter:
                continue  # a call has one adapter; these sequences have waited longest at the next one
            # Room for one may have preempted another.
            if sequence.request.number in worker.sequences and self._reserve(
                worker, sequence, sequence.cached + 1, spared=chosen
            ):
                chosen.append(sequence)
        if not chosen:
            return None
        size = self._pick(
            worker,
            lambda one: one.kind is CallKind.DECODE,
            context_pages=max(len(sequence.page_table) for sequence in chosen),
            sequences=len(chosen),
        )
        chosen = chosen[: size.batch]
        for sequence in chosen:
            sequence.turn = self._turn
        slots = tuple(self._slot(sequence, 1) for sequence in chosen)
        extra_steps = self._extra_steps(worker, chosen, size.context_pages)
        slots = tuple(
            replace(slot, page_table=tuple(sequence.page_table)) for slot, sequence in zip(slots, chosen, strict=True)
        )
        return _call(size.name, chosen, slots, extra_steps=extra_steps)

    def _extra_steps(self, worker: WorkerState, chosen: Sequence[SequenceState], context_pages: int) -> int:
        """Return how many further steps a worker may take with these sequences by itself; give them the pages.

        No sequence gets more than `context_pages`.
        """
        by_itself = all(sequence.request.constraint is None and sequence.missing == 1 for sequence in chosen)
        if self.waiting or len(chosen) < len(worker.sequences) or not by_itself:
            return 0
        most = (
            min(sequence.request.most - len(sequence.generated), self._shape.window - len(sequence.tokens))
            for sequence in chosen
        )
        extra_steps = max(0, min(self.extra_steps, min(most) - 1))
        for sequence in chosen:
            while extra_steps and self._shape.pages_for(sequence.cached + 1 + extra_steps) > len(sequence.page_table):
                if worker.pool.available and len(sequence.page_table) < context_pages:
                    sequence.page_table.append(worker.pool.allocate())
                else:
                    extra_steps -= 1
        return extra_steps

    def _slot(self, sequence: SequenceState, count: int) -> Slot:
        start = sequence.cached
        end = start + count
        request, new, ends = sequence.request, tuple(sequence.tokens[start:end]), end == len(sequence.tokens)
        drawing = None
        if ends and not request.embeds and request.constraint is None:
            generated = tuple(sequence.generated) if request.options.counts_tokens else ()
            drawing = Drawing(request.options, request.ends, generated)
        following = -1 if ends else sequence.tokens[end]
        return Slot(request.number, new, start, tuple(sequence.page_table), ends, following, drawing)

    def _reserve(
        self, worker: WorkerState, sequence: SequenceState, tokens: int, spared: Sequence[SequenceState] = ()
    ) -> bool:
        """Give a sequence pages for so many tokens; the youngest one, maybe this one, may be preempted."""
        while len(sequence.page_table) < self._shape.pages_for(tokens):
            if worker.pool.available:
                sequence.page_table.append(worker.pool.allocate())
                continue
            youngest = max(
                (one for one in worker.sequences.values() if one not in spared), key=lambda one: one.request.number
            )
            self._preempt(worker, youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, worker: WorkerState, sequence: SequenceState) -> None:
        """Free the pages of a sequence, which waits to be computed again."""
        self._remove(worker, sequence.request.number)
        self.waiting.append(sequence)

    # --- results of a call -----------------------------------------------------------------------------------

    def _cache(self, worker: WorkerState, sequence: SequenceState, slot: Slot) -> None:
        """Take note that a slot's tokens are in the cache, and which full pages another sequence may use."""
        if not self._shape.cache_kind.remembers:
            return
        first, sequence.cached = slot.start // PAGE, slot.start + len(slot.tokens)
        for page in range(first, sequence.cached // PAGE if self._shape.cache_kind.is_shared else 0):
            worker.pool.register(sequence.page_table[page], sequence.prefix(page))

    def _go_on(self, sequence: SequenceState, slot: Slot, found: Candidates) -> SequenceOutput | None:
        request = sequence.request
        if request.embeds:
            return self._embedded(sequence, slot, found)
        scored: list[Token] = []
        if sequence.scores:
            scored = self._scored(sequence, slot, found)
        if not slot.ends:
            return SequenceOutput(request.number, tuple(scored)) if scored else None
        allowed = None
        if request.constraint is not None:
            allowed = request.constraint.allowed(sequence.generated)
            if not allowed[: self._vocabulary].any():
                return SequenceOutput(request.number, tuple(scored), "stop")
        drawn = found.drawn
        if slot.drawing is None or drawn is None:
            drawn = draw(
                found,
                request.options,
                len(sequence.tokens),
                generated=sequence.generated,
                most=self._vocabulary,
                allowed=allowed,
            )
        if drawn.token in request.ends:
            return SequenceOutput(request.number, tuple(scored), "stop")
        sequence.tokens.append(drawn.token)
        output = (*scored, self._token(drawn, found, request.likeliest))
        if request.constraint is not None and request.constraint.is_complete(sequence.generated):
            return SequenceOutput(request.number, output, "stop")
        full = len(sequence.tokens) >= self._shape.window or len(sequence.generated) >= request.most
        return SequenceOutput(request.number, output, "length" if full else "")

    @staticmethod
    def _embedded(sequence: SequenceState, slot: Slot, found: Candidates) -> SequenceOutput | None:
        """Add the hidden states of a slot's tokens to those before; return the prompt's mean at the end."""
        assert found.scores is not None
        assert found.scores.hidden is not None
        sequence.hidden = found.scores.hidden if sequence.hidden is None else sequence.hidden + found.scores.hidden
        if not slot.ends:
            return None
        return SequenceOutput(
            sequence.request.number, (), "stop", sequence.hidden / np.float32(len(sequence.request.prompt))
        )

    def _scored(self, sequence: SequenceState, slot: Slot, found: Candidates) -> list[Token]:
        """Return the tokens of a prompt of which log-probabilities are known now, and were not before."""
        prompt, scores, likeliest = sequence.request.prompt, found.scores, sequence.request.likeliest
        if scores is None:
            return []  # a chunk before the scored ones
        done = [Token(prompt[0], None)] if sequence.scored == 0 else []
        for offset, logprob in enumerate(scores.values[: len(slot.tokens)].tolist()):
            place = slot.start + offset + 1
            if place == sequence.scored + len(done) < len(prompt):  # after a worker's loss earlier ones come again
                ids, values = scores.ids[offset, :likeliest], scores.likeliest[offset, :likeliest]
                best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
                done.append(Token(prompt[place], logprob, best))
        sequence.scored += len(done)
        return done

    @staticmethod
    def _token(drawn: Drawn, found: Candidates, likeliest: int) -> Token:
        best = zip(found.ids[:likeliest].tolist(), found.values[:likeliest].tolist(), strict=True)
        return Token(drawn.token, drawn.logprob, tuple(best))

    def _remove(self, worker: WorkerState, number: int) -> None:
        worker.pool.release(worker.sequences.pop(number).release_pages())


def _call(
    function: str,
    chosen: Sequence[SequenceState],
    slots: tuple[Slot, ...],
    *,
    scores: bool = False,
    extra_steps: int = 0,
) -> Call:
    full = any(
        slot.ends and one.request.constraint is not None and not one.request.embeds
        for one, slot in zip(chosen, slots, strict=True)
    )
    likeliest = max((one.request.likeliest for one, slot in zip(chosen, slots, strict=True) if slot.ends), default=0)
    return Call(function, slots, full, likeliest, scores, extra_steps, chosen[0].request.adapter)
