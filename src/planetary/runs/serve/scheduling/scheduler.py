"""Which texts are computed next, and where.

A worker computes one call at a time: a chunk of one text's prompt, or the next token of several texts. Between two
calls texts come and go (Yu et al. 2022, "Orca", section 3). A long prompt and the texts that are being continued take
turns (Agrawal et al. 2024, arXiv:2403.02310), so neither waits for the other's end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from planetary.runs.serve.program.shape import PAGE, ServingShape, decode_name, prefill_name, score_name
from planetary.runs.serve.program.text_memory import TextMemory
from planetary.runs.serve.scheduling.page_pool import PagePool
from planetary.runs.serve.scheduling.sampling import Candidates, Drawn, draw
from planetary.runs.serve.scheduling.texts import FinishReason, Text, TextRequest, Token

MOST_FAILURES = 5
"""Workers in a row that may be lost while they compute a text, before it is given up."""


@dataclass(frozen=True)
class Row:
    """One text in a call.

    Attributes:
        text: its number.
        tokens: that are new.
        start: position of the first of them.
        pages: of the text, in order, as many as hold the new tokens.
        ends: whether the last token of the text is among the new ones, so the next one can be drawn.
        following: the token after the new ones; -1: there is none yet.
    """

    text: int
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    ends: bool
    following: int = -1


@dataclass(frozen=True)
class Call:
    """One function call of a worker.

    Attributes:
        function: of the program.
        rows: the texts, as many as the function has places, or fewer.
        full: whether the log-probabilities of all tokens are needed, and not only of the likeliest.
        scores: whether the tokens of a prompt are scored.
        ahead: how many further calls the worker makes of it, each with the tokens it draws from the one before. Its
            draws are repeated here, from the same numbers.
    """

    function: str
    rows: tuple[Row, ...]
    full: bool
    scores: bool = False
    ahead: int = 0


@dataclass(frozen=True)
class Given:
    """New tokens of a text.

    Attributes:
        text: its number.
        tokens: in order; those of the prompt first, where its log-probabilities are wanted.
        finished: why nothing follows; "" while something does.
        embedding: f32 [C], the mean of the prompt's last hidden states; None: it was not wanted.
    """

    text: int
    tokens: tuple[Token, ...]
    finished: FinishReason | Literal[""] = ""
    embedding: np.ndarray | None = None


@dataclass
class Seat:
    """A worker with its texts and its cache.

    Attributes:
        pool: the pages of its cache.
        memory: of its device, for a text.
        texts: that it computes, by number.
        call: under way; None: none.
    """

    pool: PagePool
    memory: TextMemory
    texts: dict[int, Text] = field(default_factory=dict)
    call: Call | None = None
    prefilled: bool = False  # the last call was a chunk of a prompt

    def invariants(self) -> Iterator[tuple[bool, str]]:
        """Yield the invariants, each with a sentence for a violation."""
        yield from self.pool.invariants()
        for number, text in self.texts.items():
            enough = self.memory.pages_for(text.cached) <= len(text.pages)
            yield enough, f"text {number} has {text.cached} tokens in {len(text.pages)} pages"
            yield text.cached < len(text.tokens), f"text {number} is cached to its end, and nothing follows"


class Scheduler:
    """The texts and workers of one gateway; a pure state machine.

    Attributes:
        seats: the workers, by session.
        waiting: texts without a worker, the oldest first.
        ahead: how many calls a worker may make by itself after the one it is given, while no text waits. A text that
            comes then waits for them.
    """

    def __init__(self, shape: ServingShape, vocabulary: int) -> None:
        """`vocabulary`: tokens below it can be drawn; a model may have more than its tokenizer."""
        self._shape, self._vocabulary = shape, vocabulary
        self.seats: dict[int, Seat] = {}
        self.waiting: list[Text] = []
        self.ahead = 0
        self._turn = 0

    # --- workers ----------------------------------------------------------------------------------------------

    def join(self, session: int) -> None:
        """A worker with an empty cache takes calls."""
        self.seats[session] = Seat(PagePool(self._shape.pages), self._shape.memory)

    def lose(self, session: int, *, blames: bool = True) -> list[Given]:
        """A worker is gone. Its texts wait for another, before those that came later.

        `blames`: the texts of its call may be the reason; not if it was asked to go.

        Returns the texts that are given up: so many workers were lost with them that others would be, too.
        """
        seat = self.seats.pop(session, None)
        if seat is None:
            return []
        given_up = []
        for row in seat.call.rows if seat.call is not None and blames else ():
            text = seat.texts.get(row.text)
            if text is None:
                continue
            text.failures += 1
            if text.failures >= MOST_FAILURES:
                del seat.texts[row.text]
                given_up.append(Given(row.text, (), "error"))
        for text in seat.texts.values():
            text.leave()
        self.waiting = sorted([*seat.texts.values(), *self.waiting], key=lambda text: text.request.text)
        return given_up

    # --- texts ------------------------------------------------------------------------------------------------

    def submit(self, request: TextRequest) -> None:
        """Take a text; its prompt is shorter than the window."""
        self.waiting.append(Text(request))

    def cancel(self, number: int) -> bool:
        """Forget a text; return whether there was one."""
        for text in self.waiting:
            if text.request.text == number:
                self.waiting.remove(text)
                return True
        for seat in self.seats.values():
            if number in seat.texts:
                self._remove(seat, number)
                return True
        return False

    def request(self, number: int) -> TextRequest:
        """Return the request of a text a worker computes."""
        return next(seat.texts[number] for seat in self.seats.values() if number in seat.texts).request

    def has(self, number: int) -> bool:
        """Whether a text is neither finished nor cancelled."""
        return any(text.request.text == number for text in self.waiting) or any(
            number in seat.texts for seat in self.seats.values()
        )

    @property
    def running(self) -> int:
        """How many texts have a worker."""
        return sum(len(seat.texts) for seat in self.seats.values())

    @property
    def used_share(self) -> float:
        """Which part of all workers' pages texts use, 0 to 1."""
        shares = [seat.pool.used_share for seat in self.seats.values()]
        return sum(shares) / len(shares) if shares else 0.0

    # --- calls ------------------------------------------------------------------------------------------------

    def next_calls(self) -> list[tuple[int, Call]]:
        """Give waiting texts to workers, and return the next calls of idle workers, by session."""
        found: list[tuple[int, Call]] = []
        while True:
            self._admit()
            before = len(found)
            for session, seat in self.seats.items():
                if seat.call is None and (call := self._next_call(seat)) is not None:
                    seat.call = call
                    found.append((session, call))
            if len(found) == before or not self.waiting:  # a text that made room for another may go to an idle worker
                return found

    def computed(self, session: int, results: Sequence[Candidates], *, last: bool = True) -> list[Given]:
        """Take the results of a worker's call, in the order of its rows; return the texts' new tokens.

        `last`: whether the worker has no further results of the call.
        """
        seat = self.seats[session]
        assert seat.call is not None
        call, seat.call = seat.call, None
        found = []
        following = []  # rows of the call the worker makes by itself
        for row, candidates in zip(call.rows, results, strict=True):
            text = seat.texts.get(row.text)
            if text is None:
                following.append(row)
                continue  # cancelled meanwhile
            text.failures = 0
            self._cache(seat, text, row)
            given = self._go_on(text, row, candidates)
            if given is not None:
                found.append(given)
                if given.finished:
                    self._remove(seat, row.text)
            following.append(replace(row, tokens=(text.tokens[-1],), start=text.cached))
        if not last:
            seat.call = replace(call, rows=tuple(following), ahead=call.ahead - 1)
        return found

    def invariants(self) -> Iterator[tuple[bool, str]]:
        """Yield the invariants, each with a sentence for a violation."""
        numbers = [text.request.text for text in self.waiting]
        for seat in self.seats.values():
            yield from seat.invariants()
            numbers += seat.texts
        yield len(numbers) == len(set(numbers)), f"a text is in two places: {sorted(numbers)}"
        yield not any(text.pages or text.cached for text in self.waiting), "a text that waits has pages"

    def idle_for_no_reason(self) -> str:
        """Return the work of a worker that is idle after `next_calls`; "" if there is none."""
        for session, seat in self.seats.items():
            if seat.call is None and (seat.texts or self.waiting):
                return f"worker {session} is idle with {len(seat.texts)} texts, and {len(self.waiting)} wait"
        return ""

    # --- admission --------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give texts to workers while there is room; the user with the fewest running texts comes first."""
        while self.waiting and self.seats:
            running: dict[str, int] = {}
            for seat in self.seats.values():
                for text in seat.texts.values():
                    running[text.request.user] = running.get(text.request.user, 0) + 1
            text = min(self.waiting, key=lambda one: (running.get(one.request.user, 0), one.request.text))
            needed = self._shape.pages_for(len(text.tokens) + 1)
            able = [
                seat
                for seat in self.seats.values()
                if len(seat.texts) < self._shape.batches[-1] and seat.pool.available >= needed
            ]
            if not able:
                return
            self.waiting.remove(text)
            seat = max(able, key=lambda one: (-len(one.texts), one.pool.available))
            if self._shape.memory.is_shared and not text.scores:
                text.pages = seat.pool.shared(text.tokens)
                text.cached = PAGE * len(text.pages)
            seat.texts[text.request.text] = text

    # --- calls of a worker -----------------------------------------------------------------------------------

    def _next_call(self, seat: Seat) -> Call | None:
        """Return a worker's next call; None without texts.

        Making room for one text may send others away, or itself. The oldest one always gets room, so looking at all of
        them finds a call.
        """
        self._turn += 1
        kinds = (self._next_decode, self._next_prefill) if seat.prefilled else (self._next_prefill, self._next_decode)
        for next_of_kind in kinds:
            call = next_of_kind(seat)
            if call is not None:
                seat.prefilled = next_of_kind == self._next_prefill
                return call
        return None

    def _next_prefill(self, seat: Seat) -> Call | None:
        texts = sorted((text for text in seat.texts.values() if self._prefills(text)), key=lambda text: text.turn)
        for place, text in enumerate(texts):
            if text.request.text in seat.texts and (call := self._prefill(seat, text, texts[place + 1 :])) is not None:
                return call
        return None

    def _next_decode(self, seat: Seat) -> Call | None:
        texts = sorted((text for text in seat.texts.values() if not self._prefills(text)), key=lambda text: text.turn)
        return self._decode(seat, texts)

    def _prefills(self, text: Text) -> bool:
        """Whether a whole chunk of a text is computed next."""
        return text.prefills or not self._shape.memory.remembers

    def _prefill(self, seat: Seat, text: Text, others: Sequence[Text]) -> Call | None:
        """Return the call that takes the next chunk of a text, and of others that take a chunk of the same size."""
        scores = text.scores
        chunk = self._shape.scored_chunk_for(text.missing) if scores else self._shape.chunk_for(text.missing)
        if not self._reserve(seat, text, text.cached + min(chunk, text.missing)):
            return None
        chosen = [text]
        for other in () if scores else others:
            if len(chosen) == self._shape.prefills[-1]:
                break
            if self._may_prefill_with(seat, other, chunk):
                chosen.append(other)
        for one in chosen:
            one.turn = self._turn
        rows = tuple(self._row(one, min(chunk, one.missing)) for one in chosen)
        reach = self._shape.reach_for(max(len(one.pages) for one in chosen))
        full = any(self._needs_row(one, row) for one, row in zip(chosen, rows, strict=True))
        if scores:
            return Call(score_name(chunk, reach), rows, full, scores)
        return Call(prefill_name(chunk, reach, self._shape.prefill_for(len(rows))), rows, full)

    def _may_prefill_with(self, seat: Seat, text: Text, chunk: int) -> bool:
        """Whether a text takes its next chunk in the same call as another; then it has the pages. No text goes away."""
        if text.request.text not in seat.texts or text.scores or self._shape.chunk_for(text.missing) != chunk:
            return False
        lacking = self._shape.pages_for(text.cached + min(chunk, text.missing)) - len(text.pages)
        if lacking > seat.pool.available:
            return False
        text.pages += [seat.pool.take() for _ in range(lacking)]
        return True

    def _decode(self, seat: Seat, texts: Sequence[Text]) -> Call | None:
        chosen: list[Text] = []
        for text in texts[: self._shape.batches[-1]]:
            # Making room for one may have sent another away.
            if text.request.text in seat.texts and self._reserve(seat, text, text.cached + 1, spared=chosen):
                text.turn = self._turn
                chosen.append(text)
        if not chosen:
            return None
        rows = tuple(self._row(text, 1) for text in chosen)
        ahead = self._steps_ahead(seat, chosen)
        rows = tuple(replace(row, pages=tuple(text.pages)) for row, text in zip(rows, chosen, strict=True))
        reach = self._shape.reach_for(max(len(text.pages) for text in chosen))
        full = any(self._needs_row(text, row) for text, row in zip(chosen, rows, strict=True))
        return Call(decode_name(self._shape.batch_for(len(rows)), reach), rows, full, ahead=ahead)

    def _steps_ahead(self, seat: Seat, chosen: Sequence[Text]) -> int:
        """Return how many calls a worker makes by itself after one that continues these texts; give them the pages."""
        by_itself = all(
            text.request.constraint is None and not text.request.options.changes_scores and text.missing == 1
            for text in chosen
        )
        if self.waiting or len(chosen) < len(seat.texts) or not by_itself:
            return 0
        most = (min(text.request.most - len(text.generated), self._shape.window - len(text.tokens)) for text in chosen)
        ahead = max(0, min(self.ahead, min(most) - 1))
        for text in chosen:
            while ahead and self._shape.pages_for(text.cached + 1 + ahead) > len(text.pages):
                if seat.pool.available:
                    text.pages.append(seat.pool.take())
                else:
                    ahead -= 1
        return ahead

    def _row(self, text: Text, count: int) -> Row:
        start = text.cached
        end = start + count
        new, ends = tuple(text.tokens[start:end]), end == len(text.tokens)
        return Row(text.request.text, new, start, tuple(text.pages), ends, -1 if ends else text.tokens[end])

    def _needs_row(self, text: Text, row: Row) -> bool:
        """Whether a row's results need the log-probabilities of all tokens."""
        most = self._shape.candidates
        constrained = text.request.constraint is not None or self._vocabulary < self._shape.vocabulary
        drawn = row.ends and not text.request.embeds
        return drawn and (constrained or text.request.options.needs_row(most))

    def _reserve(self, seat: Seat, text: Text, tokens: int, spared: Sequence[Text] = ()) -> bool:
        """Give a text pages for so many tokens; the youngest text, maybe this one, may have to go and wait for that."""
        while len(text.pages) < self._shape.pages_for(tokens):
            if seat.pool.available:
                text.pages.append(seat.pool.take())
                continue
            youngest = max((one for one in seat.texts.values() if one not in spared), key=lambda one: one.request.text)
            self._remove(seat, youngest.request.text)
            self.waiting.append(youngest)
            if youngest is text:
                return False
        return True

    # --- results of a call -----------------------------------------------------------------------------------

    def _cache(self, seat: Seat, text: Text, row: Row) -> None:
        """Take note that a row's tokens are in the cache, and which full pages another text may use."""
        if not self._shape.memory.remembers:
            return
        first, text.cached = row.start // PAGE, row.start + len(row.tokens)
        for page in range(first, text.cached // PAGE if self._shape.memory.is_shared else 0):
            seat.pool.know(text.pages[page], text.prefix(page))

    def _go_on(self, text: Text, row: Row, found: Candidates) -> Given | None:
        request = text.request
        if request.embeds:
            return self._embedded(text, row, found)
        scored: list[Token] = []
        if text.scores:
            scored = self._scored(text, row, found)
        if not row.ends:
            return Given(request.text, tuple(scored)) if scored else None
        allowed = None
        if request.constraint is not None:
            allowed = request.constraint.allowed(text.generated)
            if not allowed[: self._vocabulary].any():
                return Given(request.text, tuple(scored), "stop")
        drawn = draw(
            found,
            request.options,
            len(text.tokens),
            generated=text.generated,
            most=self._vocabulary,
            allowed=allowed,
        )
        if drawn.token in request.ends:
            return Given(request.text, tuple(scored), "stop")
        text.tokens.append(drawn.token)
        given = (*scored, self._token(drawn, found, request.likeliest))
        if request.constraint is not None and request.constraint.is_complete(text.generated):
            return Given(request.text, given, "stop")
        full = len(text.tokens) >= self._shape.window or len(text.generated) >= request.most
        return Given(request.text, given, "length" if full else "")

    @staticmethod
    def _embedded(text: Text, row: Row, found: Candidates) -> Given | None:
        """Add the hidden states of a row's tokens to those before; return the prompt's mean at the end."""
        assert found.scores is not None
        assert found.scores.hidden is not None
        text.hidden = found.scores.hidden if text.hidden is None else text.hidden + found.scores.hidden
        if not row.ends:
            return None
        return Given(text.request.text, (), "stop", text.hidden / np.float32(len(text.request.prompt)))

    def _scored(self, text: Text, row: Row, found: Candidates) -> list[Token]:
        """Return the tokens of a prompt of which log-probabilities are known now, and were not before."""
        prompt, scores, likeliest = text.request.prompt, found.scores, text.request.likeliest
        if scores is None:
            return []  # a chunk before the scored ones
        done = [Token(prompt[0], None)] if text.scored == 0 else []
        for offset, logprob in enumerate(scores.values[: len(row.tokens)].tolist()):
            place = row.start + offset + 1
            if place == text.scored + len(done) < len(prompt):  # after a worker's loss earlier ones come again
                ids, values = scores.ids[offset, :likeliest], scores.likeliest[offset, :likeliest]
                best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
                done.append(Token(prompt[place], logprob, best))
        text.scored += len(done)
        return done

    @staticmethod
    def _token(drawn: Drawn, found: Candidates, likeliest: int) -> Token:
        best = zip(found.ids[:likeliest].tolist(), found.values[:likeliest].tolist(), strict=True)
        return Token(drawn.token, drawn.logprob, tuple(best))

    def _remove(self, seat: Seat, number: int) -> None:
        seat.pool.give_back(seat.texts.pop(number).leave())
