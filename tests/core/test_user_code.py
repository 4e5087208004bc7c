"""A user's Python file is loaded as Python would load it."""

from __future__ import annotations

import pickle
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from planetary.compiler.frontend.export import find_builder
from planetary.core.errors import UserError
from planetary.core.user_code import load_module

DATACLASS = """
from __future__ import annotations
import typing
from dataclasses import dataclass, field
@dataclass
class Settings:
    width: int = 3
    names: list[str] = field(default_factory=list)
typing.get_type_hints(Settings)
"""
NEIGHBOURS = """
import neighbour
from . import neighbour as relative
from .parts.inner import INNER
def late():
    import late_neighbour
    return late_neighbour.VALUE
"""


@pytest.fixture(autouse=True)
def _same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def _write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_dataclass_with_postponed_annotations_loads(tmp_path: Path) -> None:
    module = load_module(_write(tmp_path, "my-model.v2.py", DATACLASS))
    assert [one.name for one in fields(module.Settings)] == ["width", "names"]
    assert pickle.loads(pickle.dumps(module.Settings(4))).width == 4


def test_neighbours_are_imported_early_and_late(tmp_path: Path) -> None:
    path = _write(tmp_path, "model.py", NEIGHBOURS)
    _write(tmp_path, "neighbour.py", "VALUE = 1\n")
    _write(tmp_path, "parts/inner.py", "INNER = 2\n")
    _write(tmp_path, "late_neighbour.py", "VALUE = 3\n")
    module = load_module(path)
    assert (module.neighbour.VALUE, module.relative.VALUE, module.INNER, module.late()) == (1, 1, 2, 3)


def test_each_folder_has_its_own_neighbour(tmp_path: Path) -> None:
    """Two files that import a module of one name get that of their own folder."""
    for folder in ("one", "two"):
        _write(tmp_path / folder, "helpers_here.py", f"VALUE = {folder!r}\n")
        path = _write(tmp_path / folder, "model.py", "from helpers_here import VALUE\n")
        value = load_module(path).VALUE
        assert value == folder


def test_changed_file_and_neighbour_are_run_again(tmp_path: Path) -> None:
    path = _write(tmp_path, "model.py", "from changing_neighbour import VALUE\n")
    for number in (1, 22):  # of another length: a cached bytecode file of the same second would count otherwise
        _write(tmp_path, "changing_neighbour.py", f"VALUE = {number}\n")
        value = load_module(path).VALUE
        assert value == number


def test_neighbour_hides_no_module_later(tmp_path: Path) -> None:
    """A folder with a `colorsys.py` changes that name for its own file only."""
    sys.modules.pop("colorsys", None)
    _write(tmp_path, "colorsys.py", "OWN = True\n")
    load_module(_write(tmp_path, "model.py", "VALUE = 1\n"))
    import colorsys

    assert not hasattr(colorsys, "OWN")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n\nraise ValueError('not today')\n", r"ValueError: not today \(.*broken\.py:3\)"),
        ("def f(:\n", r"SyntaxError: .*broken\.py:1\)"),
        ("import sys\nsys.exit(3)\n", r"it called exit\(3\) \(.*broken\.py:2\)"),
        ("import helper_that_fails\n", r"ZeroDivisionError: .*helper_that_fails\.py:2\)"),
        ("import nothing_of_this_name\n", r"No module named 'nothing_of_this_name' \(.*broken\.py:1\)"),
    ],
)
def test_failure_names_file_and_line(tmp_path: Path, text: str, expected: str) -> None:
    _write(tmp_path, "helper_that_fails.py", "\n1 / 0\n")
    path = _write(tmp_path, "broken.py", text)
    for load in (load_module, lambda place: find_builder(f"{place}:build")):
        with pytest.raises(UserError, match=expected):
            load(path)


@pytest.mark.parametrize("place", ["missing.py", "no_such_module_here"])
def test_missing_place_is_named(place: str) -> None:
    with pytest.raises(UserError, match=f"there is no (file|module) .*{place}"):
        load_module(place)
