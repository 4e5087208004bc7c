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
    SCORES,
    VALUES,
    CallSize,
    ServingShape,
    prefill_name,
)
from planetary.runs.serve.program.trial import ServingTrial
from planetary.runtime.device_check import DeviceReport

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


def check_model(run: Run, shape: ServingShape, trial: ServingTrial, device: str) -> DeviceReport:
    """Compute the trial with every function; the cache has no use afterwards.

    Raises:
        CompileError: a log-probability or a likeliest token is another one; the text names the function.
        ResourceError: the device fails.
    """
    found = _Found(trial)
    try:
        for size in shape.calls:
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
            if shape.hidden:
                found.add_hidden(size.name, start, end - start, result[HIDDEN][0])


def _continue(run: Run, shape: ServingShape, size: CallSize, found: _Found) -> None:
    """Continue sequences by a token with one function, each of another length."""
    tokens = found.trial.tokens
    chunk = shape.chunks[0]
    longest = min(len(tokens), chunk, size.context_pages * PAGE if shape.cache_kind.is_shared else shape.window) - 1
    ends = [longest - (5 * row) % longest for row in range(size.batch)]
    prefill = next(one for one in shape.calls if one.name == prefill_name(chunk, size.context_pages))
    for row in range(size.batch):
        # Pages of sequences that begin alike can be the same ones; a state cannot.
        if row == 0 or not shape.cache_kind.is_shared:
            run(_call(prefill.name, shape, [(tokens, 0, ends[row])], first=row))
    result = run(_call(size.name, shape, [(tokens, end, end + 1) for end in ends]))
    for row, end in enumerate(ends):
        found.add(size.name, end, result, row)


def _call(
    function: str,
    shape: ServingShape,
    sequences: Sequence[tuple[Sequence[int], int, int]],
    *,
    scores: bool = False,
    first: int = 0,
) -> ComputeCall:
    """Return the call that takes tokens of sequences, each from a place to another; `first`: number of the first
    sequence.
    """
    pages = []
    for row, (_, _, end) in enumerate(sequences):
        begin = 1 if shape.cache_kind.is_shared else 1 + first + row
        pages.append(tuple(range(begin, begin + shape.pages_for(end))))
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
