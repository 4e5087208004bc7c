"""The README's table of numbers is the one of the measured rows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def numbers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_numbers", ROOT / "bench" / "readme_numbers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_readme_has_the_measured_rows(numbers: ModuleType) -> None:
    """A row that somebody typed, or a measured row that README lacks, differs from the kept results."""
    text = (ROOT / "README.md").read_text()
    assert numbers.with_table(text, numbers.load()) == text


def test_kept_rows_are_of_todays_commands(numbers: ModuleType) -> None:
    """A job whose command changed has no number until it is measured again."""
    assert {name: {row["command"] for row in rows} for name, rows in numbers.load().items()} == {
        name: {numbers.JOBS[name].command} for name in numbers.load()
    }


def test_commands_name_files_of_this_tree(numbers: ModuleType) -> None:
    """A row's command works as it stands."""
    words = [word for job in numbers.JOBS.values() for word in job.command.split() if "/" in word]
    assert [word for word in words if not (ROOT / word).exists()] == []


def test_a_row_without_its_value_is_an_error(numbers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that the output lacks must not leave a gap in a sentence."""
    job = numbers.Job("python -c pass", 0, lambda output, folder: {"token": " of the time; 5.2"})
    with pytest.raises(AssertionError, match="a value is missing"):
        numbers.measure(job)
