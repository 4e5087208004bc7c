"""Pairs of answers as training examples: the preferred text and the other one, beside each other.

An example has two columns, each [2, sequence_length]: `tokens`, and `targets`, the next token where it is part of the
answer and `IGNORED` elsewhere. The first row is the preferred one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator

import numpy as np

from planetary.core.errors import UserError
from planetary.core.example_layout import ExampleLayout
from planetary.core.tensors import TensorSpec
from planetary.data.document import Document
from planetary.data.packing import packed_layout
from planetary.data.reader import IGNORED, split

FORMAT = 1  # raised whenever the same pairs would be stored differently

log = logging.getLogger(__name__)


def pair_layout(length: int, vocab_size: int) -> ExampleLayout:
    """Return the form of an example of `length` positions, in the narrowest types."""
    types = {one.name: one.dtype for one in packed_layout(length, vocab_size).columns}
    return ExampleLayout(tuple(TensorSpec(name, types[name], (2, length)) for name in ("tokens", "targets")))


def pair_examples(
    texts: Iterable[tuple[Document | None, np.ndarray]], layout: ExampleLayout, source: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield stored examples, ui8 [1, nbytes], each with a name of its prompt.

    Pairs with a longer text are left out, which the log says.

    Args:
        texts: tokens of the rendered texts, the preferred one of each pair first; complements are no targets.
        layout: from `pair_layout`.
        source: for the error.

    Raises:
        UserError: every pair is too long.
    """
    length = layout.columns[0].shape[1]
    count, kept, longest, held = 0, 0, 0, iter(texts)
    for (_, chosen), (_, rejected) in zip(held, held, strict=True):
        count, longest = count + 1, max(longest, len(chosen) - 1, len(rejected) - 1)
        if max(len(chosen), len(rejected)) - 1 > length:
            continue
        kept += 1
        columns = np.zeros((2, 1, 2, length), np.int64)
        columns[1] = IGNORED
        for row, marked in enumerate((chosen, rejected)):
            ids, targets = split(marked)
            columns[0, 0, row, : len(ids) - 1], columns[1, 0, row, : len(ids) - 1] = ids[:-1], targets[1:]
        read_only = chosen[: int(np.argmax(chosen >= 0))]  # the prompt, whose pairs are on one side of the held-out cut
        yield hashlib.sha256(read_only.tobytes()).hexdigest(), layout.stored(list(columns))
    if count and not kept:
        raise UserError(
            f"every pair of {source} is longer than train.sequence_length = {length}: the longest text has {longest} "
            "tokens, but for the last; raise it"
        )
    if kept < count:
        log.warning(
            "%s: %d of %d pairs are longer than train.sequence_length = %d, and are left out; the longest has %d",
            *(source, count - kept, count, length, longest),
        )
