"""The comparison of a loaded model with the whole forward pass, with the served parameters.

Every function takes the trial's sequence, from the cache, on the worker's device, before anything is served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planetary.core.errors import CompileError
from planetary.runs.serve.messages import ComputeCall
from planetary.runs.serve.program.shape import (
    HIDDEN,
    IDS,
    PAGE,
    ROW,
    SCORE_IDS,
    SCORE_VALUES,
    SCORES,
    VALUES,
    CallKind,
    CallSize,
    ServingShape,
)
from planetary.runs.serve.program.trial import ServingTrial
from planetary.runtime.device_report import DeviceReport

Run = Callable[[ComputeCall], Mapping[str, np.ndarray]]
"""Computes a call: `serving_role.LoadedModel.compute`."""


@dataclass
class _Found:
    """The comparison so far."""

    trial: ServingTrial
    places: int = 0
    worst: float = 0.0
    where: str = ""

    def add(self, function: str, place: int, found: Mapping[str, np.ndarray], row: int) -> None:
        """Compare a function's results for the token after a place. Raises `CompileError`."""
        expected_ids, expected = (array[place] for array in self.trial.likeliest)
        of_row = found[ROW][row]
        chosen = of_row[found[IDS][row]]  # which ids they are is compared by the scores that these have
        errors = (np.abs(one - expected) for one in (found[VALUES][row], of_row[expected_ids], chosen))
        self._note(function, place, float(np.max(np.stack([*errors]))))
        token, rank = int(found[IDS][row][0]), np.flatnonzero(expected_ids == found[IDS][row][0])
        if not len(rank) or expected[rank[0]] < expected[0] - 2 * self.trial.accepted:
            raise CompileError(
                f"{function} finds token {token} the likeliest after {place + 1} tokens, and the whole forward pass "
                f"{expected_ids[0]}, with these parameters"
            )

    def add_scores(self, function: str, start: int, count: int, found: np.ndarray) -> None:
        """Compare the log-probabilities of the sequence's own tokens after `count` places. Raises `CompileError`."""
        expected = np.frombuffer(self.trial.following, "<f4")[start : start + count]
        known = min(count, len(self.trial.tokens) - 1 - start)
        if known:
            errors = np.abs(found[:known] - expected[:known])
            self._note(function, start + int(np.argmax(errors)), float(np.max(errors)))

    def add_likeliest(self, function: str, start: int, ids: np.ndarray, values: np.ndarray) -> None:
        """Compare the likeliest tokens, i32 and f32 [places, L], after each place from `start` on.

        Raises:
            CompileError: a log-probability or a token is another one.
        """
        known_ids, known = (array[start : start + len(ids)] for array in self.trial.likeliest)
        last = ids.shape[1] - 1
        for place, (chosen, row, scores) in enumerate(zip(ids, known_ids, known, strict=True), start):
            score_of = dict(zip(row.tolist(), scores.tolist(), strict=True))
            of_chosen = np.array([score_of.get(token, -np.inf) for token in chosen.tolist()])
            errors = np.abs(values[place - start] - scores[: last + 1])
            self._note(function, place, float(np.max(errors)))
            if not (np.all(of_chosen >= scores[last] - 2 * self.trial.accepted) and len(set(chosen.tolist())) > last):
                raise CompileError(
                    f"{function} finds {chosen.tolist()} the likeliest tokens after {place + 1} tokens, and the whole "
                    f"forward pass {row[: last + 1].tolist()}, with these parameters"
                )

    def add_hidden(self, function: str, start: int, count: int, found: np.ndarray) -> None:
        """Compare the sum of the hidden states of `count` places. Raises `CompileError`."""
        expected = self.trial.states[start : start + count].sum(axis=0)
        size = max(float(np.linalg.norm(expected)), 1e-9)
        error = float(np.linalg.norm(found - expected)) / size
        if not error <= self.trial.accepted:  # also catches NaN
            raise CompileError(
                f"{function} sums the hidden states of tokens {start} to {start + count - 1} with an error of "
                f"{error:.3g} of their length, with these parameters; {self.trial.accepted:.3g} is accepted"
            )

    def _note(self, function: str, place: int, error: float) -> None:
        self.places += 1
        if not error <= self.trial.accepted:  # also catches NaN
            raise CompileError(
                f"{function} is {error:.3g} nats away from the whole forward pass after {place + 1} tokens, with these "
                f"parameters; {self.trial.accepted:.3g} is accepted"
            )
        if error >= self.worst:
            self.worst, self.where = error, function


def check_model(
    run: Run, shape: ServingShape, trial: ServingTrial, device: str, calls: Sequence[CallSize] | None = None
) -> DeviceReport:
    """Compute the trial with every function, in the cache's spare pages or, without such, in pages from 1 on.

    Args:
        run: computes a call; the functions of `shape.first_calls` are there.
        shape: of the functions.
        trial: of the served parameters.
        device: for people.
        calls: those whose functions are compared; None: all.

    Raises:
        CompileError: a log-probability or a likeliest token is another one; the text names the function.
        ResourceError: the device fails.
    """
    found = _Found(trial)
    try:
        for size in shape.calls if calls is None else calls:
            if size.tokens == 1:
                _continue(run, shape, size, found)
            else:
                _take(run, shape, size, found)
    except CompileError as error:
        raise CompileError(
            f"the served model is wrong on {device}: {error}. Nothing was served with it; update the device's driver, "
            "or start this worker with another --backend"
        ) from None
    return DeviceReport(device, f"log-probabilities of {found.where}", found.worst / trial.accepted)


def _take(run: Run, shape: ServingShape, size: CallSize, found: _Found) -> None:
    """Take a sequence in chunks with one function: the first chunk, and a next one where there is room."""
    tokens = found.trial.tokens
    longest = min(len(tokens), shape.window if not shape.cache_kind.is_shared else size.context_pages * PAGE)
    if not shape.cache_kind.remembers:
        longest = min(longest, size.tokens)
    starts = range(0, longest, size.tokens) if shape.cache_kind.remembers else (0,)
    for start in tuple(starts)[:2]:
        end = min(start + size.tokens, longest)
        result = run(_call(size.name, shape, [(tokens, start, end)], scores=size.scores))
        found.add(size.name, end - 1, result, 0)
        if size.scores:
            found.add_scores(size.name, start, end - start, result[SCORES][0])
            likeliest = (result[name][0, : end - start] for name in (SCORE_IDS, SCORE_VALUES))
            found.add_likeliest(size.name, start, *likeliest)
            if shape.hidden:
                found.add_hidden(size.name, start, end - start, result[HIDDEN][0])


def _continue(run: Run, shape: ServingShape, size: CallSize, found: _Found) -> None:
    """Continue sequences by tokens with one function, each of another length.

    A second token reads the first one from the copy of the pages. Where there are pages, a repeated call reads it from
    them: for a repeated position the copy is made anew.
    """
    tokens, chunk, shared = found.trial.tokens, shape.chunks[0], shape.cache_kind.is_shared
    room = min(len(tokens), chunk + 1, size.context_pages * PAGE if shared else shape.window)
    longest = room - 2
    ends = [longest - (5 * row) % longest for row in range(size.batch)]
    prefill = next(one.name for one in shape.first_calls if one.kind is not CallKind.DECODE)
    begin = _first_page(shape)
    if not shared:
        firsts = range(begin, begin + size.batch)
        for end, first in zip(ends, firsts, strict=True):
            run(_call(prefill, shape, [(tokens, 0, end)], [first]))
        _add_tokens(run, shape, size, found, ends=ends, firsts=firsts, steps=(0, 1))
        return
    # Every second sequence reads the pages of another text, and is not compared: no sequence may read those of others.
    other = begin + shape.pages_for(room)
    run(_call(prefill, shape, [(tokens, 0, longest)]))
    apart = size.batch > 1 and shape.cache.shape[0] >= other + shape.pages_for(room)
    if apart:
        run(_call(prefill, shape, [(tokens[::-1], 0, longest)], [other]))
    for parity in (0, 1) if apart else (0,):
        firsts = [other if apart and row % 2 != parity else begin for row in range(size.batch)]
        _add_tokens(run, shape, size, found, ends=ends, firsts=firsts, steps=(0, 1, 1))


def _add_tokens(
    run: Run,
    shape: ServingShape,
    size: CallSize,
    found: _Found,
    *,
    ends: Sequence[int],
    firsts: Sequence[int],
    steps: Sequence[int],
) -> None:
    """Add the tokens `steps` places behind `ends` to sequences with these first pages, one after the other.

    Sequences whose pages are those of the first one, or have a state, are compared.
    """
    for step in steps:
        sequences = [(found.trial.tokens, end + step, end + step + 1) for end in ends]
        result = run(_call(size.name, shape, sequences, firsts))
        for row, (end, first) in enumerate(zip(ends, firsts, strict=True)):
            if first == _first_page(shape) or not shape.cache_kind.is_shared:
                found.add(size.name, end + step, result, row)


def _first_page(shape: ServingShape) -> int:
    return shape.pages if shape.spare else 1


def _call(
    function: str,
    shape: ServingShape,
    sequences: Sequence[tuple[Sequence[int], int, int]],
    firsts: Sequence[int] = (),
    *,
    scores: bool = False,
) -> ComputeCall:
    """Return the call that takes tokens of sequences, each from a place to another.

    `firsts` are the first pages of the sequences; without them there is one sequence.
    """
    begins = firsts or [_first_page(shape)]
    pages = [
        tuple(range(first, first + shape.pages_for(end))) for first, (_, _, end) in zip(begins, sequences, strict=True)
    ]
    return ComputeCall(
        call=0,
        function=function,
        tokens=tuple(tuple(sequence[start:end]) for sequence, start, end in sequences),
        starts=tuple(start for _, start, _ in sequences),
        page_tables=tuple(pages),
        full=True,
        following=tuple(sequence[end] if end < len(sequence) else -1 for sequence, _, end in sequences)
        if scores
        else (),
    )
