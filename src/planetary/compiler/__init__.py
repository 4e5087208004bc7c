"""From a model to a compiled training step. What is named here loads JAX and the compiler only when it is
used.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planetary.compiler.differentiate import differentiate
    from planetary.compiler.export import Model, export_model, load_model
    from planetary.compiler.iree import Artifact, compile_artifact
    from planetary.compiler.targets import Target
    from planetary.compiler.train_step import StepOptions, TrainStep, build_train_step
    from planetary.compiler.verify import verify_artifact

__all__ = [
    "Artifact",
    "Model",
    "StepOptions",
    "Target",
    "TrainStep",
    "build_train_step",
    "compile_artifact",
    "differentiate",
    "export_model",
    "load_model",
    "verify_artifact",
]

_HOMES = {
    "Artifact": "iree",
    "Model": "export",
    "StepOptions": "train_step",
    "Target": "targets",
    "TrainStep": "train_step",
    "build_train_step": "train_step",
    "compile_artifact": "iree",
    "differentiate": "differentiate",
    "export_model": "export",
    "load_model": "export",
    "verify_artifact": "verify",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that has it."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


class _Package(ModuleType):
    """The package, in which `differentiate` is the function although its submodule has the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the import system sets a submodule on its package once it is loaded."""
        if isinstance(value, ModuleType) and name == "differentiate":
            value = vars(value)[name]
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
