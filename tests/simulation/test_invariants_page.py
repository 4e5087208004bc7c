"""docs/invariants.md names tests that exist, and the numbers of schedules are what the page says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from random_schedules import schedules_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "invariants.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def functions(path: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_named_test_exists() -> None:
    assert len(NAMED) >= 10
    for path, name in NAMED:
        assert name in functions(path), f"docs/invariants.md names {path}::{name}, which does not exist"


def test_every_invariant_has_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    for row in rows:
        assert re.search(r"`tests/[\w/]+\.py::\w+`", row), f"no test in the row: {row}"


def test_replay_commands_are_those_of_failing_schedules() -> None:
    commands = re.findall(
        r"^    (PYTHONPATH=src python tests/random_schedules\.py (\w+) (\d+)(.*))$", PAGE, re.MULTILINE
    )
    assert len(commands) >= 5
    for command, kind, seed, flags in commands:
        schedules = schedules_of(kind)
        options = vars(schedules.arguments().parse_args(flags.split()))
        assert schedules.replay(int(seed), options) == command


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_counts_of_schedules_are_those_of_the_tests() -> None:
    command = [sys.executable, str(ROOT / "bench" / "schedules.py")]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    counts = dict(re.findall(r"^ *([\d,]+)  (make test|the rest of \.ci/run|make soak)$", shown, re.MULTILINE))
    page = " ".join(PAGE.split())
    found = re.search(r"`make test` runs (\S+) schedules, the rest of `\.ci/run` (\S+), `make soak` (\S+) more", page)
    assert found is not None
    assert [*counts] == [*found.groups()]
