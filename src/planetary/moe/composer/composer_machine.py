"""When a composer publishes, adopts, refreshes and saves, as a pure machine: it sees numbers and never a tensor.

Between two steps its driver (`moe.composer.composer_driver`) tells it what has arrived and asks what to do. What it
waits for, and in which order it publishes and adopts, is decided by the pace (`moe.methods.pace`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec

from planetary.moe.composer.sketch_window import SketchWindow
from planetary.moe.composer.uploads import STATE, SURROGATES, Upload, fragment_upload, sketch_upload
from planetary.moe.methods.tiers import Tier
from planetary.moe.payloads.shard_payload import Held, Key
from planetary.moe.plan.plan import MixturePlan
from planetary.moe.training.replicas import held_shards


class Publish(msgspec.Struct, frozen=True):
    """Publish a fragment as it is now, trained for `steps` steps from version `base`."""

    key: Key
    base: int
    steps: int


class Adopt(msgspec.Struct, frozen=True):
    """Take a merged version of a fragment; `carry`: with the progress that was made since it was published."""

    key: Key
    version: int
    carry: bool


class Fit(msgspec.Struct, frozen=True):
    """Fit the surrogates of the experts that it speaks for and publish them."""


class Keep(msgspec.Struct, frozen=True):
    """Save the shard's state with the gateway."""


class View(msgspec.Struct, frozen=True):
    """Say how the model is seen from here, with surrogates in it."""


class AskForTokens(msgspec.Struct, frozen=True):
    """Ask the gateway for the tokens of `count` steps from `first` on."""

    first: int
    count: int


class Step(msgspec.Struct, frozen=True):
    """Take a step; then tell `stepped`."""


Action = Publish | Adopt | Fit | Keep | View | AskForTokens | Step


class ComposerMachine:
    """See the module."""

    def __init__(self, plan: MixturePlan, fragments: Sequence[Key]) -> None:
        """Without a shard yet."""
        self.plan = plan
        self._fragments = tuple(fragments)
        self.held = {key: Held() for key in fragments}  # with a shard: those that it takes part in
        self.shard, self.epoch, self.done = -1, 0, 0
        self.finished = False  # nothing is left to do of the run
        self._steps = [0] * plan.training.composers  # of every shard: as the gateway said, and those since
        self._just_told = False  # no step was taken since it said them
        self._round = 0  # of the run, whose end has been seen to
        self.speaks: tuple[int, ...] = ()  # shards whose surrogates it publishes
        self.versions = [-1] * plan.training.composers  # of each shard's surrogates; -1: none are here
        self.fitted_at = [0.0] * plan.training.composers  # progress of the run when they were fitted
        self.connected = False
        layers = len(plan.training.expert_optimizer.streamed_layers(plan.model.n_layer))
        self.expert_versions, self.expert_steps = [-1] * layers, [-1] * layers  # of the experts; -1: none are here
        self._sketches = SketchWindow(layers, plan.window)
        self._merged: dict[Key, tuple[int, bool]] = {}  # arrived and not adopted: version, whether mine is in it
        self._fit_at = self._kept_at = 0
        self._looked_at = -1  # the step whose publications, fit and saving have been decided
        self._keep_soon = self._view_soon = self._fit_soon = False
        self._uploads: Counter[Upload] = Counter()  # that have not left this machine
        self._tokens_until = plan.most_steps if plan.delivery == "path" else 0  # the first step without tokens
        self._asked_for_tokens = False

    @property
    def progress(self) -> int:
        """How many steps of the run are done: the mean over its shards, as far as is known here.

        The learning rate's schedule, rounds and the end go by it. What a composer misses the others take over, and who
        comes back late goes on with the learning rate that the others have. All of them are done when the gateway says.
        """
        return self.plan.steps if self.finished else min(self.plan.steps - 1, self._mean_steps)

    @property
    def seems_done(self) -> bool:
        """Whether no step of the run is left, as far as is known here."""
        return self.finished or self._mean_steps >= self.plan.steps

    @property
    def surrogate_age(self) -> float | None:
        """Steps of the run since the surrogates of experts that are not its own were fitted, mean over their shards.

        Negative where whoever fitted them was further on; None where there are none.
        """
        training = self.plan.training
        mine = held_shards(self.shard, training.composers, training.replicas)
        others = [at for shard, at in enumerate(self.fitted_at) if shard not in mine]
        return self.progress - sum(others) / len(others) if self.plan.has_surrogates and others else None

    @property
    def _mean_steps(self) -> int:
        others = sum(steps for shard, steps in enumerate(self._steps) if shard != self.shard)
        return self.plan.pace.run_steps(self.done, others, len(self._steps))

    # --- what happened ----------------------------------------------------------------------------------------

    def told(self, steps: Sequence[int]) -> None:
        """The gateway has said how many steps every shard has taken."""
        self._steps, self._just_told = list(steps), True

    def owns(
        self, shard: int, epoch: int, step: int, held: dict[Key, Held] | None, speaks: Sequence[int] | None = None
    ) -> None:
        """Compose a shard from `step` on; `held` comes with its saved state, None: go on with what is here.

        `speaks`: shards whose surrogates it publishes; default: its own. Only from now on does anything count that is
        sent: before, it would be under an epoch that is over.
        """
        self.shard, self.epoch = shard, epoch
        self.speaks = (shard,) if speaks is None else tuple(speaks)
        self.connected = self._keep_soon = True
        self._asked_for_tokens = False
        # Alone it took the others to be as fast as itself, and may have believed that rounds had ended.
        self._round = min(self._round, self._round_of_run)
        if held is not None:
            if self.plan.delivery == "gateway":
                self._tokens_until = step
            self.done, self._looked_at = step, step
            mine = [key for key in self._fragments if self.plan.takes_part(shard, key)]
            self.held = {key: held.get(key, Held()) for key in mine}
            self._merged.clear()  # it gets the newest of everything with the shard
            self._fit_at = self._kept_at = step
            self._fit_soon = self._view_soon = self.finished = False
            self._round = self._round_of_run
            self.expert_versions = [-1] * len(self.expert_versions)  # the gateway sends the newest
            self.expert_steps = [step - 1] * len(self.expert_steps)
            self._sketches.forget()

    def stands_by(self) -> None:
        """Compose nothing."""
        self.shard = -1

    def disconnected(self) -> None:
        """The connection was lost; what was under way on it may never have arrived."""
        self._uploads.clear()
        self.connected = self._asked_for_tokens = False
        self._sketches.forget()
        for held in self.held.values():
            held.again = held.published is not None

    def merged(self, key: Key, version: int, shards: Sequence[int]) -> bool:
        """A merged version has arrived; return whether it is newer than what is here.

        The version that is here already means that nothing of this composer's is being merged.
        """
        held = self.held[key]
        if version == held.base and held.published is not None:
            held.again = True
        if version <= max(held.base, self._merged.get(key, (0, False))[0]):
            return False
        self._merged[key] = version, self.shard in shards
        return True

    def surrogates(self, shard: int, step: int, progress: float) -> None:
        """A shard's surrogates of a version, fitted at a progress of the run, are in the bank."""
        self.versions[shard] = max(step, self.versions[shard])
        self.fitted_at[shard] = progress

    def tokens(self, shard: int, first: int, count: int) -> bool:
        """Tokens have arrived; return whether they are the next ones."""
        if shard != self.shard or first != self._tokens_until:
            return False
        self._asked_for_tokens = False
        self._tokens_until += count
        return True

    def stepped(self) -> None:
        """A step was taken. Until the gateway says otherwise, the others are taken to be as fast as this one."""
        self.done += 1
        self._steps, self._just_told = [steps + 1 for steps in self._steps], False

    def sends(self, what: Upload) -> None:
        """An upload begins."""
        self._uploads[what] += 1

    def sent(self, what: Upload) -> None:
        """An upload has left this machine."""
        self._uploads[what] = max(0, self._uploads[what] - 1)

    def may_offer(self, layer: int) -> bool:
        """Whether to make a sketch of a layer in the step under way: not while too many are not answered."""
        if not self.connected or self._is_sending(sketch_upload(layer)):
            return False
        return self.plan.pace.may_offer(self._sketches.may_offer(layer))

    def offered(self, layer: int) -> None:
        """The sketch of a layer in the step under way is sent."""
        self._sketches.offered(layer, self.done)

    def answered(self, layer: int, arrived: int, waiting: Sequence[int]) -> None:
        """The gateway has said which sketches of a layer it has and has not answered: see `SketchWindow.told`."""
        self._sketches.told(layer, arrived, waiting)

    def improved(self, layer: int, version: int, step: int) -> bool:
        """Experts of a layer have arrived; return whether they are others than those that are here."""
        self.expert_steps[layer] = max(step, self.expert_steps[layer])
        # An older version, too, is what counts: the gateway may have lost its newest records with its machine.
        other = version != self.expert_versions[layer]
        self.expert_versions[layer] = version
        return other

    # --- what to do -------------------------------------------------------------------------------------------

    @property
    def composes(self) -> bool:
        """Whether it has all that a step needs."""
        here = -1 not in self.expert_versions and (not self.plan.has_surrogates or -1 not in self.versions)
        return self.shard >= 0 and here

    def boundary(self) -> list[Action]:
        """Return what to do now, in order; the last is `Step` unless there is something to wait for."""
        if self.shard < 0:
            return []
        if self.seems_done and self.plan.pace.may_finish(self.connected and self._just_told):
            self.finished = True
        if self.plan.pace.blocked_by(self._missing_experts()):
            return []
        found = self.plan.pace.exchange(self._adopt, self._due)
        if self._fit_soon and not self.plan.pace.blocked_by(self._missing_merges(Tier.EXPERTS)):
            self._fit_soon = False
            found.append(Fit())
        may_keep = self.connected and self.composes and not self._is_sending(STATE)
        if self._keep_soon and may_keep and not self.waits_for():
            found += [View(), Keep()] if self._view_soon else [Keep()]
            self._keep_soon = self._view_soon = False
        found += self._ask_for_tokens()
        if self.composes and not self.seems_done and self.done < self._tokens_until and not self.waits_for():
            found.append(Step())
        return found

    def _is_sending(self, what: Upload) -> bool:
        return self.plan.pace.skips_upload(self._uploads[what])

    @property
    def _round_of_run(self) -> int:
        return self.progress // self.plan.steps_per_round

    def waits_for(self) -> str:
        """Say what a composer waits for before its next step; "" for nothing."""
        missing = chain(self._missing_experts(), self._missing_merges(*Tier), self._missing_surrogates())
        return self.plan.pace.blocked_by(missing)

    def _missing_experts(self) -> Iterator[str]:
        """Yield a word for expert workers' answers to the last step that are not here."""
        if any(step < self.done - 1 for step in self.expert_steps):
            yield "expert workers"

    def _missing_merges(self, *tiers: Tier) -> Iterator[str]:
        """Yield the fragments of some tiers that were published at this step and whose merges have not arrived."""
        for key, held in self.held.items():
            if key[0] in tiers and held.published == self.done and key not in self._merged:
                yield f"the merge of {key[0]} fragment {key[1]}"

    def _missing_surrogates(self) -> Iterator[str]:
        """Yield the shards whose surrogates of the refresh that is due at this step have not arrived."""
        if self.plan.has_surrogates and self.done and self.plan.training.cadence.refresh_due(self.done):
            yield from (f"the surrogates of shard {n}" for n, step in enumerate(self.versions) if step < self.done)

    def _due(self) -> list[Action]:
        if self._looked_at >= self.done and not (self.composes and self._round_of_run > self._round):
            return []
        self._looked_at = self.done
        found: list[Action] = []
        cadence, plan = self.plan.training.cadence, self.plan
        refresh = cadence.refresh_due(self.done)
        may_fit = self.done > self._fit_at and self.speaks and not self._is_sending(SURROGATES)
        if plan.has_surrogates and refresh and may_fit:
            self._fit_at = self.done
            self._fit_soon = plan.pace.fits_after_merges(plan.training.replicas)
            found += [] if self._fit_soon else [Fit()]
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
                found.append(View())
            else:
                self._view_soon = True
        if ends_round or (refresh and self.done > self._kept_at):
            self._kept_at, self._keep_soon = self.done, True
        return found

    def _ask_for_tokens(self) -> list[Action]:
        """Half of what may be ahead is asked for at a time, so that the rest lasts while it is under way."""
        ahead, plan = self._tokens_until - self.done, self.plan
        count = min(plan.steps_ahead - ahead, plan.most_steps - self._tokens_until)
        if not self.connected or self._asked_for_tokens or self.finished or count <= 0 or ahead > plan.steps_ahead // 2:
            return []
        self._asked_for_tokens = True
        return [AskForTokens(self._tokens_until, count)]

    def _adopt(self) -> list[Action]:
        found: list[Action] = []
        for key, (version, counted) in list(self._merged.items()):
            held = self.held[key]
            carry = counted and version == held.base + 1 and held.published is not None
            since = held.published if carry and held.published is not None else self.done
            found.append(Adopt(key, version, carry and since < self.done))
            self.held[key] = Held(version, since)
            del self._merged[key]
        return found
