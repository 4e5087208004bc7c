"""The host as a compiler's target: which binaries run here."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
from pathlib import Path

from planetary.runtime.control_group import cpu_quota, free_memory

_ARCHITECTURES = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}

# The lines of /proc/cpuinfo that decide which code a compiler emits for "this" CPU.
_CPUINFO_KEYS = (
    "vendor_id",
    "cpu family",
    "model",
    "flags",
    "Features",
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
)


def architecture() -> str:
    """Return `"x86_64"`, `"aarch64"`, or the system's own name for the architecture."""
    machine = platform.machine().lower()
    return _ARCHITECTURES.get(machine, machine)


def cpu_description(cpuinfo: str) -> str:
    """Return the identifying lines of the text of /proc/cpuinfo, sorted and without repetition.

    Clock rates and the order of the processors do not enter; a machine with two kinds of cores lists both.
    """
    lines = set()
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in _CPUINFO_KEYS:
            lines.add(f"{key.strip()}: {' '.join(sorted(value.split()))}")
    return "\n".join(sorted(lines))


@functools.cache
def host_features() -> str:
    """Return an identifier of this CPU, e.g. `"x86_64-3f2a…"`: binaries tuned for it run where this is
    equal.
    """
    try:
        text = cpu_description(Path("/proc/cpuinfo").read_text())
    except OSError:
        text = _sysctl_description()
    text = text or platform.processor()
    return f"{architecture()}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _sysctl_description() -> str:
    """Return the CPU's brand and optional instructions as macOS names them; empty where there is no
    sysctl.
    """
    try:
        answer = subprocess.run(
            ["/usr/sbin/sysctl", "machdep.cpu", "hw.optional"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "\n".join(sorted(answer.stdout.splitlines()))


@functools.cache
def cpu_name() -> str:
    """Return the name of this machine's CPU for people, e.g. `"AMD EPYC 9B14"`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [line.replace("machdep.cpu.brand_string", "model name") for line in _sysctl_description().splitlines()]
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return platform.processor() or architecture()


def target_features(backend: str, target: str) -> str:
    """Return the features a worker on this machine reports with the target: part of the artifact's key.

    For a CPU: `host_features()` for `"host"`, the architecture for `"baseline"`. GPU targets are complete:
    empty.
    """
    if backend != "cpu":
        return ""
    return host_features() if target == "host" else architecture()


def usable_cores() -> int:
    """Return how many cores this process may use: the affinity's, within the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, cpu_quota() or cores))


def available_memory() -> int | None:
    """Return the bytes that programs can still take without swapping; None where the system does not tell.

    In a control group with a limit they are those the group may still take, where these are fewer.
    """
    found = [one for one in (_free_of_machine(), free_memory()) if one is not None]
    return min(found, default=None)


def _free_of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else 1024 * int(found)
