"""Training examples of several arrays: columns of numpy and Arrow files by name, or a data set in a user's file.

An example has one array of each column; all examples have the same shapes. 64-bit numbers are stored in 32 bits, as JAX
computes with them: integers have to fit, floats are rounded.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np

from planetary.core.configuration.schema import names_code
from planetary.core.errors import PlanetaryError, ResourceError, UserError
from planetary.core.example_layout import ExampleLayout
from planetary.core.tensors import DTYPE_NAMES, TensorSpec, host_dtype
from planetary.core.user_code import line_of, load_module
from planetary.data.files import SUPPORTED, SourceFile, files_of, open_file
from planetary.data.formats.tables import arrow_table, parquet_table

ROWS = 1024  # examples read and checked at a time
_NARROWER = {"f64": "f32", "i64": "i32", "ui64": "ui32"}
Columns = dict[str, np.ndarray]
"""Arrays of some examples by column, each [n, …]."""


class ColumnSource(msgspec.Struct, frozen=True):
    """The examples of one source, read to the end once.

    Attributes:
        source: as `data.source`.
        names: as `data.columns`.
        layout: of an example.
        count: examples.
        digest: sha256 (hex) of layout and examples.
    """

    source: str
    names: tuple[str, ...]
    layout: ExampleLayout
    count: int
    digest: str

    @property
    def summary(self) -> str:
        """A line for people."""
        columns = ", ".join(f"{one.name}: {one.dtype}{list(one.shape)}" for one in self.layout.columns)
        return f"{self.source}: {self.count} examples of {columns}"

    def examples(self) -> Iterator[np.ndarray]:
        """Read the source again and yield stored examples, ui8 [n, layout.nbytes].

        Raises:
            UserError: as `column_source`, and where the examples are others than before.
        """
        digest = _digest_of(self.layout)
        count = 0
        for stored in _stored(self.source, self.names, self.layout):
            digest.update(stored.tobytes())
            count += len(stored)
            yield stored
        if digest.hexdigest() != self.digest:
            number = f"{count} examples after {self.count}" if count != self.count else "other values"
            raise UserError(
                f"{self.source} gave {number} when it was read a second time. Training data must be the same each "
                "time, so that a run can be resumed and repeated: draw random numbers from a fixed seed, or in the "
                "loss from its `key` (docs/models.md)"
            )


def column_source(source: str, names: Sequence[str], cache: Path) -> ColumnSource:
    """Read a source to the end and return the examples' form and identity.

    Args:
        source: as `data.source`.
        names: columns to take, in this order; empty: all.
        cache: existing folder on the disk that examples are written to.

    Raises:
        UserError: it cannot be read; a column is missing, has no numbers, or ends before another; an example has
            another shape or type than the first; a number is not finite or does not fit into 32 bits.
        ResourceError: reading failed on the way, or the disk has no room for so many examples.
    """
    room = shutil.disk_usage(cache).free
    parts = _checked_columns(source, names)
    first = next(parts, None)
    if first is None:
        raise UserError(f"the training data {source} is empty: expected examples")
    specs = [TensorSpec(name, _stored_type(name, part, source), part.shape[1:]) for name, part in first.items()]
    layout = ExampleLayout(tuple(specs))
    digest, count = _digest_of(layout), 0
    for part in itertools.chain([first], parts):
        stored = _as_stored(part, layout, source, count)
        digest.update(stored.tobytes())
        count += len(stored)
        if count * layout.nbytes > room:
            raise ResourceError(
                f"{source} gave {count} examples, {count * layout.nbytes / 1e9:.3g} GB, which is more than the disk of "
                f"{cache} has free: make room, choose another --cache, or, of an iterator without an end, give it one"
            )
    return ColumnSource(source, tuple(names), layout, count, digest.hexdigest())


def first_example(
    source: str,
    names: Sequence[str],
    column: str,
    wrong: Callable[[np.ndarray], tuple[int, int] | None],
) -> tuple[int, int] | None:
    """Return the first example of a source for whose column `wrong` gives one, by number, and the value it gives."""
    count = 0
    for part in _checked_columns(source, names):
        if (found := wrong(part[column])) is not None:
            return count + found[0], found[1]
        count += len(part[column])
    return None


def _digest_of(layout: ExampleLayout) -> Any:
    return hashlib.sha256(msgspec.json.encode(layout))


def _stored(source: str, names: Sequence[str], layout: ExampleLayout) -> Iterator[np.ndarray]:
    count = 0
    for part in _checked_columns(source, names):
        yield _as_stored(part, layout, source, count)
        count += len(next(iter(part.values())))


# --- checks -------------------------------------------------------------------------------------------------


def _checked_columns(source: str, names: Sequence[str]) -> Iterator[Columns]:
    """Yield the wanted columns of some examples at a time, each with at least one."""
    for available, part in _columns(source, names):
        if missing := [name for name in names if name not in available]:
            has = ", ".join(map(repr, available)) or "none"
            raise UserError(f"{source} has no column {missing[0]!r} (data.columns); it has {has}")
        kept = {name: part[name] for name in names or part}
        lengths = {name: len(column) for name, column in kept.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise UserError(f"the columns of {source} have different numbers of examples: {found}")
        count = next(iter(lengths.values()), 0)
        for start in range(0, count, ROWS):
            yield {name: column[start : start + ROWS] for name, column in kept.items()}


def _stored_type(name: str, part: np.ndarray, source: str) -> str:
    dtype = DTYPE_NAMES.get(part.dtype.newbyteorder("<") if part.dtype.byteorder == ">" else part.dtype)
    if dtype is None or dtype.startswith("complex"):
        raise UserError(
            f"{source}: the column {name!r} holds {part.dtype} ({_example_of(part)}), and a batch is made of numbers: "
            "expected integers, floats or booleans of one shape in every example. Encode texts as tokens, or leave the "
            "column out of data.columns"
        )
    return _NARROWER.get(dtype, dtype)


def _example_of(part: np.ndarray) -> str:
    value = part.reshape(-1)[0] if part.size else ""
    return f"such as {value!r}"[:60]


def _as_stored(part: Columns, layout: ExampleLayout, source: str, before: int) -> np.ndarray:
    """Return checked examples as bytes, ui8 [n, nbytes]; `before`: examples before them, for errors."""
    arrays = []
    for spec in layout.columns:
        column = part[spec.name]
        if column.shape[1:] != spec.shape or _stored_type(spec.name, column, source) != spec.dtype:
            raise UserError(
                f"{source}, example {before}: {spec.name!r} is {column.dtype}{list(column.shape[1:])} from there on, "
                f"and {spec.dtype}{list(spec.shape)} before: every example needs the same shape and type"
            )
        kind = host_dtype(spec.dtype)
        if kind.kind == "f":
            with np.errstate(over="ignore"):
                column = column.astype(kind)
            wrong = ~np.isfinite(column)
            what = "which is no finite number of 32 bits: leave such examples out, or give another number and a mask"
        elif column.dtype.itemsize > kind.itemsize:
            limits = np.iinfo(kind)
            wrong = (column < limits.min) | (column > limits.max)
            what = f"which does not fit into {spec.dtype}, as models take it"
        else:
            wrong = np.zeros(1, bool)
            what = ""
        if wrong.any():
            place = np.argwhere(wrong)[0]
            value = part[spec.name][tuple(place)]
            raise UserError(f"{source}, example {before + int(place[0])}: {spec.name!r} holds {value}, {what}")
        arrays.append(column)
    return layout.stored(arrays)


# --- files --------------------------------------------------------------------------------------------------


def _columns(source: str, names: Sequence[str]) -> Iterator[tuple[Sequence[str], Columns]]:
    """Yield the names of all columns, and those among `names` (empty: all) of some examples at a time."""
    if names_code(source):
        yield from _of_code(source, names)
        return
    files = files_of(source)
    single = [file for file in files if file.suffix == ".npy"]
    if single and len(single) == len(files):
        yield _of_arrays(single, names)
        return
    for file in files:
        with open_file(file) as (head, stream):
            if head.startswith(b"PK\x03\x04") and file.suffix == ".npz":
                yield _of_npz(file, stream.read(), names)
            elif head.startswith(b"PAR1"):
                with parquet_table(stream, file) as table:
                    yield from _of_batches(table.iter_batches(batch_size=ROWS), file, names)
            elif head.startswith((b"ARROW1\x00\x00", b"\xff\xff\xff\xff")):
                with arrow_table(stream, file) as (_, batches):
                    yield from _of_batches(batches, file, names)
            else:
                raise UserError(
                    f"{file.url} has no columns of arrays: expected .npz, .npy (a file for each column), parquet, "
                    f"arrow, or a data set such as my_data.py:Dataset. data.columns is for these; texts are {SUPPORTED}"
                )


def _of_arrays(files: Sequence[SourceFile], names: Sequence[str]) -> tuple[Sequence[str], Columns]:
    """Return the columns of `.npy` files: the name of a file without the ending is that of the column."""
    named: dict[str, SourceFile] = {}
    for file in files:
        name = PurePath(file.name).name.partition(".")[0]
        if name in named:
            raise UserError(f"{named[name].url} and {file.url} both give the column {name!r}")
        named[name] = file
    found: Columns = {}
    for name in [one for one in names if one in named] or ([] if names else list(named)):
        _, part = _loaded(named[name], lambda name=name: ([], {name: _array(named[name])}))
        found |= part
    return list(named), found


def _array(file: SourceFile) -> np.ndarray:
    """Return the array of a `.npy` file: of this machine's disks one that is mapped, which may exceed the memory."""
    path = file.url.removeprefix("file://")
    if "://" not in path and path.endswith(".npy"):
        return np.load(path, mmap_mode="r", allow_pickle=False)
    with open_file(file) as (_, stream):
        return np.load(io.BytesIO(stream.read()), allow_pickle=False)


def _of_npz(file: SourceFile, raw: bytes, names: Sequence[str]) -> tuple[Sequence[str], Columns]:
    def load() -> tuple[Sequence[str], Columns]:
        with np.load(io.BytesIO(raw), allow_pickle=False) as archive:
            return archive.files, {name: archive[name] for name in names or archive.files if name in archive.files}

    return _loaded(file, load)


def _loaded(file: SourceFile, load: Callable[[], tuple[Sequence[str], Columns]]) -> tuple[Sequence[str], Columns]:
    try:
        available, found = load()
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        if "allow_pickle" in str(error):
            raise UserError(
                f"{file.url} holds Python objects (dtype object), which are run to be read: save arrays of numbers of "
                "one shape in every example"
            ) from None
        raise UserError(f"{file.url} is damaged, or no array of numpy's: {error}") from None
    for name, array in found.items():
        if not array.ndim:
            raise UserError(f"{file.url}: {name!r} is one number, and a column has one for each example")
    return available, found


def _of_batches(
    batches: Iterable[Any], file: SourceFile, names: Sequence[str]
) -> Iterator[tuple[Sequence[str], Columns]]:
    for batch in batches:
        available = batch.schema.names
        kept = [name for name in names or available if name in available]
        yield available, {name: _of_arrow(batch.column(available.index(name)), name, file) for name in kept}


def _of_arrow(column: Any, name: str, file: SourceFile) -> np.ndarray:
    """Return an Arrow array, of lists of one length or of numbers, as numpy's."""
    from pyarrow import types  # pyright: ignore[reportMissingImports]

    column = getattr(column, "storage", column)  # the values of an extension type, such as a tensor
    if column.null_count:
        raise UserError(f"{file.url}: the column {name!r} has {column.null_count} missing values: leave the rows out")
    if types.is_fixed_size_list(column.type) or types.is_list(column.type) or types.is_large_list(column.type):
        lengths = set(column.value_lengths().to_pylist())
        if len(lengths) > 1:
            raise UserError(
                f"{file.url}: the lists of the column {name!r} have lengths from {min(lengths)} to {max(lengths)}: "
                "every example needs the same shape. Pad them, and let a mask tell the padding"
            )
        inner = _of_arrow(column.flatten(), name, file)
        return inner.reshape(len(column), *([lengths.pop()] if lengths else [0]), *inner.shape[1:])
    return np.asarray(column.to_numpy(zero_copy_only=False))


# --- a data set in a user's file ----------------------------------------------------------------------------


def _of_code(source: str, names: Sequence[str]) -> Iterator[tuple[Sequence[str], Columns]]:
    """Yield the examples of a data set in order, as `_columns` does.

    The name is a class or function, called without arguments, or an object. It has `__len__` and `__getitem__`, or is
    iterable. An example is a mapping from names to arrays, or a tuple in the order of `names`.
    """
    place, _, name = source.rpartition(":")
    found = getattr(load_module(place), name, None)
    if found is None:
        raise UserError(f"{place} defines no {name} (data.source = {source!r})")
    number = 0
    try:
        data = found() if callable(found) else found
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) and not hasattr(data, "__iter__"):
            raise UserError(
                f"{source} gives {type(data).__name__}: expected a data set with __len__ and __getitem__, or an "
                "iterator of examples"
            )
        rows: list[Columns] = []
        for item in _items(data):
            rows.append(_row(item, names, f"{source}, example {number}"))
            number += 1
            if len(rows) == ROWS:
                yield list(rows[0]), _stacked(rows, source, number)
                rows = []
        if rows:
            yield list(rows[0]), _stacked(rows, source, number)
    except PlanetaryError:
        raise
    except Exception as error:  # whatever the user's data set raises
        raise UserError(
            f"{source} failed at example {number}: {type(error).__name__}: {error} ({line_of(error)}). Nothing is "
            "trained on part of the data; mend it and start again, or resume"
        ) from error


def _items(data: Any) -> Iterator[Any]:
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return (data[index] for index in range(len(data)))
    return iter(data)


def _row(item: Any, names: Sequence[str], where: str) -> Columns:
    if isinstance(item, Mapping):
        return {str(key): np.asarray(value) for key, value in item.items()}
    if not isinstance(item, tuple | list) or not names:
        raise UserError(
            f"{where}: expected a mapping from column names to arrays, or a tuple and data.columns with its names, "
            f"found {type(item).__name__}{'' if names else ' without data.columns'}"
        )
    if len(item) != len(names):
        raise UserError(f"{where} has {len(item)} arrays, and data.columns has {len(names)} names: {', '.join(names)}")
    return {name: np.asarray(value) for name, value in zip(names, item, strict=True)}


def _stacked(rows: Sequence[Columns], source: str, number: int) -> Columns:
    """Return rows as columns; `number`: examples up to the last of them."""
    first, before = rows[0], number - len(rows)
    for index, row in enumerate(rows):
        if other := [name for name in {**first, **row} if name not in first or name not in row]:
            raise UserError(
                f"{source}, example {before + index}: the columns are {', '.join(row)}, and those of example {before} "
                f"{', '.join(first)}: {other[0]!r} is not in both"
            )
        for name, value in row.items():
            if (value.shape, value.dtype) != (first[name].shape, first[name].dtype):
                raise UserError(
                    f"{source}, example {before + index}: {name!r} is {value.dtype}{list(value.shape)}, and "
                    f"{first[name].dtype}{list(first[name].shape)} in example {before}: every example needs the same "
                    "shape and type"
                )
    return {name: np.stack([row[name] for row in rows]) for name in first}
