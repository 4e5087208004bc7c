"""Which of a machine's backends runs a training step fastest, decided from measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

FASTER = 0.05
"""Another backend than the first one is taken only if its step is shorter by this part: less is noise."""


class BackendChoice(msgspec.Struct, frozen=True):
    """A backend and the reason, for people."""

    backend: str
    why: str  # e.g. "cpu 92 ms, pjrt:cpu 164 ms a step: taking cpu"


def choose_backend(
    candidates: Sequence[str], times: Mapping[str, Sequence[float]], failures: Mapping[str, str]
) -> BackendChoice:
    """Return the backend with the shortest step; the first candidate that works, unless another is 5 % faster.

    Args:
        candidates: in order of preference.
        times: milliseconds of single steps, by backend; the shortest counts, since other load only adds.
        failures: why a backend has no times.
    """
    least = {backend: min(times[backend]) for backend in candidates if times.get(backend)}
    if not least:
        why = "; ".join(f"{backend}: {failures[backend]}" for backend in candidates if backend in failures)
        return BackendChoice(candidates[0], f"no backend could be measured ({why}): taking {candidates[0]}")
    first = next(backend for backend in candidates if backend in least)
    fastest = min(least, key=lambda backend: least[backend])
    chosen = fastest if least[fastest] < (1 - FASTER) * least[first] else first
    said = ", ".join(f"{backend} {_milliseconds(least[backend])}" for backend in candidates if backend in least)
    missing = "".join(f"; {b}: {failures[b]}" for b in candidates if b in failures and b not in least)
    return BackendChoice(chosen, f"{said} a step: taking {chosen}{missing}")


def _milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"
