from __future__ import annotations

import os
from pathlib import Path

import fsspec
import numpy as np
import pytest

from planetary.core.errors import ResourceError, UserError
from planetary.core.tensors import host_dtype
from planetary.core.token_slice import Slice
from planetary.data.reader import batches, read_slice


@pytest.mark.parametrize(("dtype", "width"), [("ui8", 1), ("ui16", 2), ("ui32", 4)])
def test_a_slice_is_read_from_a_path_and_from_urls(tmp_path: Path, dtype: str, width: int) -> None:
    tokens = np.arange(100, dtype=f"<u{width}")
    (tmp_path / "t").write_bytes(tokens.tobytes())
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/reader-test/t", tokens.tobytes())
    for url in (str(tmp_path / "t"), f"file://{tmp_path}/t", "memory://reader-test/t"):
        read = read_slice(Slice(url, dtype, 30, 20))
        assert read.dtype == tokens.dtype
        np.testing.assert_array_equal(read, tokens[30:50])


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_short_or_missing_file_is_an_error_with_numbers(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "t").write_bytes(bytes(90))
    with pytest.raises(UserError, match="expected 20 bytes from byte 80 on, found 10"):
        read_slice(Slice(f"{scheme}{tmp_path}/t", "ui16", 40, 10))
    with pytest.raises(UserError, match=r"cannot read .*absent"):
        read_slice(Slice(f"{scheme}{tmp_path}/absent", "ui8", 0, 1))


def test_unusable_urls_are_user_errors() -> None:
    with pytest.raises(UserError, match="cannot read nosuch://x"):
        read_slice(Slice("nosuch://x", "ui8", 0, 1))


class Interrupted(fsspec.AbstractFileSystem):
    protocol = "interrupted"
    answer: bytes | OSError | dict = OSError("connection reset")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: object) -> bytes:
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (OSError("connection reset"), ResourceError, "failed: connection reset"),
        (b"0123456789", UserError, "does not support reading a range"),
        ({"a": b""}, UserError, "names several files"),
    ],
)
def test_what_servers_do_wrong(
    monkeypatch: pytest.MonkeyPatch, answer: object, error: type[Exception], words: str
) -> None:
    fsspec.register_implementation("interrupted", Interrupted, clobber=True)
    monkeypatch.setattr(Interrupted, "answer", answer)
    with pytest.raises(error, match=words):
        read_slice(Slice("interrupted://host/x", "ui8", 4, 4))


def test_batches_shift_targets_by_one_and_lose_nothing() -> None:
    tokens = np.arange(2 * 3 * 5, dtype=np.uint16)
    cut = list(batches(tokens, batch_size=3, sequence_length=4))
    assert len(cut) == 2
    for inputs, targets in cut:
        assert inputs.dtype == targets.dtype == np.int32
        assert inputs.shape == targets.shape == (3, 4)
        assert inputs.flags.c_contiguous
        assert targets.flags.c_contiguous
        np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(cut[1][0][0], [15, 16, 17, 18])
    np.testing.assert_array_equal(cut[1][1][2], [26, 27, 28, 29])


def test_large_token_ids_survive() -> None:
    tokens = np.array([0, 2**31 - 1], np.uint32)
    ((inputs, targets),) = batches(tokens, 1, 1)
    assert (inputs.item(), targets.item()) == (0, 2**31 - 1)


@pytest.mark.parametrize("dtypes", [("i64", "i64"), ("ui16", "i64"), ("ui32", "i32")])
@pytest.mark.parametrize("stored", [np.uint8, np.uint16, np.uint32])
def test_batches_have_the_element_types_of_the_model(dtypes: tuple[str, str], stored: type) -> None:
    tokens = np.arange(2 * 5, dtype=stored)
    ((inputs, targets),) = batches(tokens, 2, 4, dtypes)
    assert (inputs.dtype, targets.dtype) == tuple(host_dtype(dtype) for dtype in dtypes)
    assert inputs.flags.c_contiguous
    assert targets.flags.c_contiguous
    np.testing.assert_array_equal(inputs, [[0, 1, 2, 3], [5, 6, 7, 8]])
    np.testing.assert_array_equal(targets, [[1, 2, 3, 4], [6, 7, 8, 9]])


@pytest.mark.parametrize(("token", "dtypes"), [(65_536, ("i32", "ui16")), (2**31, ("i32", "i64"))])
def test_a_token_that_the_model_cannot_hold_is_refused(token: int, dtypes: tuple[str, str]) -> None:
    tokens = np.array([0, token], np.uint32)
    with pytest.raises(UserError, match=f"the data has token {token}, and the model takes tokens as"):
        next(batches(tokens, 1, 1, dtypes))
    fits = np.array([0, token - 1], np.uint32)
    assert next(batches(fits, 1, 1, dtypes))[1].item() == token - 1


@pytest.mark.parametrize("count", [0, 14, 31])
def test_a_rest_is_refused(count: int) -> None:
    with pytest.raises(UserError, match=f"{count} tokens are no whole number of batches of 3"):
        list(batches(np.zeros(count, np.uint8), 3, 4))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_forbidden_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"x")
    (tmp_path / "t").chmod(0)
    with pytest.raises(UserError, match="Permission denied"):
        read_slice(Slice(str(tmp_path / "t"), "ui8", 0, 1))
