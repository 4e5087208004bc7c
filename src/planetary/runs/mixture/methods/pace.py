"""Whether the participants of a mixture wait for each other, as one object: every decision that depends on it.

`moe.pace` names the object; `MixturePlan.pace` is it. "free": no participant waits, merges and surrogates are used when
they are there. "lockstep": all wait for all, which equals a training in one process bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, TypeVar

import msgspec

from planetary.core.errors import UserError
from planetary.runs.mixture.methods.sketch_pools import RecentSketches, SketchPool, StepSketches
from planetary.runs.mixture.methods.tiers import Cadence

T = TypeVar("T")


class Pace(msgspec.Struct, frozen=True):
    """The decisions; by default no participant waits.

    Attributes:
        unused_keys: keys of `[moe]` that have no effect at this pace.
        works_in_background: whether composers fit, pack and unpack in threads beside their steps.
        views_at_round_end: whether a composer views the model as soon as it ends a round; else with the state it saves
            next.
        publishes_unchanged_fits: whether a refresh publishes expert workers' fits published before: the others wait for
            them.
        sketches_expire: whether sketches no expert worker has begun become too old.
        detects_stuck_composers: whether a composer without a step for long is stuck, and not waiting for another one.
    """

    unused_keys: ClassVar[tuple[str, ...]] = ()
    works_in_background: ClassVar[bool] = True
    views_at_round_end: ClassVar[bool] = False
    publishes_unchanged_fits: ClassVar[bool] = False
    sketches_expire: ClassVar[bool] = True
    detects_stuck_composers: ClassVar[bool] = True

    # --- the configuration ------------------------------------------------------------------------------------

    def check_cadence(self, cadence: Cadence) -> None:
        """Raise `UserError` for horizons that this pace cannot keep."""

    def check_resumable(self) -> None:
        """Raise `UserError` if a run that was stopped cannot be resumed."""

    def quorum(self, composers: int, configured: int) -> int:
        """Return how many publications suffice to merge a fragment once the grace time is over."""
        return configured

    # --- a composer -------------------------------------------------------------------------------------------

    def run_steps(self, done: int, others: int, shards: int) -> int:
        """Return the steps of a run over `shards`: by default the mean over all of them.

        Args:
            done: steps of this composer.
            others: sum of the steps of the other shards' composers.
            shards: of the run.
        """
        return (done + others) // shards

    def may_finish(self, confirmed: bool) -> bool:
        """Whether a composer without remaining steps may end; `confirmed`: by the gateway, since the last step."""
        return confirmed

    def blocked_by(self, missing: Iterable[str]) -> str:
        """Return the first missing item if a composer waits for it, else ""."""
        return ""

    def skips_upload(self, in_flight: int) -> bool:
        """Whether an upload is left out while `in_flight` earlier ones of the kind have not left this machine."""
        return in_flight > 0

    def may_offer(self, has_room: bool) -> bool:
        """Whether to send a sketch; `has_room`: fewer than the window are unanswered."""
        return has_room

    def exchange(self, adopt: Callable[[], list[T]], publish: Callable[[], list[T]]) -> list[T]:
        """Return a boundary's instructions about fragments, in order: adopt merges that have arrived, publish those
        due.
        """
        return [*adopt(), *publish()]

    def fits_after_merges(self, replicas: int) -> bool:
        """Whether surrogates are fitted after the merges of the experts' copies the same step has published."""
        return False

    def holds_back(self, fitted: int, done: int) -> bool:
        """Whether surrogates fitted after step `fitted` wait until a composer at step `done` is there."""
        return False

    # --- expert workers ---------------------------------------------------------------------------------------

    def pool(self, composers: int, refresh: int) -> SketchPool:
        """Return where sketches of all composers become work; `refresh`: steps between two refreshes."""
        return RecentSketches(refresh)

    def made_with(self, current: int, version: int) -> int:
        """Return the version that work made with `version` of the experts counts as, when `current` is the newest."""
        return version

    # --- failures ---------------------------------------------------------------------------------------------

    def end_without_work(self, what: str) -> str:
        """Return why a run ends whose expert workers failed at some work in every attempt; "": it goes on."""
        return ""

    def end_without_composer(self, worker: str, reason: str) -> str:
        """Return why a run ends that has lost a composer; "": it goes on."""
        return ""


class Free(Pace, frozen=True, tag="free"):
    """No participant waits."""


class Lockstep(Pace, frozen=True, tag="lockstep"):
    """All participants wait for all."""

    unused_keys: ClassVar[tuple[str, ...]] = ("window",)
    works_in_background: ClassVar[bool] = False
    views_at_round_end: ClassVar[bool] = True
    publishes_unchanged_fits: ClassVar[bool] = True
    sketches_expire: ClassVar[bool] = False
    detects_stuck_composers: ClassVar[bool] = False

    def check_cadence(self, cadence: Cadence) -> None:
        if cadence.router == 1:
            raise UserError(
                "moe.router_every = 1 in lock step averages gradients inside every step, as bench/parallax.py does in "
                'one process: set router_every, latent_every and backbone_every to at least 2, or moe.pace = "free", '
                "where 1 publishes after every step that finds the last merge done"
            )

    def check_resumable(self) -> None:
        raise UserError(
            'a run with moe.pace = "lockstep" cannot go on: its composers are not all saved after the same step; start '
            "it again"
        )

    def quorum(self, composers: int, configured: int) -> int:
        return composers

    def run_steps(self, done: int, others: int, shards: int) -> int:
        """All are at the same step."""
        return done

    def may_finish(self, confirmed: bool) -> bool:
        """One composer's count is that of all."""
        return True

    def blocked_by(self, missing: Iterable[str]) -> str:
        return next(iter(missing), "")

    def skips_upload(self, in_flight: int) -> bool:
        """The others wait for each of them."""
        return False

    def may_offer(self, has_room: bool) -> bool:
        """The next step waits for the answer to this one's."""
        return True

    def exchange(self, adopt: Callable[[], list[T]], publish: Callable[[], list[T]]) -> list[T]:
        """Merges are of every composer's publication at this step."""
        return [*publish(), *adopt()]

    def fits_after_merges(self, replicas: int) -> bool:
        return replicas > 1

    def holds_back(self, fitted: int, done: int) -> bool:
        """A fit after a step is for the next one."""
        return fitted > done

    def pool(self, composers: int, refresh: int) -> SketchPool:
        return StepSketches(composers)

    def made_with(self, current: int, version: int) -> int:
        """Nothing moves on before work is used, so it is never late."""
        return current

    def end_without_work(self, what: str) -> str:
        return f"no expert worker could improve {what} in any attempt; in lock step all composers wait for them"

    def end_without_composer(self, worker: str, reason: str) -> str:
        return f"composer {worker} was lost ({reason}), and in lock step the others cannot continue"


AnyPace = Free | Lockstep
"""As it travels in a plan."""

PACES: Mapping[str, AnyPace] = {"free": Free(), "lockstep": Lockstep()}
"""By the value of `moe.pace`."""
