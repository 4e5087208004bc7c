"""The controller of reinforcement learning: which worker samples and trains which groups, and when a round ends.

A round makes one version of the weights from the one before. Actors sample the round's groups, the environment judges
them, and learners train on them; a worker with both roles samples first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from planetary.fleet.controller.controller import RunController
from planetary.fleet.controller.desk import Desk
from planetary.fleet.controller.stalls import Wait
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import EndKind
from planetary.fleet.protocol.sessions import WorkerSession
from planetary.machine.board import Loan, TaskBoard, TaskPhase
from planetary.machine.task_times import TaskTimes
from planetary.runs.rl.events import (
    BatchesOf,
    ForgetGroups,
    ForgetTask,
    GroupOutcome,
    JudgeRollouts,
    KeepReference,
    PolicyOfRun,
    PolicyWeightsOf,
    ReferenceWeights,
    RolloutsJudged,
    RolloutsOf,
)
from planetary.runs.rl.messages import (
    LearnRollouts,
    PolicyReady,
    PolicyWeights,
    RolloutsLearned,
    RolloutsSampled,
    SampleRollouts,
)
from planetary.runs.rl.prompt_groups import HELD_OUT_ANSWERS, PolicyRound, PromptGroup, Share
from planetary.runs.rl.records import (
    GroupDropped,
    GroupSampled,
    GroupsLearned,
    HeldOutJudged,
    ImitationEnded,
    ReinforcementState,
    RolloutsRefused,
)
from planetary.runs.rl.status import PolicyMetrics
from planetary.runs.rounds import events as e
from planetary.runs.rounds.controller.checkpointing import Checkpointing
from planetary.runs.rounds.fold import refused_of_late
from planetary.runs.rounds.metrics import ContributionMetrics, RoundMetrics
from planetary.runs.rounds.records import CheckpointWritten, Mark, RoundClosed, RoundMerged, RoundStarted

FIRST_TASK_S = 300.0
"""A worker may compile a function when it is first called, and write it to a slow disk."""
TASK_S = 30.0
"""Smallest limit of a task."""
LACKS = {"sample": "sampled nothing", "learn": "has not trained its groups"}
"""What a stuck worker has not done, by kind of task."""
LAST_CHECKPOINT_TRIES = 5
"""The last checkpoint is the run's result: it is tried so often, with pauses."""
HOPELESS_GROUPS = 16
"""So many groups in a row without any reward end the run: the environment fails on whatever the policy writes."""
MOST_REPLACED = 3
"""Groups with equal rewards replaced in a round, as a multiple of the round's groups."""


class ReinforcementDesk(Desk[PolicyOfRun, ReinforcementState, WorkerSession]):
    """The desk of a run of reinforcement learning."""


@dataclass(frozen=True)
class RolloutTask:
    """A task of a worker that samples, or whose rollouts are being judged."""

    worker: WorkerSession
    groups: tuple[PromptGroup, ...]
    held_out: bool
    version: int


class ReinforcementController(RunController[ReinforcementDesk, WorkerSession]):
    """The controller of reinforcement learning, as a pure machine.

    Attributes:
        board: groups that are to be sampled or judged, and shares of the round that are to be trained.
        pool: groups that are neither trained nor dropped.
        round: under way; None between two. None begins while a checkpoint has to be written first.
        checkpoint: of the newest version, where one is due.
        rollouts: tasks that are sampled or judged, by number.
    """

    def __init__(self, desk: ReinforcementDesk, grace_s: float, now: float, newest: RoundMetrics | None = None) -> None:
        """`newest`: metrics of the version a resumed run begins with."""
        super().__init__(desk, grace_s, now)
        self.board = TaskBoard[PromptGroup | Share](TaskTimes(TASK_S, FIRST_TASK_S), desk.state.next_task)
        self.pool: set[PromptGroup] = set()
        self.round: PolicyRound | None = None
        self.rollouts: dict[int, RolloutTask] = {}
        self._next_group = desk.state.next_group
        self._versions: dict[int, int] = {}  # session -> the weights it has
        self._has_reference: set[int] = set()
        self._dropped: Counter[str] = Counter()  # groups dropped since the last round, by reason
        self._generated = 0  # tokens, since the last round
        self._replaced = 0
        self._unrewarded = 0  # groups without any reward since the last group with one
        self._last_end = now
        self._kept_round = desk.state.round  # round of the newest checkpoint
        self.checkpoint = Checkpointing(
            desk.append,
            self._write_newest,
            lambda round_: self._is_over and round_ == self.version,
            tries=LAST_CHECKPOINT_TRIES,
            pause_s=grace_s,
        )
        self._goal = ""  # why nothing is left to learn
        self._broken = ""  # why nothing can be judged
        self._numerics = ""
        self._metrics = newest  # metrics of the round whose version is evaluated
        if self.version and self.version not in desk.state.held_out:
            self._evaluate()

    # --- messages and events ----------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the newest weights."""
        return self.desk.state.round

    def _take_message(self, worker: WorkerSession, event: e.Received, now: float) -> None:
        match message := event.message:
            case PolicyReady():
                self.membership.ready(worker, now, message.device, message.verified)
                self._vacate(worker.session)  # it begins again
                return
            case RolloutsSampled() | RolloutsLearned():
                loan = self.board.loan(worker.session, message.task)
                if isinstance(message, RolloutsSampled) and loan is not None and loan.kind == "sample":
                    self._sampled(worker, loan, event, now)
                    return
                if isinstance(message, RolloutsLearned) and loan is not None and loan.kind == "learn":
                    self._learned(worker, loan, message, event, now)
                    return
            case _:
                pass
        self._drop_attachment(event)  # late: it was given to another, or the round is over

    def _sampled(self, worker: WorkerSession, loan: Loan[PromptGroup | Share], event: e.Received, now: float) -> None:
        self.board.done(loan, now)
        task = self.rollouts[loan.number]
        numbers = tuple(group.number for group in task.groups)
        if event.defect:
            self._drop_attachment(event)
            self._judged(RolloutsJudged(loan.number, defect=event.defect), now)
            return
        self.desk.out.append(JudgeRollouts(loan.number, event.attachment, task.version, task.held_out, numbers))

    def _learned(
        self,
        worker: WorkerSession,
        loan: Loan[PromptGroup | Share],
        message: RolloutsLearned,
        event: e.Received,
        now: float,
    ) -> None:
        (share,) = loan.tasks
        assert self.round is not None
        assert isinstance(share, Share)
        defect = event.defect or ("" if math.isfinite(message.loss) else "its loss is not finite")
        if defect:
            self._drop_attachment(event)
            failure = m.TaskFailed(task=message.task, kind="numerics", reason=defect)
            self._take_failure(worker, failure, now)
            return
        self.membership.succeeded(worker)
        self.board.done(loan, now)
        self._versions.pop(worker.session, None)  # the worker has weights of its own now
        share.task, share.result, share.attachment, share.worker = loan.number, message, event.attachment, worker.worker
        self.desk.append(
            GroupsLearned(
                round=self.round.number,
                version=self.round.number - 1,
                task=message.task,
                worker=worker.worker,
                groups=share.groups,
                sampled=share.sampled,
                tokens=message.tokens,
            )
        )

    def _take_event(self, event: e.Event, now: float) -> None:
        match event:
            case RolloutsJudged():
                self._judged(event, now)
            case e.OuterStepDone() if self.round is not None and event.round == self.round.number:
                self._finish_round(self.round, event.delta_norm, now)
            case e.OuterStepFailed():
                self._numerics = event.reason
            case e.CheckpointDone():
                self.checkpoint.done()
                self._kept_round = max(self._kept_round, event.round)
                self.desk.append(CheckpointWritten(round=event.round, path=event.path, seconds=event.seconds))
            case e.CheckpointLost():
                self.checkpoint.lost(event.reason, now)
            case _:
                pass

    # --- sampled rollouts ----------------------------------------------------------------------------------------

    def _judged(self, event: RolloutsJudged, now: float) -> None:
        task = self.rollouts.pop(event.task, None)
        if task is None:
            return
        if event.broken:
            self._broken = event.broken
            return
        if event.defect:
            self._refuse(event.task, task, event.defect, now)
            return
        if task.worker.session in self.desk.workers:
            self.membership.succeeded(task.worker)
        self._generated += event.tokens
        outcomes = {outcome.number: outcome for outcome in event.outcomes}
        for group in task.groups:
            group.version = task.version if group.version < 0 else min(group.version, task.version)
            group.newest = max(group.newest, task.version)
            self._take_outcome(group, outcomes[group.number], event.task, task.worker.worker)
        self._check_evaluated()

    def _take_outcome(self, group: PromptGroup, outcome: GroupOutcome, task: int, worker: str) -> None:
        if outcome.goes_on:  # a dialogue
            self.board.offer(group)
            return
        self.board.forget([group])
        known = [reward for reward in outcome.rewards if reward is not None]
        group.reward = sum(known) / len(known) if known else None
        group.equal = len(known) < 2 or all(reward == known[0] for reward in known)
        if group.held_out:
            # An answer without a reward is not right.
            group.held_out_rewards = tuple(reward or 0.0 for reward in outcome.rewards)
            return
        self.desk.append(
            GroupSampled(
                group=group.number,
                task=task,
                worker=worker,
                version=group.version,
                newest=group.newest,
                rewards=outcome.rewards,
                problems=outcome.problems,
            )
        )
        if not known:
            self._drop([group], "unusable")
            self._unrewarded += 1
            if self._unrewarded >= HOPELESS_GROUPS:
                self._broken = (
                    f"{self._unrewarded} groups in a row have no reward; of the last one the environment says: "
                    f"{'; '.join(outcome.problems) or 'nothing'}"
                )
            return
        self._unrewarded = 0
        if group.equal and self.desk.policy.equal == "replace" and self._may_replace:
            self._replaced += 1
            self._drop([group], "equal")

    @property
    def _may_replace(self) -> bool:
        return self._replaced < MOST_REPLACED * self.desk.policy.groups

    def _refuse(self, number: int, task: RolloutTask, reason: str, now: float) -> None:
        """Refuse rollouts that do not follow from the weights: other workers sample the groups again."""
        for group in task.groups:
            self.board.failed(group)
        numbers = tuple(group.number for group in task.groups)
        name = task.worker.worker
        refused = RolloutsRefused(
            round=self.version + 1,
            task=number,
            worker=name,
            groups=numbers,
            reason=reason,
            held_out=task.held_out,
        )
        self.desk.append(refused)
        worker = next((one for one in self.desk.workers.values() if one.worker == name), None)
        if worker is None:
            return
        if why := self.membership.distrusted(worker, *refused_of_late(self.desk.state.refusals[name], reason)):
            self._lose(worker, why, "banned", now)

    def _drop(self, groups: Sequence[PromptGroup], why: str) -> None:
        for group in groups:
            self._dropped[why] += 1
            self.desk.append(GroupDropped(group=group.number, why=why))
        self._forget(groups)

    def _forget(self, groups: Sequence[PromptGroup]) -> None:
        self.pool.difference_update(groups)
        for held_out in (False, True):
            numbers = tuple(group.number for group in groups if group.held_out == held_out)
            if numbers:
                self.desk.out.append(ForgetGroups(held_out, numbers))

    # --- next steps -------------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        # A gateway may have died between the record of an evaluation and the line of its round.
        if (rewards := self.desk.state.held_out.get(self.version)) is not None:
            self._write_evaluated(*rewards)
        if self._numerics or self._broken:
            return
        self._merge()
        if self._may_sample_more:
            self._supply()
        self._sample(now)
        if self.round is None and not self._is_over and not self.checkpoint.pauses:
            self._open(now)
        self._learn(now)
        self._sample(now)  # the groups in place of stale ones, which the round that was to begin has dropped
        self.checkpoint.go_on(now)
        self._write_checkpoint()

    @property
    def _imitated(self) -> int:
        """The last round that trains on answers: `rl.imitated_rounds`, or an earlier one that reached the goal."""
        ended = self.desk.state.imitation_ended
        return self.desk.policy.imitated if ended is None else ended

    @property
    def _is_over(self) -> bool:
        return self.version >= self.desk.policy.rounds or bool(self._goal)

    @property
    def _may_sample_more(self) -> bool:
        return not self._is_over and self.version + self.desk.policy.ahead >= self._imitated

    def _supply(self) -> None:
        """Add groups until there are enough for the next round, and for rounds sampled ahead."""
        policy, open_ = self.desk.policy, self.round
        first = (self.version if open_ is None else open_.number) + 1  # round whose groups are not composed yet
        last = min(self.version + 1 + policy.ahead, policy.rounds)
        rounds = last - max(first, self._imitated + 1) + 1
        for _ in range(max(0, rounds * policy.groups - len(self._groups()))):
            self._add(PromptGroup(self._next_group))
            self._next_group += 1

    def _add(self, group: PromptGroup) -> None:
        """Have a new group sampled."""
        self.pool.add(group)
        self.board.offer(group)

    def _groups(self, *, held_out: bool = False) -> list[PromptGroup]:
        """Return the groups that are neither trained nor dropped, the lowest number first."""
        return sorted((one for one in self.pool if one.held_out == held_out), key=lambda group: group.number)

    def _ready(self) -> list[PromptGroup]:
        """Return the training groups with rewards, the lowest number first."""
        return [group for group in self._groups() if self.board.phase(group) is None]

    def _sample(self, now: float) -> None:
        """Give waiting rollouts to idle workers that may sample, held-out ones first."""
        policy = self.desk.policy
        for held_out, each in ((True, HELD_OUT_ANSWERS), (False, policy.completions)):
            waiting = [one for one in self._groups(held_out=held_out) if self.board.phase(one) is TaskPhase.WAITING]
            idle = self._idle("actor")
            if not idle or not waiting:
                continue
            count = min(max(1, policy.most_rollouts // each), -(-len(waiting) // len(idle)))
            for worker in idle:
                groups, waiting = tuple(waiting[:count]), waiting[count:]
                if groups:
                    self._hand_out(worker, groups, held_out, now)

    def _hand_out(self, worker: WorkerSession, groups: tuple[PromptGroup, ...], held_out: bool, now: float) -> None:
        self._give_weights(worker)
        loan = self.board.lend(worker.session, groups, "sample", now)
        self.rollouts[loan.number] = RolloutTask(worker, groups, held_out, self.version)
        numbers = tuple(group.number for group in groups)
        policy = self.desk.policy
        message = SampleRollouts(task=loan.number, version=self.version, ends=policy.ends, vocabulary=policy.vocabulary)
        self._send_task(loan, message, RolloutsOf(loan.number, held_out, numbers))

    def _send_task(self, loan: Loan[PromptGroup | Share], message: m.Message, payload: e.Payload) -> None:
        self.desk.send(loan.session, message, payload)
        loan.flight.awaits = self.desk.under_way.count(loan.session)

    def _idle(self, role: str) -> list[WorkerSession]:
        return [one for one in self.desk.ready_workers() if self._is_idle(one) and one.may(role)]

    def _give_weights(self, worker: WorkerSession) -> None:
        if self._versions.get(worker.session) != self.version:
            self._versions[worker.session] = self.version
            self.desk.send(worker.session, PolicyWeights(version=self.version), PolicyWeightsOf(self.version))

    # --- the round --------------------------------------------------------------------------------------------

    def _open(self, now: float) -> None:
        """Open the next round once the groups are there and no version is being evaluated."""
        if self._groups(held_out=True):
            return
        learners = self._idle("learner")
        if not learners:
            return
        policy, number = self.desk.policy, self.version + 1
        imitates = number <= self._imitated
        opened = PolicyRound(number, imitates, max(self._last_end, self.membership.first_ready_at or now))
        if imitates:
            count = policy.groups * policy.completions
            groups = [PromptGroup(self._next_group + i, version=self.version) for i in range(count)]
            self._next_group += count
        else:
            found = self._compose(opened)
            if found is None:
                return
            groups = found
        self.round = opened
        self.desk.append(RoundStarted(round=number, version=self.version, workers=len(learners)))
        size = -(-len(groups) // len(learners))
        for start in range(0, len(groups), size):
            part = groups[start : start + size]
            share = Share(tuple(group.number for group in part), tuple(group.version for group in part))
            opened.shares.append(share)
            self.board.offer(share)

    def _compose(self, opened: PolicyRound) -> list[PromptGroup] | None:
        """Return the groups the round trains; None: there are not enough yet."""
        policy = self.desk.policy
        stale = [group for group in self._ready() if self.version - group.version > policy.lag]
        self._drop(stale, "stale")
        if stale:
            self._supply()  # new groups are handed out when a worker is idle
        ready = self._ready()
        if len(ready) < policy.groups:
            return None
        chosen = ready[: policy.groups]
        rewards = [group.reward for group in chosen if group.reward is not None]
        opened.reward = sum(rewards) / len(rewards)
        opened.staleness = dict(sorted(Counter(self.version - group.version for group in chosen).items()))
        equal = [group for group in chosen if group.equal] if policy.equal != "keep" else []
        if len(equal) == len(chosen):  # nothing is learned, and the round still ends
            equal = []
        self._drop(equal, "equal")
        trained = [group for group in chosen if group not in equal]
        self.pool.difference_update(trained)  # their rollouts are needed until the round ends
        return trained

    def _learn(self, now: float) -> None:
        if self.round is None or self.round.merging:
            return
        policy = self.desk.policy
        refers = (policy.refers or policy.teaches) and not self.round.imitates
        waiting = [share for share in self.round.shares if self.board.phase(share) is TaskPhase.WAITING]
        for share, worker in zip(waiting, self._idle("learner"), strict=False):
            self._give_weights(worker)
            if refers and worker.session not in self._has_reference:
                self._has_reference.add(worker.session)
                self.desk.send(worker.session, PolicyWeights(version=0, reference=True), ReferenceWeights())
            loan = self.board.lend(worker.session, (share,), "learn", now)
            message = LearnRollouts(
                task=loan.number,
                round=self.round.number,
                version=self.version,
                first_step=self.round.number - 1,
                rate=policy.rate_of(self.round.number, self._imitated),
                reference=refers,
                teacher=policy.teaches and not self.round.imitates,
                staleness=None if self.round.imitates else policy.staleness,
            )
            self._send_task(loan, message, BatchesOf(loan.number, self.round.imitates, share.groups))

    def _merge(self) -> None:
        """Make the next version once every share has been trained."""
        opened = self.round
        if opened is None or opened.merging or not opened.is_trained:
            return
        opened.merging = True
        self.desk.append(
            RoundClosed(round=opened.number, contributions=len(opened.shares), why="all shares are trained")
        )
        parts = tuple(
            (share.task, share.result.tokens, share.attachment)
            for share in sorted(opened.shares, key=lambda one: one.task)
            if share.result is not None
        )
        self.desk.out.append(e.TakeOuterStep(opened.number, self.desk.policy.merge, parts))

    def _finish_round(self, opened: PolicyRound, delta_norm: float, now: float) -> None:
        policy, state = self.desk.policy, self.desk.state
        results = [share.result for share in opened.shares if share.result is not None]
        tokens = sum(one.tokens for one in results)
        seconds = max(now - opened.began, 1e-9)

        def mean(name: str) -> float:
            return sum(getattr(one, name) * one.tokens for one in results) / max(tokens, 1)

        contributions = tuple(
            ContributionMetrics(
                worker=share.worker,
                loss=share.result.loss,
                seconds=share.result.seconds,
                grad_norm=share.result.grad_norm,
                version_lag=max((opened.number - 1 - version for version in share.sampled), default=0),
            )
            for share in opened.shares
            if share.result is not None
        )
        computed = sum(one.seconds for one in results)
        workers = len({share.worker for share in opened.shares})
        fraction = min(1.0, computed / (workers * seconds))
        self.desk.append(
            RoundMerged(
                round=opened.number,
                workers=workers,
                tokens=tokens,
                tokens_total=state.tokens_total + tokens,
                loss=mean("loss"),
                seconds=seconds,
                compute_fraction=fraction,
                durable=False,
                delta_norm=delta_norm,
                contributions=contributions,
            )
        )
        metrics = RoundMetrics(
            round=opened.number,
            loss=mean("loss"),
            eval_loss=None,
            tokens=tokens,
            tokens_total=state.tokens_total,
            seconds=seconds,
            workers=workers,
            inner_steps=max((one.steps for one in results), default=0),
            bytes_up=0,
            bytes_down=0,
            tokens_per_s=tokens / seconds,
            compute_fraction=fraction,
            delta_norm=delta_norm,
            contributions=contributions,
            own=PolicyMetrics(
                imitates=opened.imitates,
                reward=opened.reward,
                staleness=opened.staleness,
                groups_dropped=dict(self._dropped),
                divergence=mean("divergence"),
                entropy=mean("entropy"),
                reference_divergence=mean("reference_divergence") if policy.refers or policy.teaches else None,
                tokens_sampled=self._generated,
            ),
        )
        self.desk.out.append(e.WriteMetrics(metrics))
        trained = [number for share in opened.shares for number in share.groups]
        self.desk.out.append(ForgetGroups(False, tuple(trained)))
        self.board.forget(opened.shares)
        self.round, self._last_end = None, now
        self._dropped.clear()
        self._generated = self._replaced = 0
        if opened.number == self._imitated and not policy.reference:
            self.desk.out.append(KeepReference())
        self._metrics = metrics
        self._evaluate()
        self._keep_versions()

    def _keep_versions(self) -> None:
        versions = {self.version, *(task.version for task in self.rollouts.values())}
        self.desk.out.append(e.KeepParameters(tuple(sorted(versions))))

    # --- evaluation and checkpoints ---------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """Have the held-out prompts answered if this is due for the newest version."""
        policy = self.desk.policy
        every = policy.imitation_every if self.version < self._imitated else policy.eval_every
        if policy.is_due(self.version, every, self._imitated):
            for number in range(policy.held_out):
                self._add(PromptGroup(number, held_out=True))

    def _check_evaluated(self) -> None:
        groups = self._groups(held_out=True)
        if not groups or any(self.board.phase(group) is not None for group in groups):
            return
        greedy, sampled = (
            sum(rewards) / len(groups) for rewards in zip(*(g.held_out_rewards for g in groups), strict=True)
        )
        self.desk.append(HeldOutJudged(version=self.version, reward=greedy, sampled=sampled, prompts=len(groups)))
        self._forget(groups)
        self._write_evaluated(greedy, sampled)
        self._end_imitation(greedy)
        goal = self.desk.policy.goal
        if 0 < goal <= sampled and self.version >= self._imitated:
            self._goal = (
                f"held-out reward {sampled:.3f} (sampled) has reached rl.goal = {goal:g} in round {self.version}"
            )

    def _write_evaluated(self, greedy: float, sampled: float) -> None:
        """Write the line of the evaluated round again, with the held-out rewards."""
        line = self._metrics
        policy = None if line is None else line.own
        if line is not None and isinstance(policy, PolicyMetrics) and policy.held_out_reward is None:
            policy = msgspec.structs.replace(policy, held_out_reward=greedy, held_out_sampled=sampled)
            self.desk.out.append(e.WriteMetrics(msgspec.structs.replace(line, own=policy)))
            self._metrics = None

    def _end_imitation(self, reward: float) -> None:
        """End the imitation before `rl.imitated_rounds` once the goal is reached."""
        policy = self.desk.policy
        if 0 < policy.imitation_goal <= reward and 0 < self.version < self._imitated:
            self.desk.append(ImitationEnded(version=self.version, reward=reward))
            if not policy.reference:
                self.desk.out.append(KeepReference())

    def _write_checkpoint(self) -> None:
        policy, version = self.desk.policy, self.version
        due = version > 0 and (self._is_over or policy.is_due(version, policy.checkpoint_every, self._imitated))
        tried = version == self.checkpoint.round and (self.checkpoint.given_up or not self._is_over)
        if due and version > self._kept_round and not self.checkpoint.pending and not tried:
            self.checkpoint.begin()

    def _write_newest(self) -> int:
        mark = Mark(self.version, self.desk.state.tokens_total, self.board.next_number)
        self.desk.out.append(e.WriteCheckpoint(mark))
        return self.version

    # --- workers ----------------------------------------------------------------------------------------------

    def _take_failure(self, worker: WorkerSession, failure: m.TaskFailed, now: float) -> None:
        if self.board.loan(worker.session, failure.task) is None:
            return
        self._vacate(worker.session)
        self._strike(worker, failure.reason, self._record_failure(worker, failure), now)

    def _lost(self, worker: WorkerSession, reason: str, now: float) -> None:
        self._vacate(worker.session)
        self.board.lost(worker.session)

    def _is_idle(self, worker: WorkerSession) -> bool:
        return not self.board.loans(worker.session)

    def _vacate(self, session: int) -> None:
        """Give the tasks of this worker to others."""
        self._versions.pop(session, None)
        self._has_reference.discard(session)
        for loan in self.board.take_back(session):
            self.rollouts.pop(loan.number, None)
            self.desk.out.append(ForgetTask(loan.number))

    def _payload_sent(self, session: int, now: float) -> None:
        self.board.sent(session, now)

    def _payload_arrives(self, session: int, message: m.Message, now: float) -> None:
        self.board.arrives(session, message.id)

    def _arrived(self, session: int, message: int, now: float) -> None:
        self.board.arrived(session, message, now)

    # --- hooks of the base ------------------------------------------------------------------------------------

    def _why_nothing_goes_on(self) -> str:
        if self.round is None and (stall := self.checkpoint.stall):
            return stall
        ready = self.desk.ready_workers()
        if not ready:
            return self.membership.whom_we_wait_for()
        lacking = [role for role in self.desk.policy.roles if not any(worker.may(role) for worker in ready)]
        return f"waiting for a worker that may be {' and '.join(lacking)} (--role)" if lacking else ""

    def _is_done(self) -> tuple[EndKind, str] | None:
        if self._numerics:
            return "numerics", self._numerics
        if self._broken:
            return "data", self._broken
        if not self._is_over or self.round is not None or self._groups(held_out=True) or self.checkpoint.pending:
            return None
        if self.checkpoint.given_up:
            return "resource", f"the last checkpoint could not be written: {self.checkpoint.unkept}"
        if self._kept_round < self.version:
            return None
        return "done", self._goal or f"all {self.version} rounds are finished"

    def _deadlines(self) -> Iterable[float | None]:
        yield self.checkpoint.again_at

    def _waits(self) -> Iterable[Wait]:
        return (Wait(loan.session, loan.since, until, LACKS[loan.kind]) for loan, until in self.board.limits())

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        yield from super()._invariants()
        if self._has_ended:
            return
        yield from self.board.invariants(self.desk.workers)
        sessions = [loan.session for loan in self.board.loans()]
        yield len(set(sessions)) == len(sessions), f"a worker has two tasks: {sessions}"
        groups = {one for one in self.board if isinstance(one, PromptGroup)}
        away = {one for one in groups if self.board.phase(one) is not TaskPhase.WAITING}
        sampled = [group for task in self.rollouts.values() for group in task.groups]
        yield len(set(sampled)) == len(sampled), "a group is sampled or judged in two tasks"
        yield away == set(sampled), f"{len(away)} groups are on their way, tasks have {len(sampled)}"
        yield groups <= self.pool, "a dropped group is sampled"
        if self.round is not None:
            yield self.round.number == self.version + 1, f"round {self.round.number} after version {self.version}"
            lags = [self.version - version for share in self.round.shares for version in share.sampled]
            yield all(0 <= lag <= self.desk.policy.lag for lag in lags) or self.round.imitates, f"lags are {lags}"
        waiting = sorted(one.number for one in groups - away)
        idle = [one.worker for one in self._idle("actor")]
        yield (
            not (waiting and idle) or bool(self._numerics or self._broken),
            f"groups {waiting} wait beside idle {idle}",
        )
        # A group that takes part in a round is not in the pool any more.
        numbers = [group.number for group in self._groups()]
        yield len(numbers) == len(set(numbers)), "a group is there twice"
