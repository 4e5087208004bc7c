"""Quota and memory of this process's control group, which a container sets; versions 1 and 2 of Linux."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

SYSTEM, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes a number of this size where there is none


def cpu_quota(system: Path = SYSTEM, own: Path = OWN) -> int | None:
    """Return how many cores' worth of time this process may use, rounded up; None: no limit, or none is known."""
    quotas = []
    for folder in _folders("cpu", system, own):
        if text := _text(folder / "cpu.max"):
            quota, _, period = text.partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
            quotas.append(max(1, math.ceil(int(quota) / int(period))))
    return min(quotas, default=None)


def free_memory(system: Path = SYSTEM, own: Path = OWN) -> int | None:
    """Return the bytes the group may still take; None: no limit, or none is known.

    Pages of files the system gives back when memory is short count as free.
    """
    found = []
    for folder in _folders("memory", system, own):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
            found.append(max(0, int(limit) - int(used) + _inactive(folder)))
    return min(found, default=None)


def _inactive(folder: Path) -> int:
    lines = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    value = lines.get("total_inactive_file") or lines.get("inactive_file", "0")
    return int(value) if value.isdigit() else 0


def _folders(controller: str, system: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's group and of those above it: the tightest limit counts."""
    for line in _text(own).splitlines():
        _, names, place = (*line.split(":", 2), "", "")[:3]
        if names == "":
            root = system
        elif controller in names.split(","):
            root = next((one for one in (system / names, system / controller) if one.is_dir()), system)
        else:
            continue
        parts = [part for part in place.split("/") if part and part != ".."]
        # In a container the whole path may be the host's, and the root is the group itself.
        yield from (root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
