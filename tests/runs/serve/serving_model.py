"""A model that is a hash of the text, a worker that computes it from its cache of tokens, and a service of both."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from planetary.core.errors import ClosedError
from planetary.data.tokenizer import ByteTokenizer
from planetary.models.context import CacheSizes
from planetary.runs.serve.program.cache_kinds import NoCache, RecurrentState
from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.program.shape import PAGE, ServingShape
from planetary.runs.serve.program.traced_model import TracedModel
from planetary.runs.serve.scheduling.sampling import Candidates, Scores, draw
from planetary.runs.serve.scheduling.scheduler import Call, Scheduler, SequenceOutput, Slot
from planetary.runs.serve.scheduling.sequences import SequenceRequest

VOCABULARY = 50
HIDDEN = 6
SHAPE = ServingShape(
    vocabulary=VOCABULARY,
    window=8 * PAGE,
    pages=13,
    page_shape=(2, 1, PAGE, 1),
    batches=(1, 2, 4),
    chunks=(2 * PAGE, 4 * PAGE),
    context_sizes=(2, 8),
)


STATES = msgspec.structs.replace(SHAPE, pages=5, page_shape=(7,), context_sizes=(1,), cache_kind=RecurrentState())
FORGETFUL = msgspec.structs.replace(
    SHAPE, pages=2, page_shape=(1,), context_sizes=(1,), cache_kind=NoCache(), chunks=(2 * PAGE, 4 * PAGE, 8 * PAGE)
)


def row_of(text: tuple[int, ...], vocabulary: int = VOCABULARY) -> np.ndarray:
    """The log-probabilities of the token after a text."""
    digest = hashlib.blake2b(np.asarray(text, np.int64).tobytes(), digest_size=8).digest()
    scores = np.random.default_rng(int.from_bytes(digest, "little")).normal(size=vocabulary)
    return (scores - np.log(np.exp(scores).sum())).astype(np.float32)


def state_of(text: tuple[int, ...]) -> np.ndarray:
    """The last hidden state after a text: whole numbers, whose sums are exact."""
    return np.round(100 * row_of(text, HIDDEN)).astype(np.float32)


@dataclass
class FakeWorker:
    """A cache of tokens instead of keys and values; it finds out what a call sees from its pages alone."""

    pages: dict[int, list[int]] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    prefilled: int = 0
    vocabulary: int = VOCABULARY
    adapter: int = 0  # of the newest call; a token in a page is another one with another adapter

    def compute(self, call: Call) -> list[Candidates]:
        kind, *_, size, context_pages = call.function.split("_")
        found = []
        self.batches.append(len(call.slots))
        self.adapter = call.adapter
        for row in call.slots:
            assert len(row.page_table) <= int(context_pages[1:])
            assert len(row.tokens) <= (1 if kind == "decode" else int(size[1:]))
            assert 0 not in row.page_table
            if kind != "decode":
                self.prefilled += len(row.tokens)
            seen = self.seen(row, aligned=kind != "decode")
            one = candidates(self.row(seen), full=call.full)
            if row.drawing is not None:
                position = row.start + len(row.tokens)
                whole = one._replace(row=self.row(seen))
                drawn = draw(whole, row.drawing.options, position, generated=row.drawing.generated)
                one = one._replace(drawn=drawn)
            found.append(one._replace(scores=self.scores(seen, row)) if call.scores else one)
        return found

    def row(self, seen: list[int]) -> np.ndarray:
        return row_of(tuple(seen), self.vocabulary)

    def seen(self, row: Slot, *, aligned: bool) -> list[int]:
        """The text up to a row's end, of which the new tokens are kept."""
        assert row.start % PAGE == 0 or not aligned
        for offset, token in enumerate(row.tokens):
            position = row.start + offset
            page = self.pages.setdefault(row.page_table[position // PAGE], [-1] * PAGE)
            page[position % PAGE] = token + 1000 * self.adapter
        return [self.pages[row.page_table[i // PAGE]][i % PAGE] for i in range(row.start + len(row.tokens))]

    def scores(self, seen: list[int], row: Slot) -> Scores:
        """What is found at each place after a row's new tokens."""
        following = [*row.tokens[1:], row.following]
        rows = [row_of(tuple(seen[: row.start + i + 1]), self.vocabulary) for i in range(len(row.tokens))]
        found = [candidates(one, full=False) for one in rows]
        values = [one[after] for one, after in zip(rows, following, strict=True)]
        states = [state_of(tuple(seen[: row.start + i + 1])) for i in range(len(row.tokens))]
        hidden = np.sum(states, axis=0)
        return Scores(np.asarray(values), np.stack([c.ids for c in found]), np.stack([c.values for c in found]), hidden)


class StateWorker(FakeWorker):
    """The text is the state, in one page."""

    def seen(self, row: Slot, *, aligned: bool) -> list[int]:
        (page,) = row.page_table
        before = self.pages.get(page, []) if row.start else []
        assert len(before) == row.start
        self.pages[page] = [*before, *row.tokens]
        return self.pages[page]


class ForgetfulWorker(FakeWorker):
    """Nothing is kept: every call has the whole text."""

    def seen(self, row: Slot, *, aligned: bool) -> list[int]:
        assert aligned
        assert (row.start, row.page_table) == (0, ())
        return list(row.tokens)


@dataclass
class ScriptedWorker(FakeWorker):
    """Finds the next byte of a script likeliest after the last `<assistant>`, and at the end of it the byte 0.

    Attributes:
        script: of a chat.
        later: a part of some chats, and the script of those.
    """

    script: bytes = b""
    later: tuple[bytes, bytes] = (b"", b"")

    def row(self, seen: list[int]) -> np.ndarray:
        chat, _, written = bytes(seen).rpartition(b"<assistant>")
        part, then = self.later
        script = then if part and part in chat else self.script
        scores = row_of(tuple(seen[-1:]), self.vocabulary) - 20
        follows = script.startswith(written) and len(written) < len(script)
        scores[script[len(written)] if follows else 0] = 0
        return scores


def candidates(row: np.ndarray, *, full: bool) -> Candidates:
    ids = np.argsort(-row, kind="stable").astype(np.int32)
    return Candidates(ids, row[ids], row if full else None)


def alone(request: SequenceRequest) -> list[int]:
    """The tokens of a text on a worker that has nothing else to do."""
    scheduler, worker = Scheduler(SHAPE, VOCABULARY), FakeWorker()
    scheduler.join(1)
    scheduler.submit(request)
    tokens: list[int] = []
    while scheduler.has(request.number):
        for session, call in scheduler.next_calls():
            for given in scheduler.computed(session, worker.compute(call)):
                tokens += [token.token for token in given.tokens]
    return tokens


BYTES = ServingShape(
    vocabulary=256,
    window=8 * PAGE,
    pages=40,
    page_shape=(2, 1, PAGE, 1),
    batches=(1, 4),
    chunks=(2 * PAGE,),
    context_sizes=(2, 8),
    hidden=HIDDEN,
)
LONG = msgspec.structs.replace(
    BYTES, window=256 * PAGE, pages=800, chunks=(2 * PAGE, 128 * PAGE), context_sizes=(2, 256)
)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


class FakeService:
    """A service without a network. Two workers compute; `lose` takes one away.

    With a script, they write it after every chat, and sequences may be long; `later` as of `ScriptedWorker`.
    """

    def __init__(
        self,
        *,
        chat_template: str = TEMPLATE,
        workers: int = 2,
        script: str = "",
        later: tuple[bytes, bytes] = (b"", b""),
    ) -> None:
        self.model: ServedModel | None = TracedModel(
            name="hash",
            decode=lambda *_: None,  # type: ignore[arg-type, return-value]
            params=None,
            specs=(),
            sizes=CacheSizes(1, 1, 1),
            vocabulary=256,
            window=8 * PAGE,
            tokenizer=ByteTokenizer(),
            chat_template=chat_template,
            ends=frozenset({0 if script else 10}),
        )
        self.script, self.later = script.encode(), later
        self.shape: ServingShape | None = LONG if script else BYTES
        self.scheduler = Scheduler(self.shape, 256)
        self.workers: dict[int, FakeWorker] = {}
        self.cancelled = 0
        self.held = asyncio.Event()  # computes while it is set
        self.held.set()
        self._texts = self._sessions = 0
        self._readers: dict[int, asyncio.Queue[SequenceOutput]] = {}
        self._wake = asyncio.Event()
        for _ in range(workers):
            self.join()
        self._task = asyncio.get_running_loop().create_task(self._compute())

    def join(self) -> None:
        self._sessions += 1
        worker = FakeWorker(vocabulary=256)
        if self.script:
            worker = ScriptedWorker(vocabulary=256, script=self.script, later=self.later)
        self.workers[self._sessions] = worker
        self.scheduler.join(self._sessions)

    def lose(self) -> None:
        """Lose the worker that has the most texts, and get another."""
        session = max(self.workers, key=lambda one: len(self.scheduler.workers[one].sequences))
        del self.workers[session]
        self.scheduler.lose(session)
        self.join()

    async def _compute(self) -> None:
        while True:
            await self.held.wait()
            for session, call in self.scheduler.next_calls():
                for given in self.scheduler.computed(session, self.workers[session].compute(call)):
                    if given.sequence in self._readers:
                        self._readers[given.sequence].put_nowait(given)
            if not self.scheduler.running:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(0)

    @property
    def is_ready(self) -> bool:
        return bool(self.workers)

    @property
    def why_not_ready(self) -> str:
        return "" if self.workers else "waiting for a worker to connect"

    @property
    def waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def running(self) -> int:
        return self.scheduler.running

    @property
    def cache_used(self) -> float:
        return self.scheduler.used_share

    def next_sequence(self) -> int:
        self._texts += 1
        return self._texts

    async def generate(self, request: SequenceRequest) -> AsyncIterator[SequenceOutput]:
        reader = self._readers[request.number] = asyncio.Queue()
        self.scheduler.submit(request)
        self._wake.set()
        finished = False
        try:
            while not finished:
                given = await reader.get()
                finished = bool(given.finished)
                if given.finished == "error":
                    raise ClosedError("the gateway ends")
                yield given
        finally:
            del self._readers[request.number]
            if not finished:
                self.cancelled += self.scheduler.cancel(request.number)

    def close(self) -> None:
        self._task.cancel()
