"""The adapters of a configuration: put on a model, and begun from a folder."""

from __future__ import annotations

import glob
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from planetary.core.configuration.family import family_of
from planetary.core.configuration.schema import Config
from planetary.core.errors import TrustError, UserError
from planetary.core.tensors import digest_of

if TYPE_CHECKING:
    from planetary.compiler.frontend.export import Model


def with_adapters(model: Model, config: Config) -> Model:
    """Return the model with the adapters of a configuration, if any. Raises `UserError`."""
    from planetary.compiler.frontend.adapters import adapted
    from planetary.compiler.frontend.narrow_base import narrowed

    adapter = config.adapter
    if not adapter.rank:
        return model
    model = adapted(model, rank=adapter.rank, alpha=adapter.alpha, targets=adapter.targets, seed=config.run.seed)
    model = narrowed(model, 8 if adapter.base == "int8" else 4) if adapter.base != "f32" else model
    return _started(model, config) if adapter.start else model


def stored_names(config: Config) -> Callable[[str], str]:
    """Return the function from a tensor's name to the name in the folders of published models."""
    family = family_of(config.model.source, config.model.options)
    return family.stored_name if family is not None else str


def base_digests(model: Model, config: Config) -> dict[str, str]:
    """Return the sha256 of each untrained tensor by stored name, with the values it is trained with."""
    named = stored_names(config)
    return {named(name): digest_of(value) for name, value in model.base.items()}


def _started(model: Model, config: Config) -> Model:
    """Return the model with the adapters of the folder `adapter.start`. Raises `UserError`."""
    from planetary.artifacts.adapter_folder import check_base, read_adapter
    from planetary.compiler.frontend.weights import with_weights

    folder, named = Path(config.adapter.start), stored_names(config)
    wanted = {stored: own for one in model.adapters for own, stored in one.stored_names(named).items()}
    try:
        specs, tensors = read_adapter(folder, wanted)
        check_base(folder, base_digests(model, config))
    except OSError as error:
        raise UserError(f"cannot read adapter.start {folder}: {error.strerror or error}") from error
    except TrustError as error:
        raise UserError(f"cannot read adapter.start: {error}") from error
    others = [glob.escape(a.name) for a in model.manifest.arguments if a.name not in wanted.values()]
    return with_weights(model, specs, tensors, where=str(folder), optional=others)
