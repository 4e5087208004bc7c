"""The keys that `data.fitting` fits to the data, and the changes in words."""

from __future__ import annotations

from planetary.core.config import Config

FITTED = ("train.rounds", "train.inner_steps", "eval.batches", "optimizer.warmup_steps")
"""Keys a run may have smaller than it was given them."""


def changes(given: Config, fitted: Config) -> str:
    """Return the changes of `fit_to_data`, for a display; "" for none."""
    found = []
    for dotted in FITTED:
        section, key = dotted.split(".")
        before, after = (getattr(getattr(config, section), key) for config in (given, fitted))
        if before != after:
            found.append(f"{dotted} is {after} instead of {before}")
    return f"fitted to the data: {', '.join(found)}" if found else ""
