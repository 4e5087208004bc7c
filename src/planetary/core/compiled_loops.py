"""Modules of loops for numba, each with a twin in numpy of the same bits."""

from __future__ import annotations

import importlib
from types import ModuleType


class CompiledLoops:
    """One such module, which `load` imports.

    Importing numba takes a second and 60 MB, and compiling a module's loops for the first time seconds more, so callers
    that have little to do stay with numpy.

    Attributes:
        loaded: the module after `load`; None before, or where numba is not installed.
    """

    def __init__(self, module: str) -> None:
        """`module`: full name."""
        self._name, self.loaded = module, None

    loaded: ModuleType | None

    def load(self) -> ModuleType | None:
        """Import the module, for the rest of this process, and return it; None where numba is not installed."""
        if self.loaded is None:
            try:
                self.loaded = importlib.import_module(self._name)
            except ModuleNotFoundError as error:
                if (error.name or "").split(".")[0] != "numba":
                    raise
        return self.loaded
