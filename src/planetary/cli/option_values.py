"""Values of command-line options that need more than `int` or `str`. Each raises `UserError`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from planetary.core.errors import UserError

WORKER_PORT = 8080
"""Port of a gateway that workers connect to, unless it is given."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def key_values(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """Parse `key=value` pairs; a value is JSON if it reads as JSON (`4`, `0.5`, `true`, `[1, 2]`), else
    text.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise UserError(f"{flag} expects KEY=VALUE, found {pair!r}")
        try:
            values[key] = json.loads(text)
        except json.JSONDecodeError:
            values[key] = text
    return values


def seconds(text: str, flag: str) -> float:
    """Parse a duration such as `90s`, `30m`, `24h` or `7d` into seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if not match or float(match[1]) <= 0:
        raise UserError(f"{flag} expects a duration such as 90s, 30m, 24h or 7d, found {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def short_seconds(text: str, flag: str) -> float:
    """Parse a short time such as `80ms`, `2s` or `1.5s` into seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip())
    if not match:
        raise UserError(f"{flag} expects a time such as 80ms or 2s, found {text!r}")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def rate(text: str, flag: str) -> float:
    """Parse a data rate such as `100Mbit`, `1.5Gbit` or `12MB` (a second) into bytes per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]?)(bit|B)(?:/s)?", text.strip())
    if not match or float(match[1]) <= 0:
        raise UserError(f"{flag} expects a rate such as 100Mbit or 12MB, found {text!r}")
    scale = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2]]
    return float(match[1]) * scale / (8 if match[3] == "bit" else 1)


def port(text: str) -> int:
    """Parse a TCP port; a type for `argparse`, which turns the `ValueError` into the message."""
    from planetary.core.configuration.ranges import Port, convert_value

    return convert_value(int(text), Port)
