"""Named states of a machine as a table of transitions. The machine runs on the table, and the docs draw it."""

from __future__ import annotations

from collections.abc import Mapping

from planetary.core.errors import LocalProtocolError

Table = Mapping[tuple[str, str], str]
"""(state, event) -> next state. An event that is not in the table is a bug of this side."""


def advance(table: Table, state: str, event: str) -> str:
    """Return the next state. Raises `LocalProtocolError` for a step that is not in the table."""
    try:
        return table[state, event]
    except KeyError:
        raise LocalProtocolError(f"the event {event!r} cannot happen in the state {state!r}") from None


def diagram(table: Table) -> str:
    """Return the table as a Mermaid state diagram; the first row begins with the initial state."""
    targets = set(table.values())
    sources = {state for state, _ in table}
    lines = ["stateDiagram-v2"]
    names = sorted(sources | targets)
    lines += [f'    state "{name}" as {_id(name)}' for name in names if " " in name]
    first = next(iter(table))[0]
    lines.append(f"    [*] --> {_id(first)}")
    lines += [f"    {_id(state)} --> {_id(after)}: {event}" for (state, event), after in table.items()]
    lines += [f"    {_id(name)} --> [*]" for name in names if name not in sources]
    return "\n".join(lines)


def with_diagrams(page: str, tables: Mapping[str, Table]) -> str:
    """Return a Markdown page in which every block `<!-- diagram: name -->` … `<!-- end -->` shows a table."""
    for name, table in tables.items():
        head, mark, rest = page.partition(f"<!-- diagram: {name} -->\n")
        if not mark:
            raise ValueError(f"the page has no block <!-- diagram: {name} -->")
        tail = rest.partition("<!-- end -->")[2]
        page = f"{head}{mark}```mermaid\n{diagram(table)}\n```\n<!-- end -->{tail}"
    return page


def _id(name: str) -> str:
    return name.replace(" ", "_")
