"""What a mixture waits for when it does not go on, told to people once it takes long."""

from __future__ import annotations

from collections.abc import Iterable

from planetary.fabric.protocol.records import Stalled
from planetary.moe.controller.mixture_desk import MixtureDesk
from planetary.moe.controller.mixture_rounds import Composing


def what_is_missing(desk: MixtureDesk, composing: Iterable[Composing], *, waits_for: str, all_steps_taken: bool) -> str:
    """Return what a run cannot go on without, or "".

    Args:
        desk: of the run.
        composing: the live composers.
        waits_for: what there is to say of workers that are not ready.
        all_steps_taken: whether only saving is left.
    """
    by_shard = {one.shard: one for one in composing}
    missing = [n for n in range(desk.policy.composers) if n not in by_shard]
    if missing:
        return f"nobody composes shard {', '.join(map(str, missing))}: {waits_for}"
    unsaved = [n for n, shard in enumerate(desk.state.shards) if shard.progress < desk.policy.plan.steps]
    if unsaved and all_steps_taken:
        whose = ", ".join(f"{n} ({by_shard[n].worker})" for n in unsaved)
        return f"all steps are taken; waiting for the last state of shard {whose}"
    return ""


class Stalls:
    """Times are monotonic seconds."""

    def __init__(self, desk: MixtureDesk, now: float) -> None:
        """Nothing is missing."""
        self._desk, self.why = desk, ""
        self._since, self._told = now, False

    def look(self, why: str, now: float) -> None:
        """Take what is missing now; what has been missing for the grace time goes into the journal once."""
        self.why = why
        if not why:
            self._since, self._told = now, False
        elif not self._told and now >= self._since + self._desk.policy.grace_s:
            self._told = True
            self._desk.append(Stalled(round=self._desk.state.round + 1, why=why))

    def next_deadline(self) -> float | None:
        """See `core.machine.Machine.next_deadline`."""
        return self._since + self._desk.policy.grace_s if self.why and not self._told else None
