"""Keys a kind of run honours: every other key is refused when it has a value, never accepted and ignored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

import msgspec

from planetary.core.errors import UserError

UNDECLARED = "this kind of run has no use for it"
"""Reason of a key a kind declares nothing about."""


class HonouredKeys(msgspec.Struct, frozen=True):
    """Declaration of a kind of run: the keys it honours, and why it has no effect of the others.

    Every key matches `keys` or `without`, or is of another kind's section; `without` counts where several match.

    Attributes:
        kind: name of the kind, in messages.
        keys: "section.key", a pattern such as "train.*", or an array of tables such as "sinks".
        without: key or pattern -> reason; the first match counts.
        passed_on: keys that only the runs which this one leads have an effect of: their configuration is this one's.
    """

    kind: str
    keys: tuple[str, ...]
    without: Mapping[str, str]
    passed_on: tuple[str, ...] = ()

    def why_not(self, key: str, absent: Mapping[str, str]) -> str:
        """Return why the kind has no effect of a key; "" for a key it honours.

        `absent`: reasons for the sections of other kinds, by section.
        """
        for pattern, why in self.without.items():
            if fnmatchcase(key, pattern):
                return why
        if any(fnmatchcase(key, pattern) for pattern in self.keys):
            return ""
        return absent.get(key.partition(".")[0], UNDECLARED)

    def honours(self, key: str, absent: Collection[str]) -> bool:
        """Whether the kind honours a key; `absent`: the sections of other kinds."""
        return not self.why_not(key, dict.fromkeys(absent, UNDECLARED))

    def refuse_others(self, keys: Iterable[str], absent: Mapping[str, str]) -> None:
        """Raise `UserError` with each of a configuration's `set_keys` without effect on the kind.

        `absent`: as of `why_not`.
        """
        if found := {key: why for key in keys if (why := self.why_not(key, absent))}:
            reasons = "; ".join(f"{key}: {why}" for key, why in found.items())
            raise UserError(
                f"a run of the kind {self.kind!r} does not honour keys that are set: {reasons}. Leave them out; "
                "--set SECTION={} leaves out a whole section of the file"
            )
