"""Names and texts of other machines, as they may be shown: a terminal obeys control characters."""

from __future__ import annotations

import re
import shlex

NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
"""Of workers, nodes, sites and peers."""
NAME_RULE = "1 to 128 of the letters A to Z and a to z, digits and . _ : / -"
"""`NAME` in words."""

_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}(?<!\.)")
_WINDOWS = re.compile(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?")
FOLDER_RULE = (
    "1 to 100 of the letters A to Z and a to z, digits and . _ + = -; the first is a letter or digit, the last no "
    "dot; no device of Windows"
)
"""`is_folder_name` in words."""

# C0 and C1 controls, line and paragraph separators, and marks that change the direction of the text after them.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def is_name(text: str) -> bool:
    """Whether a machine may call itself so."""
    return NAME.fullmatch(text) is not None


def is_folder_name(text: str) -> bool:
    """Whether a folder of this name can be made, and means the same, on every system and in every URL."""
    return _FOLDER.fullmatch(text) is not None and _WINDOWS.fullmatch(text) is None


def as_name(text: str) -> str:
    """Return `text` with "-" for characters a name must not have, shortened, and never empty."""
    return re.sub(r"[^A-Za-z0-9._:/-]", "-", text)[:128] or "-"


def command_line(*words: object) -> str:
    """Return a command of `planetary` a shell takes as it is printed."""
    return shlex.join(["planetary", *map(str, words)])


def one_line(text: str) -> str:
    """Return `text` with every character a terminal would obey written as an escape, as in `repr`."""
    return _UNPRINTABLE.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)
