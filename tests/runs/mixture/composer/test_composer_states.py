"""The named states of a composer, and the sentences that are true of it after every event."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixture_stage import make_plan

from planetary.core.errors import LocalProtocolError
from planetary.runs.mixture.composer.events import (
    ConnectionLost,
    Event,
    GrantArrived,
    Instruction,
    SpeakerAssigned,
    StepBoundary,
    StepCompleted,
    StepsReported,
    StoodDown,
    SurrogatesInstalled,
)
from planetary.runs.mixture.composer.machine import (
    COMPOSER,
    ENDED,
    GRANTED,
    LOST,
    RESUMED,
    STOOD_DOWN,
    ComposerMachine,
    ComposerPhase,
)
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.payloads.shard import HeldFragment

ROUTER = (Tier.ROUTER, 0)


def validated(machine: ComposerMachine) -> None:
    """Check a composer's machine after each of its events."""
    handle = machine.handle

    def checked(event: Event) -> list[Instruction]:
        found = handle(event)
        machine.validate()
        return found

    machine.handle = checked  # type: ignore[method-assign]


def machine(folder: Path) -> ComposerMachine:
    made = ComposerMachine(make_plan(folder, steps=4, per_round=4), [ROUTER])
    validated(made)
    made.handle(GrantArrived(0, 1, 0, {}))
    for shard in range(2):
        made.handle(SurrogatesInstalled(shard, 0, 0))
    return made


def test_gateway_and_link_events_are_legal_in_every_state() -> None:
    for phase in ComposerPhase:
        for event in (GRANTED, RESUMED, STOOD_DOWN, LOST):
            after = ComposerPhase(COMPOSER[phase, event])
            assert after.connected == (event in {GRANTED, RESUMED})
    assert {phase for phase, event in COMPOSER if event == ENDED} == {ComposerPhase.COMPOSING, ComposerPhase.DETACHED}


def test_a_composers_life_passes_through_every_state(tmp_path: Path) -> None:
    made = machine(tmp_path)
    seen = [ComposerPhase.STANDBY, made.phase]
    events = [
        ConnectionLost(),
        StepCompleted(),
        GrantArrived(0, 2, 1),
        *[StepCompleted()] * 3,
        StepsReported((4, 4)),
        StepBoundary(),
        ConnectionLost(),
        GrantArrived(0, 3, 4),
        GrantArrived(0, 4, 2, {}),
        StoodDown(),
    ]
    for event in events:
        made.handle(event)
        seen += [made.phase] if made.phase is not seen[-1] else []
    assert seen == [
        ComposerPhase.STANDBY,
        ComposerPhase.COMPOSING,
        ComposerPhase.DETACHED,
        ComposerPhase.COMPOSING,
        ComposerPhase.FINISHED,
        ComposerPhase.FINISHED_DETACHED,
        ComposerPhase.FINISHED,
        ComposerPhase.COMPOSING,
        ComposerPhase.STANDBY,
    ]


def test_violated_invariants_of_a_composer_are_named(tmp_path: Path) -> None:
    made = machine(tmp_path)
    made.held[ROUTER] = HeldFragment(base=1, since=0, published=3)
    with pytest.raises(LocalProtocolError, match="in no possible state: router fragment 0 was published at"):
        made.handle(StepBoundary())
    made.held[ROUTER] = HeldFragment(since=9)
    made.done = 17
    with pytest.raises(LocalProtocolError, match="17 steps taken of at most 8") as error:
        made.validate()
    assert "since" not in str(error.value)
    with pytest.raises(LocalProtocolError, match=r"it speaks for shards \(1,\) and holds \(0,\)"):
        made.handle(SpeakerAssigned((1,)))
