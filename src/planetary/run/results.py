"""The files a run leaves for people, and the error that an unfinished run ends with."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING

from planetary.artifacts.checkpoint import list_checkpoints
from planetary.core.errors import PlanetaryError, ResourceError
from planetary.core.printable import command_line
from planetary.fleet.gateway.run_files import CHECKPOINTS, has_run
from planetary.runs.rounds.training_status import TrainingReader

if TYPE_CHECKING:
    from planetary.fleet.protocol.events import Finish
    from planetary.fleet.protocol.records import EndKind
    from planetary.monitor.run_folder import RunHistory

log = logging.getLogger(__name__)


def write_results(folder: Path) -> None:
    """Write report.json and loss.png of the run so far; a run without an event has neither. Of rewards: reward.png.

    Without matplotlib there is no picture, and a warning that names it: the run's results must not depend on it.
    """
    from planetary.monitor.report import build_report, write_report
    from planetary.monitor.run_folder import EVENTS, load_history

    if (folder / EVENTS).exists():
        history = load_history(folder)
        write_report(folder, build_report(history))
        try:
            picture_run(folder, history)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            log.warning(
                "no picture was drawn, as matplotlib is not installed (pip install 'planetary-compute[cli]'); "
                "`planetary report %s` draws it later",
                folder,
            )


def picture_run(folder: Path, history: RunHistory) -> Path:
    """Draw the picture of the run's kind, or loss.png; return the path.

    Raises:
        ResourceError: it cannot be written.
    """
    from planetary.monitor.picture import write_figures, write_picture

    picture = reader.picture if isinstance(reader := history.reader, TrainingReader) else None
    return write_picture(folder, history) if picture is None else write_figures(folder, history, picture)


async def results_after(running: Awaitable[Finish], folder: Path, again: str = "") -> Finish:
    """Write a run's report and picture, and return how it ended; a failed run's error is raised before any other.

    `again`: command that resumes the run; "": `planetary train`.
    """
    try:
        end = await running
    except BaseException as error:
        with contextlib.suppress(PlanetaryError):  # such as a full disk, which would replace `error`
            write_results(folder)
        if isinstance(error, ResourceError):
            raise resumable(error, folder, again) from error
        raise
    write_results(folder)
    return end


def resumable(error: ResourceError, folder: Path, again: str = "") -> ResourceError:
    """Return the error with the command that resumes the run in `folder` once the missing resource is there."""
    if not has_run(folder):
        return error
    entries = list_checkpoints(folder / CHECKPOINTS)
    kept = f"The newest checkpoint is of round {entries[-1].round}" if entries else "No round has a checkpoint yet"
    return ResourceError(f"{error}. {kept}. Mend that, then run: {again or command_line('train', '--resume', folder)}")


def failure_of(kind: EndKind, reason: str, folder: Path, again: str = "") -> PlanetaryError:
    """Return the error that a run which did not finish ends with; the class decides the exit code.

    `again`: command that resumes the run; "": `planetary train`.
    """
    from planetary.fleet.protocol.records import error_class

    again = again or command_line("train", "--resume", folder)
    what_next = {
        "compile": f"Progress is saved. Fix the problem, then run: {again}",
        "data": f"Progress is saved. Fix the data, then run: {again}",
        "resource": f"Progress is saved. Free the resource, then run: {again}",
        # Every try from the same state would end the same way, and another learning rate is another run.
        "numerics": f"Finished rounds are saved in {folder}; start a new run with other values",
    }
    return error_class(kind)(f"{reason}. {what_next.get(kind, f'Progress is saved. Continue with: {again}')}")
