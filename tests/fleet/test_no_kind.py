"""The fleet knows no kind of run: no key of one, no name of one, no module of one."""

from __future__ import annotations

import re
from pathlib import Path

from planetary import fleet
from planetary.core.configuration.keys import FIELDS
from planetary.core.configuration.sections import section_names
from planetary.run.kinds import all_kinds
from planetary.runs import READERS

FILES = sorted(Path(fleet.__path__[0]).rglob("*.py"))
OF_ROUNDS = ("sync", "outer")
"""Sections that only runs in rounds read, beside those that kinds of run declare."""


def test_no_key_of_a_kind_is_named_in_the_fleet() -> None:
    keys = {f"{section}.{key}" for section in (*section_names(), *OF_ROUNDS) for key in FIELDS[section]}
    words = re.compile("|".join(rf"(?<![\w.]){re.escape(key)}(?!\w)" for key in sorted(keys)))
    found = {
        (path.name, match[0])
        for path in FILES
        for line in path.read_text().splitlines()
        if not line.startswith("from ")
        for match in words.finditer(line)
    }
    assert not found


def test_no_kind_is_named_in_a_string_of_the_fleet() -> None:
    """A branch on a kind's name would be a way around the kind's reader."""
    names = {kind.name for kind in all_kinds()} | set(READERS)
    quoted = re.compile("|".join(f'"{name}"' for name in sorted(names)))
    allowed = {"site", "serving"}  # the role of a site's process, and a state of a worker
    found = {(path.name, match[0]) for path in FILES for match in quoted.finditer(path.read_text())}
    assert {name for _, name in found} <= {f'"{name}"' for name in allowed}


def test_fleet_has_no_word_of_rounds() -> None:
    """Rounds, leases, evaluations and roll-outs belong to the trainings; the state of a worker alone names its work."""
    words = re.compile(r"\b(round|rounds|round_|lease|leases|outer|evaluat\w*|bigram\w*|roll_?out\w*)\b", re.IGNORECASE)
    allowed = {'"evaluating"'}
    found = [
        f"{path.name}: {line.strip()}"
        for path in FILES
        for line in path.read_text().splitlines()
        if words.search(line) and not any(text in line for text in allowed)
    ]
    assert not found
