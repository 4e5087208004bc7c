"""Tables of states: what cannot happen is an error, and the pages show the tables that the machines run on."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from planetary.core.errors import LocalProtocolError
from planetary.machine.state_table import Table, advance, diagram, with_diagrams

MAKE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_diagrams.py"))
DOOR: Table = {("wide open", "push"): "shut", ("shut", "pull"): "wide open", ("shut", "brick up"): "wall"}


def test_an_event_leads_to_the_next_state_or_is_an_error() -> None:
    assert advance(DOOR, "shut", "pull") == "wide open"
    with pytest.raises(LocalProtocolError, match="the event 'pull' cannot happen in the state 'wall'"):
        advance(DOOR, "wall", "pull")


def test_diagram_runs_from_the_first_row_to_dead_ends() -> None:
    """A diagram begins with the first row and ends where nothing leads on."""
    lines = [line.strip() for line in diagram(DOOR).splitlines()]
    assert lines[:3] == ["stateDiagram-v2", 'state "wide open" as wide_open', "[*] --> wide_open"]
    assert "shut --> wide_open: pull" in lines
    assert lines[-1] == "wall --> [*]"


def test_page_block_is_replaced_and_a_missing_one_is_an_error() -> None:
    page = "before\n<!-- diagram: door -->\nold\n<!-- end -->\nafter\n"
    found = with_diagrams(page, {"door": DOOR})
    assert found == f"before\n<!-- diagram: door -->\n```mermaid\n{diagram(DOOR)}\n```\n<!-- end -->\nafter\n"
    with pytest.raises(ValueError, match="window"):
        with_diagrams(page, {"window": DOOR})


@pytest.mark.parametrize("name", MAKE["TABLES"])
def test_the_pages_show_the_tables(name: str) -> None:
    assert (MAKE["FOLDER"] / name).read_text() == MAKE["page"](name), "run `python docs/make_diagrams.py`"
