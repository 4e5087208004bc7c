"""Sections of a configuration that belong to one kind of run, found by their names.

The table of the built-in ones is `planetary.runs.SECTIONS`. A package adds one with an entry point of the group
`planetary.sections`: name of the section = "module:Struct". A section's module is imported when a configuration has the
section, or when somebody asks for its keys.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, ClassVar, cast

from planetary.core.configuration.section import Section

GROUP = "planetary.sections"
"""Of entry points."""


class KindSection(Section, frozen=True):
    """Base of the sections that a kind of run has.

    Attributes:
        section: name in a file.
        paths: keys whose values are paths, relative to the file's folder.
    """

    section: ClassVar[str]
    paths: ClassVar[tuple[str, ...]] = ()

    @property
    def steps_itself(self) -> bool:
        """Whether the run merges by itself, so that each absent key of `[outer]` is that of a short run."""
        return False

    @property
    def ended_by_another(self) -> bool:
        """Whether another run ends this one, which goes on until then."""
        return False

    @property
    def merges_other_runs(self) -> bool:
        """Whether the run's parameters are merged with those of other runs."""
        return False

    def mathematics(self) -> dict[str, Any]:
        """Return the keys that decide the mathematics of a run, with their values."""
        return {}


def section_names() -> tuple[str, ...]:
    """Return the names of all sections of kinds."""
    return tuple(_places())


@functools.cache
def section_struct(name: str) -> type[KindSection]:
    """Return the struct of a section of a kind. Imports its module. Raises `KeyError` for another name."""
    module, _, attribute = _places()[name].partition(":")
    return cast(type[KindSection], getattr(importlib.import_module(module), attribute))


@functools.cache
def _places() -> Mapping[str, str]:
    built_in: Mapping[str, str] = importlib.import_module("planetary.runs").SECTIONS
    return {**{entry.name: entry.value for entry in entry_points(group=GROUP)}, **built_in}
