"""Whose code a model is: a site runs a user's code in a separate process."""

from __future__ import annotations

from pathlib import Path


def is_ours(source: str) -> bool:
    """Whether `model.source` names a model of this package."""
    return source.startswith("planetary.")


def has_code(model: Path) -> bool:
    """Whether a model loaded from a folder or file is code of a user, or a graph."""
    from planetary.core.config import load_config
    from planetary.fleet.gateway.run_files import CONFIG

    run = next((one for one in (model, model.parent.parent) if (one / CONFIG).is_file()), None)
    return not is_ours(load_config(run / CONFIG).model.source) if run is not None else model.is_file()
