"""Surrogates that come and go beside a composer's steps: whatever happens meanwhile, versions and bases stay right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixture_stage import MixtureStage, make_plan
from moe_support import TINY, Later, train
from msgspec.structs import replace

from planetary.artifacts.packed_arrays import Packed
from planetary.core.errors import RemoteProtocolError, TrustError
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.composer.events import ConnectionLost, GrantArrived, SpeakerAssigned, StepCompleted
from planetary.runs.mixture.composer.machine import ComposerMachine
from planetary.runs.mixture.composer.surrogate_traffic import Installed, Ready, Refreshed, SurrogateTraffic
from planetary.runs.mixture.methods.surrogate import surrogate_message
from planetary.runs.mixture.payloads.surrogates import empty_bank, install
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.training.composer import ComposerSteps
from planetary.runs.mixture.training.participant_states import ComposerState

COPIES = {"rank": TINY.n_hidden, "refresh_form": "4bit"}


class Composer:
    """A composer's surrogates with nothing around them; a background does nothing before it is told to."""

    def __init__(self, plan: MixturePlan, steps: ComposerSteps, shard: int, background: Later | None = None) -> None:
        self.machine = ComposerMachine(plan, [])
        self.background = background
        self.left: list[Ready | Exception] = []
        self.said: list[tuple[mm.PublishSurrogates, Packed]] = []
        self.traffic = SurrogateTraffic(
            plan, steps, self.machine, self._tell, background=background, leave=self.left.append
        )
        self.connect(shard)

    def _tell(self, type_: Any, kind: str = "", pack: Any = None, /, **fields: Any) -> None:
        self.said.append((type_(shard=self.machine.shard, epoch=self.machine.epoch, **fields), pack()))

    def connect(self, shard: int) -> None:
        self.speak_for((shard,))
        self.machine.handle(GrantArrived(shard, self.machine.epoch + 1, self.machine.done))

    def speak_for(self, shards: tuple[int, ...]) -> None:
        self.traffic.speak_for(shards)
        self.machine.handle(SpeakerAssigned(shards))

    def disconnect(self) -> None:
        self.machine.handle(ConnectionLost())
        self.traffic.disconnected()

    def steps_until(self, done: int) -> None:
        while self.machine.done < done:
            self.machine.handle(StepCompleted())

    def take(self) -> None:
        """What the boundary between two steps does."""
        while self.left:
            found = self.left.pop(0)
            if isinstance(found, Exception):
                raise found
            self.traffic.ready(found)

    def settle(self) -> None:
        assert self.background is not None
        self.background.run()
        self.take()

    def shows(self, sender: Composer, shard: int) -> bool:
        """Whether it has a shard's surrogates with the bits of their sender's bank."""
        pairs = [*zip(self.traffic.bank.a, sender.traffic.bank.a, strict=True)]
        pairs += [*zip(self.traffic.bank.b, sender.traffic.bank.b, strict=True)]
        mine = np.asarray(self.machine.plan.owner_map[0] == shard)
        return all((here[mine] == there[mine]).all() for here, there in pairs)


class Pair:
    """A composer of shard 0 that takes surrogates in the background, and one of shard 1 that does so at once."""

    def __init__(self, folder: Path, **options: Any) -> None:
        trainer, states, _ = train(6, **options)
        self.plan, self.steps = make_plan(folder, steps=40, **options), trainer.steps
        self.states = states
        self.background = Later()
        self.here = Composer(self.plan, self.steps, 0, self.background)
        self.there = Composer(self.plan, self.steps, 1)
        self.refresh(self.there, 1, 1)
        self.refresh(self.here, 0, 1)
        self.here.settle()
        self.relay(self.there.said[-1])
        self.here.settle()

    def state(self, shard: int, step: int) -> ComposerState:
        return self.states[step].composers[shard]

    def refresh(self, composer: Composer, shard: int, step: int) -> None:
        """Begin to fit after a step."""
        composer.steps_until(step)
        composer.traffic.fit(self.state(shard, step))

    def relay(self, said: tuple[mm.PublishSurrogates, Packed]) -> None:
        """Bring what was published to the composer here, as the gateway does."""
        one, data = said
        known = {name: getattr(one, name) for name in ("step", "progress", "payload", "change", "base")}
        self.here.traffic.received(mm.SurrogatesReady(shard=one.of, **known), data)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path, **COPIES)


def test_only_changed_layers_are_copied_and_banks_in_use_stay(tmp_path: Path) -> None:
    """Only layers with news are copied and a bank that steps compute with never changes."""
    plan = make_plan(tmp_path, steps=4, **COPIES)
    plan = replace(plan, model=replace(plan.model, n_layer=2), owners=plan.owners * 2)
    before = empty_bank(plan)
    ones = np.ones(before.a[1].shape[1:], np.float32)
    after = install(before, [surrogate_message(1, 2, owner=0, version=3, a=ones, b=ones.T)], plan)
    assert (after.a[0] is before.a[0], after.b[0] is before.b[0]) == (True, True)
    assert (after.a[1][2] == 1).all()
    assert not before.a[1].any()
    assert not before.b[1].any()
    assert (before.versions == -1).all()
    assert install(after, [surrogate_message(1, 2, owner=0, version=3, a=ones, b=ones.T)], plan).a[1] is after.a[1]


@pytest.mark.slow
def test_the_steps_thread_only_swaps_the_bank(pair: Pair) -> None:
    bank, before = pair.here.traffic.bank, [x.copy() for x in pair.here.traffic.bank.a]
    pair.refresh(pair.there, 1, 3)
    pair.relay(pair.there.said[-1])
    assert (pair.here.left, pair.here.traffic.bank is bank) == ([], True)
    pair.background.run()
    assert pair.here.traffic.bank is bank  # steps go on with it
    assert pair.here.machine.versions == [1, 1]
    assert all((x == y).all() for x, y in zip(bank.a, before, strict=True))
    pair.here.take()
    assert pair.here.machine.versions == [1, 3]
    assert pair.here.shows(pair.there, 1)


@pytest.mark.slow
def test_waiting_changes_are_merged_in_order(pair: Pair) -> None:
    for step in (2, 3, 4):
        pair.refresh(pair.there, 1, step)
        pair.relay(pair.there.said[-1])
    assert all(one.change for one, _ in pair.there.said[-3:])
    pair.here.settle()
    assert pair.here.machine.versions == [1, 4]
    assert pair.here.shows(pair.there, 1)


@pytest.mark.slow
def test_arrivals_during_a_fit_and_the_fit_are_both_in_the_bank(pair: Pair) -> None:
    pair.refresh(pair.here, 0, 3)
    pair.refresh(pair.there, 1, 3)
    pair.relay(pair.there.said[-1])
    pair.background.run(2)  # a layer of the fit, and what has arrived
    assert [type(one) for one in pair.here.left] == [Installed]
    pair.background.run()
    assert [type(one) for one in pair.here.left] == [Installed, Refreshed]
    pair.here.take()
    assert pair.here.machine.versions == [3, 3]
    assert pair.here.shows(pair.there, 1)
    one, _ = pair.here.said[-1]
    assert (one.step, bool(one.change)) == (3, True)
    assert (pair.here.traffic.bank.versions == 3).all()


@pytest.mark.slow
def test_a_refresh_is_skipped_while_one_is_under_way(pair: Pair) -> None:
    pair.refresh(pair.here, 0, 2)
    pair.refresh(pair.here, 0, 3)
    pair.here.settle()
    assert [one.step for one, _ in pair.here.said] == [1, 2]
    pair.refresh(pair.here, 0, 4)
    pair.here.settle()
    assert [one.step for one, _ in pair.here.said] == [1, 2, 4]


@pytest.mark.slow
def test_a_fit_is_newer_than_arrivals_of_its_shard_meanwhile(pair: Pair) -> None:
    """Who spoke for the shard before may have taken more steps."""
    former = Composer(pair.plan, pair.steps, 0)
    former.steps_until(5)
    former.traffic.fit(pair.state(0, 5))
    pair.refresh(pair.here, 0, 3)
    pair.relay(former.said[-1])
    pair.here.settle()
    one, _ = pair.here.said[-1]
    assert (one.step, one.change) == (6, "")
    assert pair.here.machine.versions == [6, 1]
    pair.refresh(pair.here, 0, 4)
    pair.here.settle()
    one, _ = pair.here.said[-1]
    assert (one.step, one.base) == (7, pair.here.said[-2][0].payload)


@pytest.mark.parametrize("ended", [False, True], ids=["under way", "not taken yet"])
def test_fit_for_a_lost_link_is_dropped_and_the_next_is_whole(pair: Pair, ended: bool) -> None:
    """A fit for a connection that is lost is not published and the next one is whole."""
    pair.refresh(pair.here, 0, 3)
    pair.background.run(10 if ended else 0)
    pair.here.disconnect()
    assert bool(pair.here.left) == ended
    pair.here.settle()
    assert [one.step for one, _ in pair.here.said] == [1]
    assert pair.here.machine.versions[0] == 3
    pair.here.connect(0)
    pair.refresh(pair.here, 0, 5)
    pair.here.settle()
    one, _ = pair.here.said[-1]
    assert (one.step, one.change) == (5, "")


def test_a_fit_from_another_connection_is_published_whole(pair: Pair) -> None:
    pair.refresh(pair.here, 0, 3)
    pair.background.run()
    pair.here.disconnect()
    pair.here.connect(0)
    pair.here.take()
    assert [one.step for one, _ in pair.here.said] == [1]
    pair.refresh(pair.here, 0, 5)
    pair.here.settle()
    one, _ = pair.here.said[-1]
    assert (one.step, one.change) == (5, "")


def test_fit_under_way_at_a_new_assignment_is_published_whole(pair: Pair) -> None:
    """The gateway says so where it cannot use a change."""
    pair.refresh(pair.here, 0, 3)
    pair.here.speak_for((0,))
    pair.here.settle()
    one, _ = pair.here.said[-1]
    assert (one.step, one.change) == (3, "")


@pytest.mark.parametrize("ended", [False, True], ids=["under way", "not taken yet"])
def test_replaced_speaker_publishes_nothing(pair: Pair, ended: bool) -> None:
    """No peer knows the fit, so its version does not count."""
    other = Composer(pair.plan, pair.steps, 0)
    other.steps_until(2)
    other.traffic.fit(pair.state(0, 2))
    pair.refresh(pair.here, 0, 3)
    pair.background.run(10 if ended else 0)
    pair.here.speak_for(())
    pair.relay(other.said[-1])
    pair.here.settle()
    assert [one.step for one, _ in pair.here.said] == [1]
    assert pair.here.shows(other, 0)
    assert pair.here.machine.versions[0] == 2


def test_changes_of_a_lost_link_apply_and_later_need_a_whole(pair: Pair) -> None:
    """Changes of a lost connection still apply and later ones need a whole."""
    for step in (2, 3):
        pair.refresh(pair.there, 1, step)
    pair.relay(pair.there.said[-2])
    pair.here.disconnect()
    pair.here.settle()
    assert pair.here.machine.versions[1] == 2
    pair.relay(pair.there.said[-1])
    with pytest.raises(RemoteProtocolError, match="not those which it sent before"):
        pair.here.settle()


def test_a_defect_of_an_arrival_is_raised_at_a_boundary(pair: Pair) -> None:
    bank = pair.here.traffic.bank
    other = Composer(pair.plan, pair.steps, 1)
    other.steps_until(4)
    other.traffic.fit(pair.state(1, 4))
    one, data = other.said[-1]
    damaged = bytearray(data)
    damaged[-4] ^= 1
    pair.relay((one, bytes(damaged)))
    pair.relay((one, data))
    pair.background.run()
    assert [type(left) for left in pair.here.left] == [TrustError]
    with pytest.raises(TrustError, match="is damaged"):
        pair.here.take()
    assert pair.here.traffic.bank is bank


@pytest.mark.slow
def test_composer_pauses_while_arrivals_exceed_the_background(tmp_path: Path) -> None:
    """Each of these is as large as a shard, and would stay in memory."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=400, **COPIES), seed=5)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: min(w.machine.done for w in (a, b)) >= 4)
    (fitting,) = a.threads("fitting")
    fitting.pause()
    cluster.until(lambda: fitting.waiting >= 4)
    done = a.machine.done
    cluster.settle(10.0)
    assert a.machine.done == done
    fitting.resume()
    cluster.until(lambda: a.machine.done > done + 8)
