"""The files that a run leaves for people, and the error that an unfinished run ends with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planetary.core.errors import PlanetaryError
    from planetary.fabric.protocol.records import EndKind


def write_results(folder: Path) -> None:
    """Write report.json and loss.png of the run so far; a run without an event has neither."""
    from planetary.monitor.picture import write_picture
    from planetary.monitor.report import build_report, write_report
    from planetary.monitor.run_folder import EVENTS, load_history

    if (folder / EVENTS).exists():
        history = load_history(folder)
        write_report(folder, build_report(history))
        write_picture(folder, history)


def failure_of(kind: EndKind, reason: str, folder: Path) -> PlanetaryError:
    """Return the error that a run which did not finish ends with; its class decides the exit code."""
    from planetary.fabric.protocol.records import error_class

    again = f"planetary train --resume {folder}"
    what_next = {
        "compile": f"Progress is saved. Fix the problem, then run: {again}",
        "data": f"Progress is saved. Fix the data, then run: {again}",
        "resource": f"Progress is saved. Free the resource, then run: {again}",
        # Every try from the same state would end the same way, and another learning rate is another run.
        "numerics": f"Finished rounds are saved in {folder}; start a new run with other values",
    }
    return error_class(kind)(f"{reason}. {what_next.get(kind, f'Progress is saved. Continue with: {again}')}")
