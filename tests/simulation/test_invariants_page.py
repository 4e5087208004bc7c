"""docs/invariants.md names tests that exist, and replay commands that run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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
