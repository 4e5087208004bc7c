"""The waits of tests: what a failure shows, and that no test has a limit of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import wait_until


def test_a_process_that_ends_fails_the_wait_and_is_quoted() -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(AssertionError, match=r"ended with 3 before: news\nits log"):
        wait_until(lambda: False, "news", said=lambda: "its log", process=process)


def test_what_a_process_did_at_its_end_is_found(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", f"open({str(tmp_path / 'news')!r}, 'w').write('1')"])
    assert wait_until(lambda: (tmp_path / "news").exists(), "news", process=process)


def test_no_test_measures_speed_by_a_limit_of_its_own() -> None:
    """A loop until a time, and a wait for a process or a thread with a number of seconds."""
    limits = re.compile(
        r"= (time\.)?monotonic\(\) \+ \d|\.communicate\(timeout=\d|process\.wait\(\d|mark\.timeout\([1-5]?\d?\d\)"
    )
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(Path(__file__).parent.rglob("*.py"))
        if path != Path(__file__)
        for line in path.read_text().splitlines()
        if limits.search(line)
    ]
    assert found == []
