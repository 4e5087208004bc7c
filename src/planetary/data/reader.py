"""Read the tokens of a worker's slice with one range read, and cut them into batches.

Needs numpy and fsspec only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from planetary.core.errors import ResourceError, UserError
from planetary.core.example_layout import Batch, ExampleLayout
from planetary.core.tensors import TensorSpec, host_dtype
from planetary.core.token_slice import Slice, array_dtype, element_bytes, is_examples

IGNORED = -100
"""Target that no loss counts: the value that PyTorch's cross-entropy ignores."""
TOKEN_DTYPES = ("i32", "i64", "ui16", "ui32")
"""Element types, in StableHLO's spelling, in which a model may take tokens."""


def read_slice(piece: Slice) -> np.ndarray:
    """Return the tokens of `piece`, as an array [count] of the file's token type; examples as their bytes, ui8.

    Raises:
        UserError: the file does not exist, is shorter than the slice needs, or the URL cannot be used.
        ResourceError: reading failed on the way; trying again may help.
    """
    size = element_bytes(piece.dtype)
    start, length = piece.offset * size, piece.count * size
    read = _read_url if "://" in piece.url else _read_path
    raw = read(piece.url, start, length)
    if len(raw) != length:
        raise UserError(
            f"reading tokens {piece.offset} to {piece.offset + piece.count} of {piece.url}: expected "
            f"{length} bytes from byte {start} on, found {len(raw)}; the file was cut, or is not the one "
            "that the run was prepared with"
        )
    return np.frombuffer(raw, np.uint8 if is_examples(piece.dtype) else array_dtype(piece.dtype))


def read_slices(pieces: Sequence[Slice]) -> np.ndarray:
    """Return the tokens of several slices of one token type, one after the other; raises as `read_slice`."""
    found = [read_slice(piece) for piece in pieces]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _read_path(path: str, start: int, length: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(length)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UserError(
            f"cannot read the token file {path}: {error.strerror}; if this machine does not share the "
            "gateway's "
            'disk, set data.delivery = "gateway" or put the tokens behind a URL'
        ) from None
    except OSError as error:
        raise ResourceError(f"reading the token file {path} failed: {error}") from error


def _read_url(url: str, start: int, length: int) -> bytes:
    import fsspec.core  # most workers read a path, or get their tokens from the gateway

    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"cannot read {url}: {error}") from None
    try:
        raw = filesystem.cat_file(path, start=start, end=start + length)
    except (FileNotFoundError, PermissionError) as error:
        raise UserError(f"cannot read {url}: {error}") from None
    except OSError as error:
        raise ResourceError(f"reading {url} failed: {error}") from error
    if not isinstance(raw, bytes):
        raise UserError(f"cannot read {url}: it names several files")
    if len(raw) > length:  # a server without range reads sends the file from the start
        raise UserError(f"cannot read {url}: its server does not support reading a range of bytes")
    return raw


def batches_of(arguments: Sequence[TensorSpec], tokens: np.ndarray, layout: ExampleLayout | None) -> Iterator[Batch]:
    """Cut what was read of a file into the batches a training step takes.

    Args:
        arguments: names, types and shapes of the arrays of a batch.
        tokens: from `read_slice`.
        layout: of examples; None: they are tokens.

    Raises:
        UserError: as `batches`.
    """
    if layout is not None:
        return layout.batches(tokens, arguments)
    inputs, targets = arguments
    batch, length = inputs.shape[:2]
    return batches(tokens, batch, length, (inputs.dtype, targets.dtype))


def batches(
    tokens: np.ndarray, batch_size: int, sequence_length: int, dtypes: tuple[str, str] = ("i32", "i32")
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut tokens into batches and yield `(inputs, targets)`, both [batch_size, sequence_length], C-contiguous.

    Each sequence is a block of `sequence_length + 1` tokens; targets are the inputs shifted by one, and `IGNORED` for
    tokens that are no targets.

    Args:
        tokens: ids of any unsigned type, or of a signed type, where complements of ids are no targets.
        batch_size: sequences in a batch.
        sequence_length: target tokens in a sequence.
        dtypes: element types the model takes for inputs and for targets, two of `TOKEN_DTYPES`. The one copy that makes
            a batch contiguous also converts it.

    Raises:
        UserError: `tokens` are no whole number of batches, or one of them, or `IGNORED`, does not fit into the model's
            type.
    """
    batch_tokens = batch_size * (sequence_length + 1)
    count, rest = divmod(tokens.size, batch_tokens)
    if rest or not count:
        raise UserError(
            f"{tokens.size} tokens are no whole number of batches of {batch_size} × ({sequence_length} + 1) "
            f"= {batch_tokens} tokens"
        )
    kinds = [host_dtype(dtype) for dtype in dtypes]
    ids, targets = split(tokens)
    _check_range(ids, dtypes, kinds)
    if targets is not ids and kinds[1].kind == "u":
        raise UserError(f"some tokens of the data are no targets, and the model takes targets as {dtypes[1]}: {SIGNED}")
    blocks = (part.reshape(count, batch_size, sequence_length + 1) for part in (ids, targets))
    for read, wanted in zip(*blocks, strict=True):
        yield read[:, :-1].astype(kinds[0], order="C"), wanted[:, 1:].astype(kinds[1], order="C")


SIGNED = "take them as i32 or i64, which have the value -100 for a target that is not counted"


def split(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a file's tokens, and the same as targets: `IGNORED` for those that are none.

    Both are `tokens` itself where all of them are targets.
    """
    if tokens.dtype.kind == "u":
        return tokens, tokens
    is_read_only = tokens < 0
    return np.where(is_read_only, ~tokens, tokens), np.where(is_read_only, tokens.dtype.type(IGNORED), tokens)


def counted(targets: np.ndarray) -> int:
    """Return how many targets a loss counts."""
    return int(np.count_nonzero(targets >= 0)) if targets.dtype.kind == "i" else targets.size


def _check_range(tokens: np.ndarray, dtypes: tuple[str, str], kinds: list[np.dtype]) -> None:
    """Raise `UserError` if a conversion would change an id; costs nothing where the type says that it cannot."""
    for dtype, kind in zip(dtypes, kinds, strict=True):
        largest = int(np.iinfo(kind).max)
        if int(np.iinfo(tokens.dtype).max) > largest and (found := int(tokens.max())) > largest:
            raise UserError(
                f"the data has token {found}, and the model takes tokens as {dtype}, of at most {largest}; use a "
                "tokenizer with fewer tokens, or a model with wider ones"
            )
