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

from planetary.compiler.frontend.torch_modules import from_torch, torch_function
from planetary.core.errors import UserError

if TYPE_CHECKING:
    from planetary.run.handle import Run

__all__ = ["from_torch", "load_into", "torch_function"]


def load_into(
    module: Any, run: str | os.PathLike[str] | Run, *, checkpoint: str | os.PathLike[str] | None = None
) -> int:
    """Copy trained parameters into a PyTorch module, in place, and return the round that they are of.

    Parameters keep their device and type; buffers stay as they are.

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

    if not isinstance(module, torch.nn.Module):
        raise UserError(f"cannot load weights into {type(module).__name__}: expected a torch.nn.Module")
    folder = Path(getattr(run, "folder", run))  # type: ignore[arg-type]
    found = load_latest(folder / "checkpoints") if checkpoint is None else load_checkpoint(Path(checkpoint))
    parameters = dict(module.named_parameters())
    for kind, names in (
        ("the module has no parameter", sorted(set(found.params) - set(parameters))),
        ("the run trained no parameter", sorted(set(parameters) - set(found.params))),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise UserError(f"cannot load {folder} into this module: {kind} {names[0]!r}{more}")
    for name, value in found.params.items():
        if tuple(parameters[name].shape) != value.shape:
            raise UserError(
                f"cannot load {folder} into this module: {name!r} has shape {list(value.shape)} in the run, "
                f"{list(parameters[name].shape)} in the module"
            )
    with torch.no_grad():
        for name, value in found.params.items():
            parameters[name].copy_(torch.from_numpy(value.copy()))
    return found.info.round
