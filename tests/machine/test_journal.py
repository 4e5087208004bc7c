"""One treatment of damaged journals for every kind of run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from planetary.artifacts.jsonl import JsonLinesWriter, read_json_lines
from planetary.core.errors import LocalProtocolError, UserError
from planetary.machine.journal import Record, replay


class Stepped(Record, frozen=True, kw_only=True, tag="stepped"):
    """The count is one higher."""

    to: int


class Noted(Record, frozen=True, kw_only=True, tag="noted"):
    """A fact that nothing depends on."""

    text: str


class Count(msgspec.Struct):
    """A fold."""

    value: int = 0
    seen: dict[str, int] = {}

    def apply(self, record: Stepped | Noted) -> None:
        if isinstance(record, Stepped):
            if record.to != self.value + 1:
                raise LocalProtocolError(f"{self.value} is not before {record.to}")
            self.value = record.to
        elif record.text:
            self.seen[record.text] += 1


def journal(tmp_path: Path, *records: Record) -> Path:
    path = tmp_path / "events.jsonl"
    path.parent.mkdir(exist_ok=True)
    with JsonLinesWriter(path) as writer:
        for record in records:
            writer.append(record)
    return path


def folded(path: Path) -> Count:
    return replay(read_json_lines(path, Stepped | Noted), Count(), path)


def test_records_fold_in_order(tmp_path: Path) -> None:
    path = journal(tmp_path, Stepped(to=1, t=1.0), Noted(text="", t=1.0), Stepped(to=2, t=1.0))
    path.write_bytes(path.read_bytes() + b'{"event":"stepped","to":3')  # a writer was killed
    assert folded(path).value == 2


@pytest.mark.parametrize("t", [0.0, 5.0])
def test_a_doubled_line_is_named_with_its_repair(tmp_path: Path, t: float) -> None:
    path = journal(tmp_path, Stepped(to=1, t=t), Stepped(to=2, t=t), Stepped(to=2, t=t), Stepped(to=3, t=t))
    with pytest.raises(UserError, match=r"line 3 repeats line 2, the record stepped") as error:
        folded(path)
    command = f"sed -i 3d {path}"
    assert command in str(error.value)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))  # what the command does
    assert folded(path).value == 3


def test_doubled_line_without_effect_is_found_by_its_time(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="line 2 repeats line 1, the record noted"):
        folded(journal(tmp_path, Noted(text="", t=7.0), Noted(text="", t=7.0)))
    assert folded(journal(tmp_path / "other", Noted(text="", t=7.0), Noted(text="", t=8.0))).value == 0


@pytest.mark.parametrize(
    ("record", "why"),
    [(Stepped(to=3, t=2.0), "1 is not before 3"), (Noted(text="who", t=2.0), "nothing is known of 'who'")],
)
def test_impossible_record_names_its_line_and_the_kept_rest(tmp_path: Path, record: Record, why: str) -> None:
    path = journal(tmp_path, Stepped(to=1, t=1.0), record)
    with pytest.raises(UserError, match=f"line 2: the record .* cannot follow .*: {why}") as error:
        folded(path)
    assert "head -n 1" in str(error.value)


def test_a_record_of_another_kind_of_run_is_damage(tmp_path: Path) -> None:
    path = journal(tmp_path, Stepped(to=1, t=1.0))
    path.write_bytes(path.read_bytes() + b'{"event":"melted","t":2.0}\n')
    with pytest.raises(UserError, match=r"line 2 is damaged.*melted"):
        folded(path)
