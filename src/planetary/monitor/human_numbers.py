"""Numbers as people read them: three significant digits and a unit. Plain ASCII, so every terminal can show
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BLOCKS = "▁▂▃▄▅▆▇█"


def count(value: float) -> str:
    """`950`, `12.3k`, `1.84M`, `92.3M`, `1.20B`: a count of things such as tokens or parameters."""
    return _scaled(value, 1000, ("", "k", "M", "B", "T"), "")


def size(nbytes: float) -> str:
    """`950 B`, `12.3 kB`, `26.2 MB`: bytes, in powers of 1000."""
    return _scaled(nbytes, 1000, ("B", "kB", "MB", "GB", "TB", "PB"), " ")


def duration(seconds: float | None) -> str:
    """`0.8 s`, `42 s`, `3:07`, `2:03:07`, `4d 02:03`; `-` when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def brief(seconds: float) -> str:
    """`0.4 ms`, `80 ms`, `3.9 s`, `2:03`: a duration that may be far below a second."""
    return _scaled(1000 * seconds, 1000, ("ms",), " ") if seconds < 1 else duration(seconds)


def rate(bytes_per_s: float) -> str:
    """`100 Mbit/s`, `1.2 Gbit/s`: the rate of a link, from bytes/s."""
    return f"{_scaled(8 * bytes_per_s, 1000, ('bit', 'kbit', 'Mbit', 'Gbit', 'Tbit'), ' ')}/s"


def loss(value: float | None) -> str:
    """Four decimals; `-` when unknown."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.4f}"


def figure(value: float | None) -> str:
    """`0.625`, `12345`: a number without a unit; `-` when unknown."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.5g}"


def percent(fraction: float | None) -> str:
    """`58 %`, `0.4 %`; `-` when unknown."""
    if fraction is None or not math.isfinite(fraction):
        return "-"
    return f"{fraction:.1%}".replace("%", " %") if 0 < abs(fraction) < 0.1 else f"{fraction:.0%}".replace("%", " %")


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` in at most `width` block characters, lowest value lowest; more values than that are
    averaged.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    if len(finite) > width:
        edges = [i * len(finite) // width for i in range(width + 1)]
        finite = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(finite), max(finite)
    span = high - low
    if span == 0:
        return _BLOCKS[0] * len(finite)
    return "".join(_BLOCKS[min(7, int((value - low) / span * 8))] for value in finite)


def _scaled(value: float, base: int, units: Sequence[str], gap: str) -> str:
    if not math.isfinite(value):
        return "-"
    scaled = float(value)
    for unit in units[:-1]:
        digits = _three_digits(scaled)
        if abs(float(digits)) < base:
            # Whole things are shown whole below the first unit.
            return f"{scaled:.0f}{gap}{unit}".rstrip() if unit == units[0] else f"{digits}{gap}{unit}"
        scaled /= base
    return f"{_three_digits(scaled)}{gap}{units[-1]}"


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
