from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import msgspec
import pytest

from planetary.artifacts.jsonl import JsonLinesTail, JsonLinesWriter, follow, read_json_lines
from planetary.core.errors import ClosedError, ResourceError, UserError


class Row(msgspec.Struct, frozen=True):
    n: int
    text: str = ""


def read(path: Path) -> list[int]:
    return [row.n for row in read_json_lines(path, Row)]


def test_records_come_back_in_order_across_writers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with JsonLinesWriter(path) as writer:
        writer.append(Row(1, "first\nwith a newline"))
        writer.append({"n": 2}, durable=True)
    with JsonLinesWriter(path) as writer:
        writer.append(Row(3))
    assert list(read_json_lines(path, Row)) == [Row(1, "first\nwith a newline"), Row(2), Row(3)]


def test_a_record_is_in_the_file_before_the_writer_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = JsonLinesWriter(path)
    writer.append(Row(1))
    assert read(path) == [1]
    writer.close()


@pytest.mark.parametrize("cut", range(1, 9))
def test_torn_last_line_is_cut_at_any_byte_and_repaired(tmp_path: Path, cut: int) -> None:
    """Cut at any byte of the last line the whole lines stay and the next writer repairs."""
    path = tmp_path / "events.jsonl"
    last = b'{"n":2}\n'
    path.write_bytes(b'{"n":1}\n' + last[:-cut])
    assert read(path) == [1]
    with JsonLinesWriter(path) as writer:
        writer.append(Row(3))
    assert read(path) == [1, 3]


def test_a_torn_tail_longer_than_one_block_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"n":1}\n' + b'{"text":"' + b"x" * 200_000)
    JsonLinesWriter(path).close()
    assert path.read_bytes() == b'{"n":1}\n'


def test_a_file_with_only_a_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"n":')
    assert read(path) == []
    JsonLinesWriter(path).close()
    assert path.read_bytes() == b""


def test_a_damaged_whole_line_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":"two"}\n')
    with pytest.raises(UserError, match=r"events\.jsonl, line 2 is damaged"):
        read(path)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent"):
        read(tmp_path / "absent.jsonl")


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    writer = JsonLinesWriter(path)
    writer.append(Row(1))
    before = path.read_bytes()
    real_write = os.write
    calls = []

    def write_some_then_fail(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real_write(fd, data[:4])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write_some_then_fail)
    with pytest.raises(ResourceError, match="No space left"):
        writer.append(Row(2))
    monkeypatch.undo()
    assert len(calls) == 2
    assert path.read_bytes() == before
    writer.append(Row(3))
    writer.close()
    assert read(path) == [1, 3]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with JsonLinesWriter(path) as writer:
        threads = [
            threading.Thread(target=lambda i=i: [writer.append(Row(i, "x" * 500)) for _ in range(50)]) for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(read(path)) == sorted(list(range(4)) * 50)


def test_appending_after_close_is_refused(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "events.jsonl")
    writer.close()
    writer.close()
    with pytest.raises(ClosedError):
        writer.append(Row(1))


def test_an_unwritable_place_is_a_resource_error(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot open"):
        JsonLinesWriter(tmp_path / "no" / "such" / "folder.jsonl")


def test_tail_sees_each_whole_record_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = JsonLinesTail(path, Row)
    assert tail.poll() == []
    path.write_bytes(b'{"n":1}\n{"n":2')
    assert tail.poll() == [Row(1)]
    assert tail.poll() == []
    with path.open("ab") as file:
        file.write(b"2}\n")
    assert tail.poll() == [Row(22)]


def test_tail_survives_a_new_writer_cutting_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2')
    tail = JsonLinesTail(path, Row)
    assert tail.poll() == [Row(1)]
    with JsonLinesWriter(path) as writer:
        assert tail.poll() == []
        writer.append(Row(3))
    assert tail.poll() == [Row(3)]


def test_the_tail_starts_again_when_the_file_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2}\n')
    tail = JsonLinesTail(path, Row)
    tail.poll()
    path.write_bytes(b'{"n":9}\n')
    assert tail.poll() == [Row(9)]


def test_the_tail_reports_damage_once_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"n":1}\nnonsense\n{"n":3}\n')
    tail = JsonLinesTail(path, Row)
    assert tail.poll() == [Row(1)]
    with pytest.raises(UserError, match="line 2"):
        tail.poll()
    assert tail.poll() == [Row(3)]


def test_follow_delivers_what_came_before_the_stop(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = JsonLinesWriter(path)
    turns = iter([Row(1), Row(2), None])

    def wait() -> bool:
        row = next(turns)
        writer.append(row or Row(3))
        return row is not None

    assert list(follow(JsonLinesTail(path, Row), wait)) == [Row(1), Row(2), Row(3)]
    writer.close()


def checked(path: Path) -> list[int]:
    return [row.n for row in read_json_lines(path, Row, checksums=True)]


def written(path: Path, *numbers: int) -> bytes:
    with JsonLinesWriter(path, checksums=True) as writer:
        for number in numbers:
            writer.append(Row(number, "text"))
    return path.read_bytes()


def test_lines_with_checksums_come_back_with_and_without_a_check(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    data = written(path, 1, 2)
    assert checked(path) == read(path) == [1, 2]
    assert data.splitlines()[0].startswith(b'{"n":1,"text":"text","crc32":"')


def test_every_flipped_bit_of_a_journal_is_found(tmp_path: Path) -> None:
    """But for one in the last newline, which leaves a torn line."""
    path = tmp_path / "events.jsonl"
    data = written(path, 1, 2, 3)
    for bit in range(8 * (len(data) - 1)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(flipped)
        with contextlib.suppress(UserError):
            assert checked(path) == [1, 2, 3], "only the key of the first line's checksum may change nothing"


def test_torn_last_line_is_cut_beside_checksums(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    data = written(path, 1, 2)
    for cut in range(1, len(data) // 2):
        path.write_bytes(data[:-cut])
        assert checked(path) == [1]
    written(path, 3)
    assert checked(path) == [1, 3]


def test_lines_of_an_earlier_version_have_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with JsonLinesWriter(path) as writer:
        writer.append(Row(1))
    written(path, 2)
    assert checked(path) == [1, 2]
    path.write_bytes(path.read_bytes() + b'{"n":3}\n')
    with pytest.raises(UserError, match=r"line 3 is damaged: it has no checksum.*head -n 2"):
        checked(path)
