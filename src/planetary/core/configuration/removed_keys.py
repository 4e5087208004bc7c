"""Keys of earlier versions, and what takes their place."""

from __future__ import annotations

from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "optimizer.nesterov": "momentum is always Nesterov's; another one is an inner optimizer of your own "
    "(docs/extending.md)",
    "optimizer.cooldown_fraction": '"wsd" falls over the last fifth of the run; another curve is a schedule of your '
    "own (docs/extending.md)",
}
"""Key -> why it went, and what takes its place."""
