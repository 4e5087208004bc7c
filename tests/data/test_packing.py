"""Packed documents: whole where they fit, each token once, and segments that tell them apart."""

from __future__ import annotations

import itertools

import numpy as np

from planetary.data.packing import COLUMNS, OPEN, Packer, packed_layout
from planetary.data.reader import IGNORED

LENGTH = 16


def packed(documents: list[np.ndarray]) -> dict[str, np.ndarray]:
    layout = packed_layout(LENGTH, 300)
    packer = Packer(layout)
    found = [example for one in documents for example in packer.add(one)] + list(packer.close())
    examples = np.concatenate(found).reshape(-1)
    return {name: layout.column(examples, name).astype(int) for name in COLUMNS}


def test_every_target_is_there_once_inside_its_segment() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 300, rng.integers(1, 50)).astype(np.uint32) for _ in range(300)]
    columns = packed(documents)
    expected = sorted((int(a), int(b)) for one in documents for a, b in itertools.pairwise(one))
    counts = columns["targets"] != IGNORED
    assert sorted(zip(columns["tokens"][counts], columns["targets"][counts], strict=True)) == expected
    np.testing.assert_array_equal(counts, columns["segment_ids"] > 0)
    for segments, positions in zip(columns["segment_ids"], columns["positions"], strict=True):
        for number in range(1, segments.max() + 1):
            places = np.flatnonzero(segments == number)
            np.testing.assert_array_equal(places, np.arange(places[0], places[-1] + 1))
            np.testing.assert_array_equal(positions[places], np.arange(places.size))
    assert counts.mean() > 0.9, "too much padding"


def test_document_that_fits_is_not_cut() -> None:
    documents = [np.full(size + 1, size, np.uint32) for size in (16, 9, 8, 7, 3)]
    columns = packed(documents)
    rows = [
        [int(row[place]) for place in np.flatnonzero(segments > 0)]
        for row, segments in zip(columns["tokens"], columns["segment_ids"], strict=True)
    ]
    assert sorted(rows) == sorted([[16] * 16, [9] * 9 + [7] * 7, [8] * 8 + [3] * 3])


def test_part_without_a_target_is_left_out() -> None:
    read_only = ~np.arange(LENGTH, dtype=np.int32)
    columns = packed([np.concatenate([read_only, np.array([5, ~6, 7], np.int32)])])
    assert columns["targets"][columns["targets"] != IGNORED].tolist() == [5, 7]
    assert columns["tokens"].min() == 0


def test_bounded_number_of_sequences_is_open() -> None:
    packer = Packer(packed_layout(LENGTH, 300))
    given = [list(packer.add(np.zeros(11, np.uint32))) for _ in range(OPEN + 5)]
    assert sum(map(len, given)) == 5
