"""From a model to a compiled training step. What is named here loads JAX and the compiler only when it is
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planetary.compiler.autodiff.differentiate import differentiate
    from planetary.compiler.backends.iree import Artifact, compile_artifact
    from planetary.compiler.backends.targets import Target
    from planetary.compiler.check.verify import verify_artifact
    from planetary.compiler.frontend.export import Model, export_model, load_model
    from planetary.compiler.step.train_step import StepOptions, TrainStep, build_train_step

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
    "Artifact": "backends.iree",
    "Model": "frontend.export",
    "StepOptions": "step.train_step",
    "Target": "backends.targets",
    "TrainStep": "step.train_step",
    "build_train_step": "step.train_step",
    "compile_artifact": "backends.iree",
    "differentiate": "autodiff.differentiate",
    "export_model": "frontend.export",
    "load_model": "frontend.export",
    "verify_artifact": "check.verify",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that has it."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
