"""From what is submitted to the configuration of a run, checked as the gateway's command does."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planetary.core.config import Config, config_from_tables, load_config
from planetary.fabric.preparation.model_shapes import with_model_shapes
from planetary.run.kinds import kind_of
from planetary.site.site_config import ControllerOptions

log = logging.getLogger(__name__)


def config_of_tables(tables: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in tables. Blocks for a moment. Raises `UserError`."""
    return checked(config_from_tables(tables, overrides))


def config_of_file(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in a file of this machine. Blocks for a moment. Raises `UserError`."""
    return checked(load_config(path, overrides))


def config_of_controller(controller: ControllerOptions, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a controller's own job. Blocks for a moment. Raises `UserError`."""
    workers = [] if controller.workers is None else [f"fabric.workers={controller.workers}"]
    return config_of_file(controller.config_path, [*workers, *overrides])


def checked(config: Config) -> Config:
    """Return a configuration with what its model decides; warnings are logged. Raises `UserError`."""
    config = with_model_shapes(config)
    for note in kind_of(config).check(config):
        log.warning("%s", note)
    return config
