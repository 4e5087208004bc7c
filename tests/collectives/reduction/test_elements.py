"""What a collective takes as an array."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from planetary.collectives.reduction.elements import Flat
from planetary.core.errors import UserError


def test_any_layout_is_taken_and_written_back() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    for array in (values, values.T, values[::2, ::3], values.astype(">f4")):
        flat = Flat(array, writable=True)
        flat.flat[...] = np.arange(array.size)
        flat.write_back()
        np.testing.assert_array_equal(array.reshape(-1), np.arange(array.size))


def test_arrays_with_more_than_numbers_are_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        matrix = np.matrix([[1.0, 2.0]])
    with pytest.raises(UserError, match=r"the sum is a numpy\.matrix"):
        Flat(matrix, writable=True, what="the sum")
    masked = np.ma.masked_greater(np.array([1.0, 2.0, 1e20]), 1e10)
    with pytest.raises(UserError, match=r"MaskedArray, and peers would get the masked elements"):
        Flat(masked, writable=False)


def test_read_only_memory_is_refused_where_it_would_be_written() -> None:
    array = np.ones(3)
    array.setflags(write=False)
    assert Flat(array, writable=False).flat.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(UserError, match="cannot be changed in place"):
        Flat(array, writable=True)
