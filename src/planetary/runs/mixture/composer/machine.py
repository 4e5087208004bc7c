"""When a composer publishes, adopts, refreshes and saves, as a pure machine: it sees numbers and never a tensor.

Its driver (`runs.mixture.composer.role`) hands it events and carries out the instructions it answers with. What it
waits for, and in which order it publishes and adopts, is decided by the pace (`runs.mixture.methods.pace`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import chain

from planetary.machine.events import Event, Instruction
from planetary.machine.machine import check_invariants
from planetary.machine.state_table import Table, advance
from planetary.runs.mixture.composer.events import (
    STATE,
    SURROGATES,
    Adopt,
    AskForTokens,
    ConnectionLost,
    EvaluateView,
    ExpertsArrived,
    Fit,
    GrantArrived,
    Keep,
    MergeArrived,
    Publish,
    SketchesAnswered,
    SketchSent,
    SpeakerAssigned,
    StepBoundary,
    StepCompleted,
    StepsReported,
    StoodDown,
    SurrogatesInstalled,
    TakeStep,
    TokensArrived,
    Upload,
    UploadBegun,
    UploadSent,
    UsePayload,
    fragment_upload,
    sketch_upload,
)
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.payloads.shard import HeldFragment, Key
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.training.replicas import held_shards


class ComposerPhase(StrEnum):
    """A composer's state: whether it has a shard, a connection, and steps to take."""

    STANDBY = "standby"  # no shard
    COMPOSING = "composing"
    DETACHED = "detached"  # it trains without a connection; nothing is published or saved
    FINISHED = "finished"  # no step of the run is left; the last state is saved
    FINISHED_DETACHED = "finished detached"  # finished; the last state is saved at the next connection

    @property
    def connected(self) -> bool:
        """Whether messages about the shard count."""
        return self in {ComposerPhase.COMPOSING, ComposerPhase.FINISHED}

    @property
    def finished(self) -> bool:
        """Whether no step of the run is left."""
        return self in {ComposerPhase.FINISHED, ComposerPhase.FINISHED_DETACHED}


GRANTED, RESUMED = "shard granted", "shard resumed"  # shard with the saved state; with the state here
STOOD_DOWN, LOST, ENDED = "stood down", "connection lost", "run ended"

COMPOSER: Table = {
    (ComposerPhase.STANDBY, GRANTED): ComposerPhase.COMPOSING,
    (ComposerPhase.STANDBY, RESUMED): ComposerPhase.COMPOSING,
    (ComposerPhase.STANDBY, STOOD_DOWN): ComposerPhase.STANDBY,
    (ComposerPhase.STANDBY, LOST): ComposerPhase.STANDBY,
    (ComposerPhase.COMPOSING, GRANTED): ComposerPhase.COMPOSING,
    (ComposerPhase.COMPOSING, RESUMED): ComposerPhase.COMPOSING,
    (ComposerPhase.COMPOSING, STOOD_DOWN): ComposerPhase.STANDBY,
    (ComposerPhase.COMPOSING, LOST): ComposerPhase.DETACHED,
    (ComposerPhase.COMPOSING, ENDED): ComposerPhase.FINISHED,
    (ComposerPhase.DETACHED, GRANTED): ComposerPhase.COMPOSING,
    (ComposerPhase.DETACHED, RESUMED): ComposerPhase.COMPOSING,
    (ComposerPhase.DETACHED, STOOD_DOWN): ComposerPhase.STANDBY,
    (ComposerPhase.DETACHED, LOST): ComposerPhase.DETACHED,
    (
        ComposerPhase.DETACHED,
        ENDED,
    ): ComposerPhase.FINISHED_DETACHED,  # in lock step all count alike
    (ComposerPhase.FINISHED, GRANTED): ComposerPhase.COMPOSING,  # an older state: the gateway lost the newest
    (ComposerPhase.FINISHED, RESUMED): ComposerPhase.FINISHED,
    (ComposerPhase.FINISHED, STOOD_DOWN): ComposerPhase.STANDBY,
    (ComposerPhase.FINISHED, LOST): ComposerPhase.FINISHED_DETACHED,
    (ComposerPhase.FINISHED_DETACHED, GRANTED): ComposerPhase.COMPOSING,
    (ComposerPhase.FINISHED_DETACHED, RESUMED): ComposerPhase.FINISHED,
    (ComposerPhase.FINISHED_DETACHED, STOOD_DOWN): ComposerPhase.STANDBY,
    (ComposerPhase.FINISHED_DETACHED, LOST): ComposerPhase.FINISHED_DETACHED,
}


class Chore(StrEnum):
    """Decided at a boundary, done at the first one that allows it."""

    FIT = "fit"
    VIEW = "view"
    SAVE = "save"


class SketchWindow:
    """Flow control of sketches, per layer: a composer's side of `runs.mixture.controller.offload.WaitingSketches`.

    At most a window of sketches of a layer is unanswered: more would be made with experts that are too old when it is
    their turn. With every `ExpertsUpdate` the gateway reports the newest sketch of this connection, and the steps of
    unanswered sketches. Such messages come unasked, too, and the newest stands for those before it, which a slow line
    leaves out; so a composer counts the sketches that wait there and those sent since. In neither set are sketches in
    flight on a lost connection; those of the shard's last owner are among them.

    Only the gateway forgets sketches: an answer may take longer than any number of steps. A step names a sketch. A
    composer that goes back takes steps again, and offers are the same work then (`ExpertWork.key` in `records`).

    Args:
        layers: of the model.
        window: unanswered sketches of each layer, at most.
    """

    def __init__(self, layers: int, window: int) -> None:
        """Start without a connection."""
        self._window = window
        # By layer: steps of sketches in flight on this connection, and of those that wait at the gateway.
        self._sent: list[set[int]] = [set() for _ in range(layers)]
        self._waiting: list[set[int] | None] = [None] * layers  # None: the gateway has not reported yet

    def may_offer(self, layer: int) -> bool:
        """Whether fewer sketches than the window are unanswered."""
        waiting = self._waiting[layer]
        return waiting is not None and len(self._sent[layer] | waiting) < self._window

    def unanswered(self, layer: int) -> set[int]:
        """Return the steps of a layer's sketches without answer, as far as the gateway has reported."""
        return self._sent[layer] | (self._waiting[layer] or set())

    def offered(self, layer: int, step: int) -> None:
        """Count the sketch of a step as in flight."""
        self._sent[layer].add(step)

    def take_report(self, layer: int, arrived: int, waiting: Iterable[int]) -> None:
        """Take a report: sketches up to step `arrived` have come; those of `waiting` have no answer yet."""
        self._sent[layer] = {step for step in self._sent[layer] if step > arrived}
        self._waiting[layer] = set(waiting)

    def forget(self) -> None:
        """Drop all for another connection or shard: no sketch may be sent before the gateway reports."""
        self._sent = [set() for _ in self._sent]
        self._waiting = [None] * len(self._waiting)


class ComposerMachine:
    """A composer, as a pure machine.

    Attributes:
        plan: of the mixture.
        phase: named state; only `handle` changes it.
        shard: that it composes; -1: none.
        epoch: of the grant; messages under another one are stale.
        done: steps the shard has taken.
        held: fragments it takes part in, and their versions.
        speaks: shards whose surrogates it publishes.
        versions: of each shard's surrogates in the bank; -1: none are here.
        fitted_at: progress of the run at the fit of each shard's surrogates.
        expert_versions: by layer whose experts are streamed: the version here; -1: none.
        expert_steps: by such a layer: the newest step whose sketch the experts have learned from.
    """

    def __init__(self, plan: MixturePlan, fragments: Sequence[Key]) -> None:
        """Without a shard yet."""
        self.plan = plan
        self._fragments = tuple(fragments)
        self.phase = ComposerPhase.STANDBY
        self.shard, self.epoch, self.done = -1, 0, 0
        self.held = {key: HeldFragment() for key in fragments}
        composers = plan.training.composers
        self._steps = [0] * composers  # steps of every shard: the gateway's report and later ones
        self._steps_confirmed = False  # no step was taken since that report
        self._round = 0  # newest round of the run whose end has been acted on
        self.speaks: tuple[int, ...] = ()
        self.versions = [-1] * composers
        self.fitted_at = [0.0] * composers
        layers = len(plan.training.expert_optimizer.streamed_layers(plan.model.n_layer))
        self.expert_versions, self.expert_steps = [-1] * layers, [-1] * layers
        self._sketches = SketchWindow(layers, plan.window)
        self._merged: dict[Key, tuple[int, bool]] = {}  # not adopted: version, and whether own values are in it
        self._fit_at = self._saved_at = 0  # steps of the last fit and save that were decided
        self._decided_at = -1  # the step whose publications, fit and saving have been decided
        self._chores: set[Chore] = set()
        self._uploads: Counter[Upload] = Counter()  # uploads still on this machine
        self._tokens_until = plan.most_steps if plan.delivery == "path" else 0  # the first step without tokens
        self._tokens_requested = False

    @property
    def connected(self) -> bool:
        """Whether messages about the shard count."""
        return self.phase.connected

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train of the run."""
        return self.phase.finished

    @property
    def progress(self) -> int:
        """Finished steps of the run: the mean over all shards, as far as is known here.

        The learning rate's schedule, rounds and the end go by it. The others take over steps a composer misses, and one
        that comes back late goes on with the learning rate the others have. All of them are done when the gateway
        reports so.
        """
        return self.plan.steps if self.finished else min(self.plan.steps - 1, self._mean_steps)

    @property
    def seems_done(self) -> bool:
        """Whether no step of the run is left, as far as is known here."""
        return self.finished or self._mean_steps >= self.plan.steps

    @property
    def surrogate_age(self) -> float | None:
        """Steps of the run since the fit of the other shards' surrogates, mean over these shards.

        Negative where their composers had taken more steps; None without surrogates.
        """
        training = self.plan.training
        mine = held_shards(self.shard, training.composers, training.replicas)
        others = [at for shard, at in enumerate(self.fitted_at) if shard not in mine]
        return self.progress - sum(others) / len(others) if self.plan.has_surrogates and others else None

    @property
    def _mean_steps(self) -> int:
        others = sum(steps for shard, steps in enumerate(self._steps) if shard != self.shard)
        return self.plan.pace.run_steps(self.done, others, len(self._steps))

    # --- events -----------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; return the instructions to carry out, in order.

        Raises:
            LocalProtocolError: it cannot happen in this state.
        """
        match event:
            case StepBoundary():
                return self._boundary()
            case GrantArrived():
                self._granted(event)
            case StoodDown():
                self._advance(STOOD_DOWN)
                self.shard = -1
                self._tokens_requested = False
            case ConnectionLost():
                self._lost()
            case SpeakerAssigned():
                self.speaks = event.shards
            case StepsReported():
                self._steps, self._steps_confirmed = list(event.steps), True
            case MergeArrived():
                return self._merge_arrived(event)
            case SurrogatesInstalled():
                self.versions[event.shard] = max(event.version, self.versions[event.shard])
                self.fitted_at[event.shard] = event.progress
            case TokensArrived():
                return self._tokens_arrived(event)
            case ExpertsArrived():
                return self._experts_arrived(event)
            case StepCompleted():
                # Until the gateway reports otherwise, the others are taken to be as fast as this one.
                self.done += 1
                self._steps, self._steps_confirmed = [steps + 1 for steps in self._steps], False
            case SketchesAnswered():
                self._sketches.take_report(event.layer, event.arrived, event.waiting)
            case SketchSent():
                self._sketches.offered(event.layer, self.done)
            case UploadBegun():
                self._uploads[event.what] += 1
            case UploadSent():
                self._uploads[event.what] = max(0, self._uploads[event.what] - 1)
        return []

    def _advance(self, event: str) -> None:
        self.phase = ComposerPhase(advance(COMPOSER, self.phase, event))

    def _granted(self, event: GrantArrived) -> None:
        self._advance(RESUMED if event.held is None else GRANTED)
        self.shard, self.epoch = event.shard, event.epoch
        self.speaks = (event.shard,) if event.speaks is None else event.speaks
        self._chores.add(Chore.SAVE)
        self._tokens_requested = False
        # Alone it took the others to be as fast as itself, and may have believed that rounds had ended.
        self._round = min(self._round, self._round_of_run)
        if event.held is None:
            return
        if self.plan.delivery == "gateway":
            self._tokens_until = event.step
        self.done = self._decided_at = self._fit_at = self._saved_at = event.step
        mine = [key for key in self._fragments if self.plan.takes_part(event.shard, key)]
        self.held = {key: event.held.get(key, HeldFragment()) for key in mine}
        self._merged.clear()  # it gets the newest of everything with the shard
        self._chores = {Chore.SAVE}
        self._round = self._round_of_run
        self.expert_versions = [-1] * len(self.expert_versions)  # the gateway sends the newest
        self.expert_steps = [event.step - 1] * len(self.expert_steps)
        self._sketches.forget()

    def _lost(self) -> None:
        self._advance(LOST)
        self._uploads.clear()
        self._tokens_requested = False
        self._sketches.forget()
        for held in self.held.values():
            held.again = held.published is not None

    def _merge_arrived(self, event: MergeArrived) -> list[Instruction]:
        held = self.held.get(event.key)
        if held is None:
            return []
        if event.version == held.base and held.published is not None:
            held.again = True
        if event.version <= max(held.base, self._merged.get(event.key, (0, False))[0]):
            return []
        self._merged[event.key] = event.version, self.shard in event.shards
        return [UsePayload()]

    def _tokens_arrived(self, event: TokensArrived) -> list[Instruction]:
        if event.shard != self.shard or event.first != self._tokens_until:
            return []
        self._tokens_requested = False
        self._tokens_until += event.count
        return [UsePayload()]

    def _experts_arrived(self, event: ExpertsArrived) -> list[Instruction]:
        self.expert_steps[event.layer] = max(event.step, self.expert_steps[event.layer])
        # An older version counts, too: the gateway may have lost the newest records with the machine.
        if event.version == self.expert_versions[event.layer]:
            return []
        self.expert_versions[event.layer] = event.version
        return [UsePayload()]

    def unanswered_sketches(self, layer: int) -> set[int]:
        """Return the steps of a layer's sketches without answer yet; see `SketchWindow`."""
        return self._sketches.unanswered(layer)

    def may_offer(self, layer: int) -> bool:
        """Whether to make a sketch of a layer in the step under way: not while too many are not answered."""
        if not self.connected or self._is_sending(sketch_upload(layer)):
            return False
        return self.plan.pace.may_offer(self._sketches.may_offer(layer))

    # --- decisions --------------------------------------------------------------------------------------------

    @property
    def composes(self) -> bool:
        """Whether it has all that a step needs."""
        here = -1 not in self.expert_versions and (not self.plan.has_surrogates or -1 not in self.versions)
        return self.shard >= 0 and here

    def _boundary(self) -> list[Instruction]:
        if self.phase is ComposerPhase.STANDBY:
            return []
        confirmed = self.connected and self._steps_confirmed
        if not self.finished and self.seems_done and self.plan.pace.may_finish(confirmed):
            self._advance(ENDED)
        if self.plan.pace.blocked_by(self._missing_experts()):
            return []
        found = self.plan.pace.exchange(self._adopt, self._due)
        if Chore.FIT in self._chores and not self.plan.pace.blocked_by(self._missing_merges(Tier.EXPERTS)):
            self._chores.remove(Chore.FIT)
            found.append(Fit())
        may_save = self.connected and self.composes and not self._is_sending(STATE)
        if Chore.SAVE in self._chores and may_save and not self.waits_for():
            found += [EvaluateView(), Keep()] if Chore.VIEW in self._chores else [Keep()]
            self._chores -= {Chore.VIEW, Chore.SAVE}
        found += self._ask_for_tokens()
        if self.composes and not self.seems_done and self.done < self._tokens_until and not self.waits_for():
            found.append(TakeStep())
        return found

    def _is_sending(self, what: Upload) -> bool:
        return self.plan.pace.skips_upload(self._uploads[what])

    @property
    def _round_of_run(self) -> int:
        return self.progress // self.plan.steps_per_round

    def waits_for(self) -> str:
        """Return the reason for which a composer waits before the next step; "": none."""
        missing = chain(self._missing_experts(), self._missing_merges(*Tier), self._missing_surrogates())
        return self.plan.pace.blocked_by(missing)

    def _missing_experts(self) -> Iterator[str]:
        """Yield a word for expert workers' answers to the last step that are not here."""
        if any(step < self.done - 1 for step in self.expert_steps):
            yield "expert workers"

    def _missing_merges(self, *tiers: Tier) -> Iterator[str]:
        """Yield the fragments of some tiers published at this step and whose merges have not arrived."""
        for key, held in self.held.items():
            if key[0] in tiers and held.published == self.done and key not in self._merged:
                yield f"the merge of {key[0]} fragment {key[1]}"

    def _missing_surrogates(self) -> Iterator[str]:
        """Yield the shards whose surrogates of the refresh that is due at this step have not arrived."""
        if self.plan.has_surrogates and self.done and self.plan.training.cadence.refresh_due(self.done):
            yield from (f"the surrogates of shard {n}" for n, step in enumerate(self.versions) if step < self.done)

    def _due(self) -> list[Instruction]:
        if self._decided_at >= self.done and not (self.composes and self._round_of_run > self._round):
            return []
        self._decided_at = self.done
        found: list[Instruction] = []
        cadence, plan = self.plan.training.cadence, self.plan
        refresh = cadence.refresh_due(self.done)
        may_fit = self.done > self._fit_at and self.speaks and not self._is_sending(SURROGATES)
        if plan.has_surrogates and refresh and may_fit:
            self._fit_at = self.done
            if plan.pace.fits_after_merges(plan.training.replicas):
                self._chores.add(Chore.FIT)
            else:
                found.append(Fit())
        if self.connected and plan.training.composers > 1:
            copies = [key for key in self.held if key[0] is Tier.EXPERTS] if refresh else []
            for key in (*cadence.due(self.done), *copies):
                held = self.held.get(key)
                if held is None or self.done <= held.since or key in self._merged:
                    continue
                if self._is_sending(fragment_upload(key[0].value, key[1])):
                    continue
                if held.published is None or held.again:
                    held.published, held.again = self.done, False
                    found.append(Publish(key, held.base, self.done - held.since))
        ends_round, self._round = self._round_of_run > self._round, max(self._round_of_run, self._round)
        if ends_round and self.connected and plan.views_due(self._round):
            # Before the state is saved, which may finish the round.
            if plan.pace.views_at_round_end:
                found.append(EvaluateView())
            else:
                self._chores.add(Chore.VIEW)
        if ends_round or (refresh and self.done > self._saved_at):
            self._saved_at = self.done
            self._chores.add(Chore.SAVE)
        return found

    def _ask_for_tokens(self) -> list[Instruction]:
        """Ask for half of the steps that may be ahead, so the rest lasts while they are under way."""
        ahead, plan = self._tokens_until - self.done, self.plan
        count = min(plan.steps_ahead - ahead, plan.most_steps - self._tokens_until)
        if not self.connected or self._tokens_requested or self.finished or count <= 0 or ahead > plan.steps_ahead // 2:
            return []
        self._tokens_requested = True
        return [AskForTokens(self._tokens_until, count)]

    def _adopt(self) -> list[Instruction]:
        found: list[Instruction] = []
        for key, (version, counted) in list(self._merged.items()):
            held = self.held[key]
            carry = counted and version == held.base + 1 and held.published is not None
            since = held.published if carry and held.published is not None else self.done
            found.append(Adopt(key, version, carry and since < self.done))
            self.held[key] = HeldFragment(version, since)
            del self._merged[key]
        return found

    # --- invariants -------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise `LocalProtocolError` with every invariant that this composer violates."""
        check_invariants(f"the composer of shard {self.shard}", self._invariants())

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        plan, done = self.plan, self.done
        composers, most = plan.training.composers, plan.most_steps
        has_shard = self.phase is not ComposerPhase.STANDBY
        yield has_shard == (0 <= self.shard < composers), f"{self.phase!s} with shard {self.shard} of {composers}"
        yield 0 <= done <= most, f"{done} steps taken of at most {most}"
        yield len(self._steps) == composers, f"{len(self._steps)} shards reported of {composers}"
        decided = max(self._decided_at, self._fit_at, self._saved_at)
        yield decided <= done, f"it decided about step {decided} after {done} steps"
        yield self._round <= plan.steps // plan.steps_per_round, f"round {self._round} has ended in a shorter run"
        for key, held in self.held.items():
            name = f"{key[0]} fragment {key[1]}"
            yield key in self._fragments, f"{name} is none of this mixture's"
            yield 0 <= held.since <= done, f"{name} is trained since step {held.since}, after {done} steps"
            published = held.published
            yield published is None or held.since < published <= done, f"{name} was published at step {published}"
            yield not held.again or published is not None, f"{name} is published again and never was"
            yield not has_shard or plan.takes_part(self.shard, key), f"{name} is of experts that it does not own"
        for key, (version, _) in self._merged.items():
            base = self.held[key].base if key in self.held else version
            yield version > base, f"the merge of {key[0]} fragment {key[1]} to version {version} is not newer"
        if has_shard:
            owned = held_shards(self.shard, composers, plan.training.replicas)
            yield set(self.speaks) <= set(owned), f"it speaks for shards {self.speaks} and holds {tuple(owned)}"
            yield done <= self._tokens_until, f"step {done} was taken, tokens are here until {self._tokens_until}"
        yield self.connected or not self._tokens_requested, "tokens are requested without a connection"
        yield all(count >= 0 for count in self._uploads.values()), f"uploads are counted below 0: {dict(self._uploads)}"
