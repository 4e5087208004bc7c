"""For programs that use PyTorch: modules as models, and trained weights back into a module.

    from planetary.torch import load_into

    net = Net()
    load_into(net, "runs/my-run")

How a module is trained: docs/models.md.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from planetary.compiler.frontend.torch_modules import from_torch, torch_function
from planetary.core.errors import UserError

if TYPE_CHECKING:
    from planetary.run.handle import Run

__all__ = ["from_torch", "load_into", "torch_function"]


def load_into(
    module: Any, run: str | os.PathLike[str] | Run, *, checkpoint: str | os.PathLike[str] | None = None
) -> int:
    """Copy the parameters of a run into a PyTorch module, in place, and return the round they are of.

    Frozen parameters get the values they have in the run. Parameters keep their device and type; buffers stay as they
    are.

    Args:
        module: the `torch.nn.Module` that was trained, or one with the same parameter names and shapes.
        run: the run, or its folder.
        checkpoint: a checkpoint's folder instead of the newest one's.

    Raises:
        UserError: `run` has no checkpoint; or names or shapes differ. The module is as before then.
        TrustError: the checkpoint is damaged.
    """
    torch: Any = importlib.import_module("torch")  # a type checker takes `import torch` here for this very file
    from planetary.artifacts.checkpoint import load_checkpoint, load_latest
    from planetary.core.config import load_config
    from planetary.fleet.gateway.run_files import CONFIG
    from planetary.run.model.trained_model import all_values

    if not isinstance(module, torch.nn.Module):
        raise UserError(f"cannot load weights into {type(module).__name__}: expected a torch.nn.Module")
    folder = Path(getattr(run, "folder", run))  # type: ignore[arg-type]
    found = load_latest(folder / "checkpoints") if checkpoint is None else load_checkpoint(Path(checkpoint))
    parameters = dict(module.named_parameters())
    values = found.params
    if set(parameters) - set(values) and (folder / CONFIG).is_file():  # the run has not trained all of them
        values = all_values(folder, load_config(folder / CONFIG), parameters, values)
    for kind, names in (
        ("the module has no parameter", sorted(set(values) - set(parameters))),
        ("the run has no parameter", sorted(set(parameters) - set(values))),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise UserError(f"cannot load {folder} into this module: {kind} {names[0]!r}{more}")
    for name, value in values.items():
        if tuple(parameters[name].shape) != value.shape:
            raise UserError(
                f"cannot load {folder} into this module: {name!r} has shape {list(value.shape)} in the run, "
                f"{list(parameters[name].shape)} in the module"
            )
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(torch.from_numpy(np.array(value)))
    return found.info.round
