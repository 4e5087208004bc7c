"""TOML and JSON of other people, parsed within bounds: no text ends the parser, or takes all memory."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

from planetary.core.errors import UserError

MOST_DEPTH = 64
"""Arrays and tables inside each other, and parts of a dotted key."""
MOST_DIGITS = 400
"""Of a number: the largest finite float64 has 309."""

_TOML_STRINGS = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"""|\'\'\'(?:[^\']|\'(?!\'\'))*\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*',
    re.DOTALL,
)
_JSON_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKETS = re.compile(r"[\[\]{}]")
_DOTTED = re.compile(rf"(?:[\w-]+[ \t]*\.[ \t]*){{{MOST_DEPTH},}}")
_NUMBER = re.compile(rf"[0-9_]{{{MOST_DIGITS},}}")


def toml_tables(text: str, origin: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises `UserError` that names `origin` for another text, or one too deep."""
    _check(_TOML_STRINGS.sub("s", text), origin, "TOML")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number or a date may be one, too
        raise UserError(f"{origin} is not valid TOML: {_shown(error)}") from None


def json_value(text: str | bytes, origin: str) -> Any:
    """Return the value of a JSON text in UTF-8. Raises `UserError` as `toml_tables`."""
    try:
        decoded = text if isinstance(text, str) else text.decode()
        check_json(decoded, origin)
        return json.loads(decoded)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin} is not valid JSON: {_shown(error)}") from None


def check_json(text: str, origin: str) -> None:
    """Raise `UserError` for a JSON text of too much depth, or with too long a number."""
    _check(_JSON_STRINGS.sub("s", text), origin, "JSON")


def _check(bare: str, origin: str, form: str) -> None:
    """Check a text whose strings were taken out."""
    depth = 0
    for found in _BRACKETS.finditer(bare):
        depth += 1 if found.group() in "[{" else -1
        if depth > MOST_DEPTH:
            raise UserError(f"{origin} is not valid {form} here: more than {MOST_DEPTH} arrays or tables in each other")
    if _NUMBER.search(bare):
        raise UserError(f"{origin} is not valid {form} here: a number has more than {MOST_DIGITS} digits")
    if form == "TOML" and _DOTTED.search(bare):
        raise UserError(f"{origin} is not valid {form} here: a key has more than {MOST_DEPTH} parts")


def _shown(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__
