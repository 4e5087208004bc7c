"""Another training step for a run under way: the request, how far it is, and the keys that it may change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec

from planetary.core.config import apply_overrides, overrides_between
from planetary.core.configuration.schema import Config
from planetary.core.configuration.step_options import ComputeOptions, UpdateOptions
from planetary.core.errors import ConflictError, UserError

if TYPE_CHECKING:
    from planetary.fleet.gateway.gateway import Gateway

STEP_KEYS = {
    "model": None,
    "optimizer": {"name", *UpdateOptions.__struct_fields__},
    "train": set(ComputeOptions.__struct_fields__),
}
"""Keys by section that decide a training step; None: all of the section."""
BEFORE = "before"
"""In place of a digest: the step before the one in use."""


class StepWanted(msgspec.Struct, frozen=True, kw_only=True):
    """A training step a run is to go on with.

    Attributes:
        overrides: "section.key=value" of its configuration; none: the model is exported again from its files.
        back_to: digest, or its beginning, of the earlier step that it goes back to; "": it is a new one.
        by: name of the token.
        why: for the journal.
    """

    overrides: tuple[str, ...] = ()
    back_to: str = ""
    by: str = ""
    why: str = ""


class RollOut(msgspec.Struct, frozen=True):
    """The last training step that was to replace the run's, since this gateway began.

    Attributes:
        state: "": there was none; "verified": it waits for the moment at which steps change.
        step: digest; "": it is not made yet.
        overrides, by, why: as of `StepWanted`.
        reason: that it was refused for.
    """

    state: Literal["", "preparing", "verified", "in use", "refused"] = ""
    step: str = ""
    overrides: tuple[str, ...] = ()
    by: str = ""
    why: str = ""
    reason: str = ""


@runtime_checkable
class RollsOut(Protocol):
    """A kind's own object of a run whose training step can be replaced while it goes on."""

    @property
    def stage(self) -> RollOut:
        """Of the last replacement since this gateway began."""
        ...

    def roll_out(self, wanted: StepWanted) -> None:
        """Begin to replace the training step. Raises `ConflictError`, `UserError`."""
        ...


def steps_of(gateway: Gateway[Any]) -> RollsOut:
    """Return the run of a gateway, whose training step can be replaced. Called on the event loop.

    Raises:
        ConflictError: a run of this kind, or in this state, has none that can be replaced.
    """
    if gateway.parts is None or gateway.ended_at is not None:
        raise ConflictError(
            "the run is being prepared, or over: it has no training step that could be replaced", code="no_step"
        )
    if not isinstance(gateway.parts.run, RollsOut):
        raise ConflictError(
            f"{gateway.setup.compiles} of this run cannot be replaced: only a run on data has one that can",
            code="step_fixed",
        )
    return gateway.parts.run


def stage_of(gateway: Gateway[Any]) -> RollOut:
    """Return the stage of the last training step that was to replace the run's."""
    run = None if gateway.parts is None else gateway.parts.run
    return run.stage if isinstance(run, RollsOut) else RollOut()


def changed_config(config: Config, overrides: Sequence[str]) -> Config:
    """Return a configuration whose training step is another one. Raises `UserError` for keys that do not decide it."""
    changed = apply_overrides(config, overrides)
    changes = [setting.partition("=")[0] for setting in overrides_between(config, changed)]
    if others := [key for key in changes if not _decides(*key.partition(".")[::2])]:
        raise UserError(
            f"{', '.join(others)}: no part of the training step, so that a roll-out cannot change it; "
            "expected keys of [model], of [optimizer] but for the learning rate's, and train."
            f"{', train.'.join(sorted(ComputeOptions.__struct_fields__))}. Stop the run, and resume it with --set"
        )
    return changed


def _decides(section: str, key: str) -> bool:
    known: Any = STEP_KEYS.get(section, set())
    return known is None or key in known
