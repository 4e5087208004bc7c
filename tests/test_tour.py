"""The tour and the architecture page name places that exist, and their numbers are true."""

from __future__ import annotations

import ast
import re
import runpy
import tomllib
from pathlib import Path

import pytest

import planetary

ROOT = Path(__file__).parents[1]
PACKAGE = Path(planetary.__file__).parent
PAGE = (ROOT / "docs" / "tour.md").read_text()
PLACE = re.compile(r"`([a-z_0-9/]+\.py):([A-Za-z_0-9.]+)`")
ROW = re.compile(r"^\| `([a-z_0-9/]+\.py)` \| (\d+) \|", re.MULTILINE)
ROW_OF_SUB_PACKAGE = re.compile(r"^\| `([a-z]+)/([a-z]+)` \|", re.MULTILINE)
LONGEST = 2500  # lines to read
# Files that a journey enters at most: lower these when a hop is removed. Key: the journey's number.
MOST_FILES = {"2": 14, "3": 15}
CONNECTION = slice(6, 13)  # hops of journey 2 that every message of journey 3 takes, too


def names_in(path: Path) -> set[str]:
    """Functions, classes and methods (`Class.method`) of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def hops_of(journey: str) -> str:
    """The numbered lines of a journey."""
    return "\n".join(line for line in journey.splitlines() if re.match(r"\d+\. `", line))


@pytest.mark.parametrize("place", sorted(set(PLACE.findall(PAGE))), ids=":".join)
def test_every_place_of_the_tour_exists(place: tuple[str, str]) -> None:
    file, name = place
    assert (PACKAGE / file).is_file()
    assert name in names_in(PACKAGE / file)


def test_there_are_five_journeys_and_every_hop_names_a_place() -> None:
    journeys = PAGE.split("\n## ")[2:]
    assert [journey[:2] for journey in journeys] == ["1.", "2.", "3.", "4.", "5."]
    for journey in journeys:
        hops = re.findall(r"^(\d+)\. (.*)$", journey.partition("\n")[2], re.MULTILINE)
        assert [int(number) for number, _ in hops] == list(range(1, len(hops) + 1))
        assert len(hops) > 5
        assert all(PLACE.match(text) for _, text in hops)


def test_every_message_event_and_record_of_the_tour_exists() -> None:
    quoted = [code for code in re.findall(r"`([^`\n]+)`", PAGE) if "/" not in code]
    named = {name for code in quoted for name in re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", code)}
    classes = {
        name for path in PACKAGE.rglob("*.py") for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    }
    assert {"TrainResult", "OfferSketches"} <= named
    assert named <= classes, f"docs/tour.md: no such classes: {sorted(named - classes)}"


def test_hops_and_files_of_a_journey_are_counted_and_do_not_grow() -> None:
    files = {journey[0]: [file for file, _ in PLACE.findall(hops_of(journey))] for journey in PAGE.split("\n## ")[2:]}
    for journey in PAGE.split("\n## ")[2:]:
        entered = files[journey[0]]
        assert f"{len(entered)} hops, {len(set(entered))} files" in " ".join(journey.split())
    with_connection = set(files["3"]) | set(files["2"][CONNECTION])
    assert f"; {len(with_connection)} files with those of the connection." in PAGE
    assert len(set(files["2"])) <= MOST_FILES["2"]
    assert len(with_connection) <= MOST_FILES["3"]


def test_the_architecture_page_has_the_sub_packages_in_the_order_of_the_contracts() -> None:
    rows = ROW_OF_SUB_PACKAGE.findall((ROOT / "docs" / "architecture.md").read_text())
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {name.removeprefix("planetary."): c["layers"] for c in contracts for name in c.get("containers", ())}
    for package in sorted({path.parent.parent.name for path in PACKAGE.glob("*/*/__init__.py")} - {"cli", "compat"}):
        described = [name for row, name in rows if row == package]
        assert sorted(described) == sorted(path.parent.name for path in PACKAGE.glob(f"{package}/*/__init__.py"))
        height = {name: i for i, layer in enumerate(layers[package]) for name in re.split(r"\s*[|:]\s*", layer)}
        assert [height[name] for name in described] == sorted(height[name] for name in described), package


def test_the_reading_order_is_short_and_passes_the_line_where_a_step_is_executed() -> None:
    rows = ROW.findall(PAGE)
    assert rows[0][0] == "run/train.py"
    lines = {file: len((PACKAGE / file).read_text().splitlines()) for file, _ in rows}
    wrong = {file: lines[file] for file, said in rows if abs(lines[file] - int(said)) > 15}
    assert not wrong, f"docs/tour.md: these files have other numbers of lines: {wrong}"
    assert sum(lines.values()) <= LONGEST
    said = re.search(r"`fabric/worker/compute.py:inner_steps`: `([^`]+)`", PAGE)
    assert said is not None
    assert said[1] in (PACKAGE / "fabric/worker/compute.py").read_text()
    told = re.search(r"one order of ([\d,]+) lines", (ROOT / "README.md").read_text())
    assert told is not None
    assert abs(sum(lines.values()) - int(told[1].replace(",", ""))) <= 100
    assert "fabric/worker/compute.py" in lines


def test_the_example_kills_a_worker_and_the_gateway_and_computes_the_parameters_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(ROOT / "examples" / "tour.py"), run_name="__main__")
    told = capsys.readouterr().out
    events = [line.split()[2] for line in told.splitlines() if " s  " in line]
    assert events[0] == "run_started"
    assert events[-1] == "run_finished"
    assert {"worker_lost", "lease_returned", "run_resumed"} <= set(events)
    assert "faults that hit: kill_worker, kill_gateway" in told
    assert "equal in every bit after 4 rounds" in told
