"""Draw the state diagrams of the pages from the tables that machines run on: `python docs/make_diagrams.py`.

A test keeps them current.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from planetary.collectives.protocol import operation_states
from planetary.fleet.controller.controller import RUN
from planetary.fleet.protocol.sessions import WORKER_SESSION
from planetary.fleet.supervisor.machine import SUPERVISOR
from planetary.fleet.worker.machine import WORKER
from planetary.machine.redial import LINK
from planetary.machine.state_table import Table, with_diagrams
from planetary.runs.mixture.composer.machine import COMPOSER
from planetary.runs.mixture.controller.syncer_machine import FRAGMENT, OWNERSHIP
from planetary.runs.rounds.worker.lease_machine import LEASE_TASKS
from planetary.site.jobs import JOB
from planetary.site.placement.placed_jobs import PLACED_JOB

TABLES: Mapping[str, Mapping[str, Table]] = {
    "architecture.md": {
        "link": LINK,
        "run": RUN,
        "worker-session": WORKER_SESSION,
        "worker": WORKER,
        "lease-tasks": LEASE_TASKS,
        "supervisor": SUPERVISOR,
    },
    "collectives.md": {
        "peer-membership": operation_states.PEER_MEMBERSHIP,
        "master-operation": operation_states.MASTER_OPERATION,
        "peer-operation": operation_states.PEER_OPERATION,
    },
    "federation.md": {"placed-job": PLACED_JOB},
    "site.md": {"job": JOB},
    "parallax.md": {"composer": COMPOSER, "fragment": FRAGMENT, "ownership": OWNERSHIP},
}
"""By page: its blocks."""

FOLDER = Path(__file__).parent


def page(name: str) -> str:
    """Return a page with its diagrams as the tables are now."""
    return with_diagrams((FOLDER / name).read_text(), TABLES[name])


if __name__ == "__main__":
    for name in TABLES:
        (FOLDER / name).write_text(page(name))
