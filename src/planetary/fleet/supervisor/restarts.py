"""Whether and when a process that ended is started again. Pure."""

from __future__ import annotations

from planetary.machine.redial import pause_before


class Restarts:
    """The restarts of one process: at once after a first failure, then with doubling, bounded pauses."""

    def __init__(
        self,
        who: str,
        *,
        first_s: float,
        limit_s: float,
        healthy_after_s: float,
        final_codes: frozenset[int],
    ) -> None:
        """`final_codes`: exit statuses after which a restart cannot help; 0, a clean exit, always is one.

        A process that lived for `healthy_after_s` seconds had no failed start: the pauses begin anew.
        """
        self._who = who
        self._first_s, self._limit_s = first_s, limit_s
        self._healthy_after_s = healthy_after_s
        self._final_codes = final_codes | {0}
        self._failures = 0

    def pause_after(self, code: int, lived_s: float, *, is_ordered: bool = False) -> float | None:
        """Seconds until the next start after an exit with `code` (negative: a signal); None: no more starts.

        `is_ordered`: the operator asked for the exit, so it is no failure.
        """
        if code in self._final_codes:
            return None
        if is_ordered:
            return 0.0
        self._failures = 1 if lived_s >= self._healthy_after_s else self._failures + 1
        # Most deaths are accidents, and work is waiting.
        if self._failures == 1:
            return 0.0
        return pause_before(self._failures, self._first_s, self._limit_s, self._who)
