"""`import pccl` without PCCL: programs run unchanged.

Either start a program with `python -m planetary.compat.pccl script.py arguments…` (or `-m module arguments…`), or put
a file `pccl.py` of two lines beside it:

    from planetary.compat.pccl import install
    install()
"""

from __future__ import annotations

import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from planetary.core.errors import UserError

NAMES = ("pccl", "pccl._pccl", "python.framework.pccl", "python.framework.pccl._pccl")
"""Names that PCCL's programs and its own tests import it by."""


def install() -> None:
    """Let every name in `NAMES` import `planetary.compat.pccl`, in this process."""
    ours = sys.modules["planetary.compat.pccl"]
    for name in NAMES:
        parent = ""
        for part in name.split(".")[:-1]:
            parent = f"{parent}.{part}".lstrip(".")
            if parent not in sys.modules and parent not in NAMES:
                package = types.ModuleType(parent)
                package.__path__ = []  # a module with a `__path__` is a package
                sys.modules[parent] = package
        sys.modules[name] = ours
        if parent and parent not in NAMES:
            setattr(sys.modules[parent], name.rpartition(".")[2], ours)


def run(arguments: Sequence[str]) -> None:
    """Run a program as `python` would, with `pccl` installed: `[script.py, …]` or `["-m", module, …]`.

    Raises:
        UserError: there is no program, or its file does not exist.
    """
    usage = "usage: python -m planetary.compat.pccl script.py ARGUMENTS, or -m MODULE ARGUMENTS"
    if not arguments or arguments[0] in ("-h", "--help") or list(arguments) == ["-m"]:
        raise UserError(usage)
    install()
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = Path(arguments[0])
    if not script.exists():
        raise UserError(f"cannot run {script}: there is no such file; {usage}")
    sys.argv = list(arguments)
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")
