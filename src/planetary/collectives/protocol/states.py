"""The life of an operation as tables: at the master, and on a peer. The diagrams in the manual are made from them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from planetary.core.errors import LocalProtocolError

Table = Mapping[tuple[str, str], str]
"""(state, event) -> next state. What is not in the table is a bug of this side."""

MASTER_OPERATION: Table = {
    ("gathering", "all members came"): "running",
    ("gathering", "all brought their data"): "committed",
    ("gathering", "arguments differ"): "refused",
    ("gathering", "deadline"): "refused",
    ("running", "all completed"): "committed",
    ("running", "a peer failed or is gone"): "aborted",
    ("running", "digests differ"): "aborted",
}
"""`refused`, `committed` and `aborted` are final, and every member is told the same one."""

PEER_OPERATION: Table = {
    ("wanted", "commence"): "running",
    ("wanted", "committed"): "succeeded",
    ("wanted", "refused"): "failed",
    ("wanted", "master lost"): "failed",
    ("running", "all pieces came"): "completed",
    ("running", "link fault"): "faulty",
    ("running", "aborted"): "failed",
    ("running", "master lost"): "failed",
    ("completed", "committed"): "succeeded",
    ("completed", "aborted"): "failed",
    ("completed", "link fault"): "completed",  # a neighbour that is done may already be gone
    ("completed", "master lost"): "in doubt",
    ("faulty", "link fault"): "faulty",
    ("faulty", "all pieces came"): "faulty",
    ("faulty", "aborted"): "failed",
    ("faulty", "master lost"): "failed",
    ("in doubt", "committed"): "succeeded",
    ("in doubt", "aborted"): "failed",
    ("in doubt", "master lost"): "in doubt",
    ("in doubt", "gave up"): "failed",
    ("in doubt", "link fault"): "in doubt",
}
"""On `failed` the caller's arrays are restored; until `succeeded` they can be."""

PEER_MEMBERSHIP: Table = {
    ("outside", "registered"): "waiting",
    ("outside", "returned"): "member",
    ("waiting", "admitted"): "member",
    ("waiting", "removed"): "outside",
    ("waiting", "master lost"): "outside",
    ("member", "topology"): "member",
    ("member", "removed"): "outside",
    ("member", "master lost"): "away",
    ("away", "returned"): "member",
    ("away", "gave up"): "outside",
    ("away", "master lost"): "away",
    ("away", "removed"): "outside",
}
"""`away`: the master may be restarting; within the grace time a member returns with everything it was."""


def advance(table: Table, state: str, event: str) -> str:
    """Return the next state. Raises `LocalProtocolError` for a step that is not in the table."""
    try:
        return table[state, event]
    except KeyError:
        raise LocalProtocolError(f"the event {event!r} cannot happen in the state {state!r}") from None


def diagram(table: Table) -> str:
    """Return the table as a Mermaid state diagram."""
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


def _id(name: str) -> str:
    return name.replace(" ", "_")


def _refresh(manual: str) -> str:
    """Return the manual with every diagram replaced by its table's."""
    tables = {
        "peer-membership": PEER_MEMBERSHIP,
        "master-operation": MASTER_OPERATION,
        "peer-operation": PEER_OPERATION,
    }
    for name, table in tables.items():
        head, _, rest = manual.partition(f"<!-- diagram: {name} -->\n")
        tail = rest.partition("<!-- end -->")[2]
        manual = f"{head}<!-- diagram: {name} -->\n```mermaid\n{diagram(table)}\n```\n<!-- end -->{tail}"
    return manual


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(_refresh(path.read_text()))
