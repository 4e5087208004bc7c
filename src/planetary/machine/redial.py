"""Pauses between attempts that failed: doubling, bounded, and different for each participant."""

from __future__ import annotations

import zlib


def pause_before(attempt: int, first_s: float, limit_s: float, who: str) -> float:
    """Seconds to wait before attempt number `attempt` (2 = the first repetition).

    Doubles from `first_s` to `limit_s`. The last quarter depends on `who`, so that many participants that failed at
    one moment do not come back at one moment; it is the same in every run, so that machines stay deterministic.
    """
    pause = min(limit_s, first_s * 2.0 ** min(attempt - 2, 60))
    spread = (zlib.crc32(who.encode()) & 0xFFFF) / 0xFFFF
    return pause * (0.75 + 0.25 * spread)
