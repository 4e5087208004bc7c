"""How an update travels: exact, bf16, four bits, the largest elements, or a low rank; the loss is fed back.

The sender keeps the residual of a lossy form and adds it to the next update, so nothing is lost for good (PARALLAX,
13.6). Every function returns the message and the new residual; the receiver decodes the message alone.
"""

from __future__ import annotations

import msgspec
import numpy as np

from planetary.core.errors import LocalProtocolError, NumericsError, ProtocolError, UserError
from planetary.core.quantisers import from_bfloat16, to_bfloat16
from planetary.runs.mixture.config import MixtureOptions, UpdateForm
from planetary.runs.mixture.methods.codec import FourBitRows, decode_rows, encode_rows

Form = UpdateForm
_KEYS = MixtureOptions()


class Delta(msgspec.Struct, frozen=True):
    """An update of one array of shape `shape`; `parts` depend on the form."""

    form: str
    shape: tuple[int, ...]
    parts: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


def compress(
    update: np.ndarray, residual: np.ndarray | None, form: Form, *, keep: float = _KEYS.update_keep
) -> tuple[Delta, np.ndarray]:
    """Return `update + residual` in a form, and the rest (float32, the next call's residual).

    Args:
        update: float32, any shape; rows are along the last dimension.
        residual: of the last call; None: zeros.
        form: "exact" drops nothing.
        keep: part of the elements that "topk" sends.

    Raises:
        NumericsError: the update is NaN or infinite.
        UserError: `keep` is not in (0, 1].
    """
    wanted = _with_residual(update, residual)
    if form == "exact":
        return Delta(form, wanted.shape, (wanted,)), np.zeros_like(wanted)
    if form == "bf16":
        delta = Delta(form, wanted.shape, (to_bfloat16(wanted),))
    elif form == "4bit":
        rows = encode_rows(wanted.reshape(-1, wanted.shape[-1] if wanted.ndim else 1))
        delta = Delta(form, wanted.shape, (rows.packed, rows.scale))
    else:
        if not 0 < keep <= 1:
            raise UserError(f"the part of an update that is sent must be in (0, 1], found {keep}")
        flat = wanted.reshape(-1)
        count = _kept(keep, flat.size)
        chosen = np.sort(np.argpartition(-np.abs(flat), count - 1)[:count]).astype(np.uint32)
        delta = Delta(form, wanted.shape, (chosen, flat[chosen]))
    return delta, wanted - expand(delta)


def most_dropped(form: Form, keep: float, size: int) -> float:
    """Return the largest norm of a form's residual over `size` numbers, relative to the sent ones'.

    Four bits drop about a tenth; the bound leaves room for rows that are nothing like a Gaussian.
    """
    if form == "topk":  # it sends the largest: at least that part of the squares
        part = _kept(keep, size) / size
        return 1.01 * ((1 - part) / part) ** 0.5
    return {"exact": 0.0, "bf16": 2.0**-7, "4bit": 0.5}[form]


def expand(delta: Delta) -> np.ndarray:
    """Return the float32 array a message stands for, or raise `ProtocolError` where it cannot be read."""
    try:
        if delta.form == "exact":
            return delta.parts[0].reshape(delta.shape)
        if delta.form == "bf16":
            return from_bfloat16(delta.parts[0]).reshape(delta.shape)
        if delta.form == "4bit":
            width = delta.shape[-1] if delta.shape else 1
            return decode_rows(FourBitRows(width, *delta.parts)).reshape(delta.shape)
        if delta.form == "topk":
            whole = np.zeros(int(np.prod(delta.shape)), np.float32)
            whole[delta.parts[0]] = delta.parts[1]
            return whole.reshape(delta.shape)
        if delta.form == "rank":
            whole = np.zeros(delta.shape, np.float32)
            left, right = delta.parts
            rows, columns = delta.shape
            if left.shape != (rows, len(right)) or right.shape != (len(right), columns):
                raise ValueError(f"factors {left.shape} and {right.shape}")
            # No matrix product: libraries add in different orders, and sender and receivers must get the same bits.
            for column, row in zip(left.T, right, strict=True):
                whole += np.multiply.outer(column, row)
            return whole
    except (ValueError, IndexError, TypeError) as error:
        raise ProtocolError(
            f"an update in form {delta.form!r} does not fit its shape {delta.shape}: {error}"
        ) from error
    raise ProtocolError(f"an update came in the unknown form {delta.form!r}")


def low_rank(update: np.ndarray, residual: np.ndarray | None, rank: int) -> tuple[Delta, np.ndarray]:
    """Return the best rank-`rank` approximation of a matrix `update + residual` [m, n], and the rest.

    The message is the whole matrix (exact, nothing dropped) where the two factors would be no smaller: the report's
    2q(d_e + r) scalars per surrogate (4.2) exceed 2 d_e r once q ≥ d_e r / (d_e + r).
    """
    wanted = _with_residual(update, residual)
    if wanted.ndim != 2 or rank < 1:
        raise LocalProtocolError(f"a low-rank delta needs a matrix and a rank above 0, found {wanted.shape}, {rank}")
    if not rank_is_smaller(rank, *wanted.shape):
        return Delta("exact", wanted.shape, (wanted,)), np.zeros_like(wanted)
    left, values, right = np.linalg.svd(wanted, full_matrices=False)
    root = np.sqrt(values[:rank])
    delta = Delta("rank", wanted.shape, (left[:, :rank] * root, root[:, None] * right[:rank]))
    return delta, wanted - expand(delta)


def rank_is_smaller(rank: int, rows: int, columns: int) -> bool:
    """Return whether the two factors of a matrix of that rank have fewer numbers than the matrix."""
    return rank * (rows + columns) < rows * columns


def _kept(keep: float, size: int) -> int:
    """How many of `size` elements "topk" sends."""
    return max(1, round(keep * size))


def _with_residual(update: np.ndarray, residual: np.ndarray | None) -> np.ndarray:
    wanted = np.asarray(update, np.float32)
    if residual is not None:
        wanted = wanted + residual
    if not np.isfinite(wanted).all():
        raise NumericsError("cannot send an update: it contains NaN or infinite numbers")
    return wanted
