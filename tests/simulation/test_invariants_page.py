"""docs/invariants.md names tests that exist, and the numbers of schedules are what the page says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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


def test_the_replay_commands_are_those_that_failing_schedules_print() -> None:
    commands = re.findall(r"^    (PYTHONPATH=src(?::tests)? python (\S+))", PAGE, re.MULTILINE)
    assert len(commands) == 4
    for command, path in commands:
        assert f"replay: {command} " in (ROOT / path).read_text()
