"""The entry of processes that other processes start: `python -m planetary.cli.child ROLE FILE`.

The file says all (see `fleet.shell.starts`). The process ends when its parent does.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from planetary.cli.command_table import COMMANDS
from planetary.cli.exit_codes import report_error
from planetary.cli.main import leave, prepare_process


def main(argv: Sequence[str]) -> int:
    """Carry out a role and return the exit code; never raises."""
    prepare_process()
    try:
        role, file = argv
        return int(importlib.import_module(COMMANDS[role].module).start(Path(file)))
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last resort
        return report_error(error, debug=False)


if __name__ == "__main__":
    faulthandler.enable()  # a crash in a library leaves the stacks of all threads in the log
    leave(main(sys.argv[1:]))
