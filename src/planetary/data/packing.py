"""Documents packed into sequences whose attention stays inside each document.

A sequence is an example of four columns, each [sequence_length]: `tokens`, `segment_ids` (1, 2, … for the documents of
the sequence, 0 for padding), `positions` (from 0 in each document) and `targets` (the next token of the document;
`IGNORED` for padding and for tokens that are no targets). A document longer than a sequence is cut, and each part is a
segment of its own. Documents are placed where they leave the least room (best fit), over a bounded number of sequences.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planetary.core.example_layout import ExampleLayout
from planetary.core.tensors import TensorSpec
from planetary.data.reader import IGNORED, split

COLUMNS = ("tokens", "segment_ids", "positions", "targets")
OPEN = 64
"""Sequences with room that documents are placed into."""


def packed_layout(length: int, vocab_size: int) -> ExampleLayout:
    """Return the form of packed sequences of `length` positions, in the narrowest types."""
    narrow = "ui16" if length <= np.iinfo(np.uint16).max else "i32"
    tokens = "ui16" if vocab_size <= np.iinfo(np.uint16).max + 1 else "i32"
    targets = "i16" if vocab_size <= np.iinfo(np.int16).max + 1 else "i32"
    types = (tokens, narrow, narrow, targets)
    columns = (TensorSpec(name, dtype, (length,)) for name, dtype in zip(COLUMNS, types, strict=True))
    return ExampleLayout(tuple(columns), targets="targets")


class Packer:
    """Sequences under construction; a pure function of the documents in their order."""

    def __init__(self, layout: ExampleLayout) -> None:
        """Start without a document; `layout` from `packed_layout`."""
        self._layout = layout
        self._length = layout.columns[0].shape[0]
        self._open: list[list[tuple[np.ndarray, np.ndarray]]] = []  # tokens and targets of each segment

    def add(self, document: np.ndarray) -> Iterator[np.ndarray]:
        """Place the tokens of a document, as in token files, and yield the sequences that get no more: ui8 [1, nbytes].

        A part without a target is left out.
        """
        ids, targets = split(document)
        for start in range(0, len(ids) - 1, self._length):
            wanted = targets[start + 1 : start + 1 + self._length]
            if (wanted != IGNORED).any() if targets.dtype.kind == "i" else wanted.size:
                yield from self._place(ids[start : start + len(wanted)], wanted)

    def close(self) -> Iterator[np.ndarray]:
        """Yield the sequences that still had room."""
        for segments in self._open:
            yield self._example(segments)
        self._open = []

    def _place(self, tokens: np.ndarray, targets: np.ndarray) -> Iterator[np.ndarray]:
        rooms = [self._length - _used(segments) for segments in self._open]
        fitting = [(room, at) for at, room in enumerate(rooms) if room >= len(tokens)]
        if fitting:
            self._open[min(fitting)[1]].append((tokens, targets))
            return
        self._open.append([(tokens, targets)])
        if len(self._open) > OPEN:
            fullest = min(range(len(self._open)), key=lambda at: self._length - _used(self._open[at]))
            yield self._example(self._open.pop(fullest))

    def _example(self, segments: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        columns = np.zeros((len(COLUMNS), 1, self._length), np.int64)
        columns[3] = IGNORED
        start = 0
        for number, (tokens, targets) in enumerate(segments, start=1):
            place = slice(start, start := start + len(tokens))
            for column, values in zip(columns, (tokens, number, np.arange(len(tokens)), targets), strict=True):
                column[0, place] = values
        return self._layout.stored(list(columns))


def _used(segments: list[tuple[np.ndarray, np.ndarray]]) -> int:
    return sum(len(tokens) for tokens, _ in segments)
