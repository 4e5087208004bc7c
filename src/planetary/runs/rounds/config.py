"""Keys a run in rounds honours in any topology."""

from __future__ import annotations

SECTIONS = (
    *("run.*", "model.*", "adapter.*", "data.*", "train.*", "optimizer.*", "outer.*", "fabric.*"),
    *("checkpoint.*", "eval.*"),
)
"""Sections a run in rounds honours wherever the workers are."""
