"""The user's own files that a configuration names: codecs, rewards, formats and other objects."""

from __future__ import annotations

from planetary.core.configuration.keys import extension_keys, named_objects
from planetary.core.configuration.needs import check_needs
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.core.extension_points import EXTENSION_POINTS
from planetary.core.registry import PinnedFile, file_of, files_of


def own_files(config: Config, origin: str) -> tuple[PinnedFile, ...]:
    """Return the user's files that a run uses. They are run, and what they declare is checked with the rest.

    Raises:
        UserError: a file cannot be loaded, or its class does not go with the rest of the configuration.
    """
    pinned = []
    for key, point, name in named_objects(config):
        if file_of(name) is None:
            continue
        registry = EXTENSION_POINTS[point.kind]
        pinned.append(registry.pin(name))
        if registry.apart:
            continue
        if point.having and not getattr(registry.find(name), point.having):
            raise UserError(f"{origin}: {key} = {name}: expected a {point.kind} that declares {point.having}")
    check_needs(config, origin, extension_keys(config.kinds), own=bool(pinned))
    return files_of(pinned)
