"""The base of a configuration's sections, in which a wrong name is an error with the nearest one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from planetary.core.errors import did_you_mean


class Section(msgspec.Struct, frozen=True):
    """A section of a configuration."""

    @property
    def objection(self) -> str:
        """Why the keys do not fit together; "": they do."""
        return ""

    if not TYPE_CHECKING:  # a type checker that knew of this would find no wrong name any more

        def __getattr__(self, name: str) -> Any:
            raise unknown_name(type(self).__name__, name, self.__struct_fields__)


def unknown_name(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for an attribute that is none, with the nearest of the known ones."""
    if name.startswith("_"):  # asked for by displays and copies of objects
        return AttributeError(f"{owner} has no {name!r}")
    return AttributeError(f"{owner} has no {name!r}{did_you_mean(name, known)} It has {', '.join(known)}")
