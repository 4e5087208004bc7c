"""The form of a training example that has several arrays, and of a batch of them. Needs numpy only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec, host_dtype

BATCH_PREFIX = "batch."
"""Before the name of an array of the batch that is called like a parameter."""
Batch = tuple[np.ndarray, ...]  # arrays in the order of the loss's arguments


class ExampleLayout(msgspec.Struct, frozen=True):
    """The arrays of one example, stored as little-endian bytes one after the other.

    Attributes:
        columns: names, element types and shapes; a shape is that of one example.
        targets: the column of integers whose negative values are targets that do not count, the last array that a loss
            takes; "": every example counts the same.
    """

    columns: tuple[TensorSpec, ...]
    targets: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of one example."""
        return sum(column.nbytes for column in self.columns)

    @property
    def dtype(self) -> str:
        """Element type of a file of such examples; see `core.token_slice`."""
        return f"v{self.nbytes}"

    def stored(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return examples as bytes, ui8 [n, nbytes], from one array [n, …] a column."""
        count = len(arrays[0])
        parts = [
            np.ascontiguousarray(array, host_dtype(column.dtype)).reshape(count, -1).view(np.uint8)
            for column, array in zip(self.columns, arrays, strict=True)
        ]
        return np.concatenate(parts, axis=1)

    def column(self, examples: np.ndarray, name: str) -> np.ndarray:
        """Return one column [n, …] of stored examples, ui8 [n · nbytes]."""
        start = 0
        for column in self.columns:
            if column.name == name:
                part = examples.reshape(-1, self.nbytes)[:, start : start + column.nbytes]
                return np.ascontiguousarray(part).view(host_dtype(column.dtype)).reshape(-1, *column.shape)
            start += column.nbytes
        raise KeyError(name)

    def batches(self, examples: np.ndarray, arguments: Sequence[TensorSpec]) -> Iterator[Batch]:
        """Yield batches of stored examples, ui8 [n · nbytes]: for each argument the column of that name.

        Raises:
            UserError: they are no whole number of batches.
        """
        rows = arguments[0].shape[0]
        size = rows * self.nbytes
        if not examples.size or examples.size % size:
            raise UserError(f"{examples.size} bytes are no whole number of batches of {rows} × {self.nbytes} bytes")
        for part in examples.reshape(-1, size):
            yield tuple(self.column(part, column_name(one)).astype(host_dtype(one.dtype)) for one in arguments)

    def counted(self, examples: np.ndarray) -> int:
        """Return how many targets of stored examples count; the examples themselves without a column of targets."""
        if not self.targets:
            return examples.size // self.nbytes
        return int(np.count_nonzero(self.column(examples, self.targets) >= 0))

    def check(self, arguments: Sequence[TensorSpec], rows: int, source: str) -> None:
        """Raise `UserError` unless each argument of a loss is a batch of the column of that name, and none is left.

        A column may have a narrower type whose values the argument's has, too.

        Args:
            arguments: of the loss, after the parameters.
            rows: examples in a batch.
            source: of the data, for the error.
        """
        columns = {column.name: column for column in self.columns}
        named = {column_name(one): one for one in arguments}
        both = (
            f"the data {source} has the columns {', '.join(map(_shown, self.columns))} (of one example), and the loss "
            f"takes {', '.join(map(_shown, arguments))}"
        )
        if missing := [name for name in named if name not in columns]:
            raise UserError(f"{both}: no column is called {missing[0]!r}. Give the column or the argument another name")
        if left := [name for name in columns if name not in named]:
            raise UserError(
                f"{both}: it does not take {', '.join(map(repr, left))}. Name the columns that it takes: "
                f"data.columns = [{', '.join(f'{chr(34)}{name}{chr(34)}' for name in named)}]"
            )
        for name, argument in named.items():
            column = columns[name]
            if argument.shape != (rows, *column.shape):
                raise UserError(
                    f"{both}: {name!r} has to be of shape {[rows, *column.shape]} there (train.batch_size first)"
                )
            kept = argument.dtype == column.dtype or (
                argument.dtype != "bf16" and np.can_cast(host_dtype(column.dtype), host_dtype(argument.dtype))
            )
            if not kept:
                raise UserError(
                    f"{both}: not every value of {name!r} as {column.dtype} is one as {argument.dtype}; convert the "
                    "column, or take it as it is and convert it in the loss"
                )


def column_name(argument: TensorSpec) -> str:
    """Return the column that an argument of a loss takes."""
    return argument.name.removeprefix(BATCH_PREFIX)


def _shown(spec: TensorSpec) -> str:
    return f"{spec.name}: {spec.dtype}{list(spec.shape)}"
