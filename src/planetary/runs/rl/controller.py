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

from planetary.data.slices import LeaseLedger
from planetary.fleet.controller.controller import RunController
from planetary.fleet.controller.desk import Desk
from planetary.fleet.controller.stalls import Wait
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import (
    CheckpointWritten,
    EndKind,
    Mark,
    RoundClosed,
    RoundFinished,
    RoundStarted,
)
from planetary.fleet.protocol.sessions import WorkerSession
from planetary.fleet.protocol.status import ContributionMetrics, PolicyMetrics, RoundMetrics
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
from planetary.runs.rl.prompt_groups import GroupPhase, PolicyRound, Pool, PromptGroup, Share
from planetary.runs.rl.records import (
    GroupDropped,
    GroupSampled,
    GroupsLearned,
    HeldOutJudged,
    ImitationEnded,
    ReinforcementState,
    RolloutsRefused,
)
from planetary.runs.rounds import events as e
from planetary.runs.rounds.controller.checkpointing import Checkpointing

FIRST_TASK_S = 300.0
"""A worker may compile a function when it is first called, and write it to a slow disk."""
TASK_S = 30.0
TASK_FACTOR = 20.0
"""A task that takes so many times as long as the longest before, and `TASK_S`, is stuck."""
LAST_CHECKPOINT_TRIES = 5
"""The last checkpoint is the run's result: it is tried so often, with pauses."""
HOPELESS_GROUPS = 16
"""So many groups in a row without any reward end the run: the environment fails on whatever the policy writes."""
MOST_REPLACED = 3
"""Groups with equal rewards replaced in a round, as a multiple of the round's groups."""


class ReinforcementDesk(Desk[PolicyOfRun, ReinforcementState]):
    """The desk of a run of reinforcement learning."""


@dataclass
class SamplingTask:
    """A task a worker samples, or whose rollouts are being judged."""

    task: int
    worker: WorkerSession
    groups: tuple[PromptGroup, ...]
    held_out: bool
    version: int
    since: float


class ReinforcementController(RunController[ReinforcementDesk]):
    """The controller of reinforcement learning, as a pure machine.

    Attributes:
        pool: groups that are neither trained nor dropped.
        round: under way; None between two. None begins while a checkpoint has to be written first.
        checkpoint: of the newest version, where one is due.
        sampling: tasks of workers that sample, by session.
        judging: tasks whose rollouts are being judged, by number.
    """

    def __init__(self, desk: ReinforcementDesk, grace_s: float, now: float, newest: RoundMetrics | None = None) -> None:
        """`newest`: metrics of the version a resumed run begins with."""
        super().__init__(desk, grace_s, now)
        self.pool = Pool()
        self.round: PolicyRound | None = None
        self.sampling: dict[int, SamplingTask] = {}
        self.judging: dict[int, SamplingTask] = {}
        self._next_group, self._next_task = desk.state.next_group, desk.state.next_task
        self._versions: dict[int, int] = {}  # session -> the weights it has
        self._has_reference: set[int] = set()
        self._slowest: dict[tuple[int, str], float] = {}
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
            case RolloutsSampled() if self._answers(worker, message.task) is not None:
                self._sampled(worker, message, event, now)
                return
            case RolloutsLearned() if self.round is not None:
                share = self.round.share_of(worker.session)
                if share is not None and share.task == message.task:
                    self._learned(worker, share, message, event, now)
                    return
            case _:
                pass
        self._drop_attachment(event)  # late: it was given to another, or the round is over

    def _answers(self, worker: WorkerSession, task: int) -> SamplingTask | None:
        under_way = self.sampling.get(worker.session)
        return under_way if under_way is not None and under_way.task == task else None

    def _sampled(self, worker: WorkerSession, message: RolloutsSampled, event: e.Received, now: float) -> None:
        task = self.sampling.pop(worker.session)
        for group in task.groups:
            group.advance("sampled")
        self._took(worker, "sample", now - task.since)
        self.judging[task.task] = task
        numbers = tuple(group.number for group in task.groups)
        if event.defect:
            self._drop_attachment(event)
            self._judged(RolloutsJudged(task.task, defect=event.defect), now)
            return
        self.desk.out.append(JudgeRollouts(task.task, event.attachment, task.version, task.held_out, numbers))

    def _learned(
        self, worker: WorkerSession, share: Share, message: RolloutsLearned, event: e.Received, now: float
    ) -> None:
        assert self.round is not None
        defect = event.defect or ("" if math.isfinite(message.loss) else "its loss is not finite")
        if defect:
            self._drop_attachment(event)
            failure = m.TaskFailed(task=message.task, kind="numerics", reason=defect)
            self._take_failure(worker, failure, now)
            return
        self.membership.succeeded(worker)
        self._took(worker, "learn", now - share.since)
        self._versions.pop(worker.session, None)  # the worker has weights of its own now
        share.result, share.attachment, share.worker, share.session = message, event.attachment, worker.worker, None
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

    def _took(self, worker: WorkerSession, kind: str, seconds: float) -> None:
        key = worker.session, kind
        self._slowest[key] = max(self._slowest.get(key, 0.0), seconds)

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
        task = self.judging.pop(event.task, None)
        if task is None:
            return
        if event.broken:
            self._broken = event.broken
            return
        if event.defect:
            self._refuse(task, event.defect, now)
            return
        if task.worker.session in self.desk.workers:
            self.membership.succeeded(task.worker)
        self._generated += event.tokens
        outcomes = {outcome.number: outcome for outcome in event.outcomes}
        for group in task.groups:
            group.version = task.version if group.version < 0 else min(group.version, task.version)
            group.newest = max(group.newest, task.version)
            self._take_outcome(group, outcomes[group.number], task)
        self._check_evaluated()

    def _take_outcome(self, group: PromptGroup, outcome: GroupOutcome, task: SamplingTask) -> None:
        if outcome.goes_on:
            group.advance("reply")
            return
        group.advance("rewards")
        known = [reward for reward in outcome.rewards if reward is not None]
        group.reward = sum(known) / len(known) if known else None
        group.equal = len(known) < 2 or all(reward == known[0] for reward in known)
        if group.held_out:
            return
        self.desk.append(
            GroupSampled(
                group=group.number,
                task=task.task,
                worker=task.worker.worker,
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

    def _refuse(self, task: SamplingTask, reason: str, now: float) -> None:
        """Refuse rollouts that do not follow from the weights: other workers sample the groups again."""
        for group in task.groups:
            group.advance("refused")
        numbers = tuple(group.number for group in task.groups)
        name = task.worker.worker
        refused = RolloutsRefused(
            round=self.version + 1,
            task=task.task,
            worker=name,
            groups=numbers,
            reason=reason,
            held_out=task.held_out,
        )
        self.desk.append(refused)
        worker = next((one for one in self.desk.workers.values() if one.worker == name), None)
        if worker is None:
            return
        if why := self.membership.distrusted(worker, self.desk.state.refusals[name], reason):
            self._lose(worker, why, "banned", now)

    def _drop(self, groups: Sequence[PromptGroup], why: str) -> None:
        for group in groups:
            self._dropped[why] += 1
            self.desk.append(GroupDropped(group=group.number, why=why))
        self._forget(groups)

    def _forget(self, groups: Sequence[PromptGroup]) -> None:
        self.pool.forget(groups)
        for held_out in (False, True):
            numbers = tuple(group.number for group in groups if group.held_out == held_out)
            if numbers:
                self.desk.out.append(ForgetGroups(held_out, numbers))

    # --- next steps -------------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        # A gateway may have died between the record of an evaluation and the line of its round.
        if (reward := self.desk.state.held_out.get(self.version)) is not None:
            self._write_evaluated(reward)
        if self._numerics or self._broken:
            return
        self._merge()
        if self._may_sample_more:
            self._supply()
        self._sample(now)
        if self.round is None and not self._is_over and not self.checkpoint.pauses:
            self._open(now)
        self._learn(now)
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
        for _ in range(max(0, rounds * policy.groups - len(self.pool.of()))):
            self.pool.add(PromptGroup(self._next_group))
            self._next_group += 1

    def _sample(self, now: float) -> None:
        """Give waiting rollouts to idle workers that may sample, held-out ones first."""
        policy = self.desk.policy
        for held_out, each in ((True, 1), (False, policy.completions)):
            waiting = self.pool.of(GroupPhase.WAITING, held_out=held_out)
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
        task = self._new_task()
        for group in groups:
            group.advance("task")
        self.sampling[worker.session] = SamplingTask(task, worker, groups, held_out, self.version, now)
        numbers = tuple(group.number for group in groups)
        policy = self.desk.policy
        message = SampleRollouts(
            task=task, version=self.version, greedy=held_out, ends=policy.ends, vocabulary=policy.vocabulary
        )
        self.desk.send(worker.session, message, RolloutsOf(task, held_out, numbers))

    def _idle(self, role: str) -> list[WorkerSession]:
        busy = set(self.sampling)
        if self.round is not None:
            busy |= {share.session for share in self.round.shares if share.session is not None}
        return [one for one in self.desk.ready_workers() if one.session not in busy and one.may(role)]

    def _new_task(self) -> int:
        self._next_task += 1
        return self._next_task - 1

    def _give_weights(self, worker: WorkerSession) -> None:
        if self._versions.get(worker.session) != self.version:
            self._versions[worker.session] = self.version
            self.desk.send(worker.session, PolicyWeights(version=self.version), PolicyWeightsOf(self.version))

    # --- the round --------------------------------------------------------------------------------------------

    def _open(self, now: float) -> None:
        """Open the next round once the groups are there and no version is being evaluated."""
        if self.pool.of(held_out=True):
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
            opened.shares.append(Share(tuple(group.number for group in part), tuple(group.version for group in part)))

    def _compose(self, opened: PolicyRound) -> list[PromptGroup] | None:
        """Return the groups the round trains; None: there are not enough yet."""
        policy = self.desk.policy
        stale = [group for group in self.pool.of(GroupPhase.READY) if self.version - group.version > policy.lag]
        self._drop(stale, "stale")
        if stale:
            self._supply()  # new groups are handed out when a worker is idle
        ready = self.pool.of(GroupPhase.READY)
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
        self.pool.forget(trained)  # their rollouts are needed until the round ends
        return trained

    def _learn(self, now: float) -> None:
        if self.round is None or self.round.merging:
            return
        policy = self.desk.policy
        refers = (policy.refers or policy.teaches) and not self.round.imitates
        for share, worker in zip(self.round.waiting, self._idle("learner"), strict=False):
            self._give_weights(worker)
            if refers and worker.session not in self._has_reference:
                self._has_reference.add(worker.session)
                self.desk.send(worker.session, PolicyWeights(version=0, reference=True), ReferenceWeights())
            share.session, share.task, share.since = worker.session, self._new_task(), now
            message = LearnRollouts(
                task=share.task,
                round=self.round.number,
                version=self.version,
                first_step=self.round.number - 1,
                rate=policy.rate_of(self.round.number, self._imitated),
                reference=refers,
                teacher=policy.teaches and not self.round.imitates,
                staleness=None if self.round.imitates else policy.staleness,
            )
            self.desk.send(worker.session, message, BatchesOf(share.task, self.round.imitates, share.groups))

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
            RoundFinished(
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
            policy=PolicyMetrics(
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
        self.round, self._last_end = None, now
        self._dropped.clear()
        self._generated = self._replaced = 0
        if opened.number == self._imitated and not policy.reference:
            self.desk.out.append(KeepReference())
        self._metrics = metrics
        self._evaluate()
        self._keep_versions()

    def _keep_versions(self) -> None:
        tasks = [*self.sampling.values(), *self.judging.values()]
        self.desk.out.append(e.KeepParameters(tuple(sorted({self.version, *(task.version for task in tasks)}))))

    # --- evaluation and checkpoints ---------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """Have the held-out prompts answered if this is due for the newest version."""
        policy = self.desk.policy
        every = policy.imitation_every if self.version < self._imitated else policy.eval_every
        if policy.is_due(self.version, every, self._imitated):
            for number in range(policy.held_out):
                self.pool.add(PromptGroup(number, held_out=True))

    def _check_evaluated(self) -> None:
        groups = self.pool.of(held_out=True)
        if not groups or any(group.phase is not GroupPhase.READY for group in groups):
            return
        # Without a reward it is not right.
        reward = sum(group.reward or 0.0 for group in groups) / len(groups)
        self.desk.append(HeldOutJudged(version=self.version, reward=reward, prompts=len(groups)))
        self._forget(groups)
        self._write_evaluated(reward)
        self._end_imitation(reward)
        goal = self.desk.policy.goal
        if 0 < goal <= reward and self.version >= self._imitated:
            self._goal = f"held-out reward {reward:.3f} (greedy) has reached rl.goal = {goal:g} in round {self.version}"

    def _write_evaluated(self, reward: float) -> None:
        """Write the line of the evaluated round again, with the held-out reward."""
        line = self._metrics
        if line is not None and line.policy is not None and line.policy.held_out_reward is None:
            policy = msgspec.structs.replace(line.policy, held_out_reward=reward)
            self.desk.out.append(e.WriteMetrics(msgspec.structs.replace(line, policy=policy)))
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
        mark = Mark(self.version, self.desk.state.tokens_total, self._next_task, LeaseLedger())
        self.desk.out.append(e.WriteCheckpoint(mark))
        return self.version

    # --- workers ----------------------------------------------------------------------------------------------

    def _take_failure(self, worker: WorkerSession, failure: m.TaskFailed, now: float) -> None:
        sampling = self._answers(worker, failure.task)
        share = self.round.share_of(worker.session) if self.round is not None else None
        if sampling is None and (share is None or share.task != failure.task):
            return
        self._vacate(worker.session)
        self._strike(worker, failure.reason, self._record_failure(worker, failure, self.version + 1), now)

    def _lost(self, worker: WorkerSession, reason: str, now: float) -> None:
        self._vacate(worker.session)
        self._slowest = {key: seconds for key, seconds in self._slowest.items() if key[0] != worker.session}

    def _is_idle(self, worker: WorkerSession) -> bool:
        trains = self.round is not None and self.round.share_of(worker.session) is not None
        return worker.session not in self.sampling and not trains

    def _vacate(self, session: int) -> None:
        """Give the tasks of this worker to others."""
        self._versions.pop(session, None)
        self._has_reference.discard(session)
        task = self.sampling.pop(session, None)
        if task is not None:
            for group in task.groups:
                group.advance("lost")
            self.desk.out.append(ForgetTask(task.task))
        share = self.round.share_of(session) if self.round is not None else None
        if share is not None:
            self.desk.out.append(ForgetTask(share.task))
            share.session, share.task = None, 0

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
        if not self._is_over or self.round is not None or self.pool.of(held_out=True) or self.checkpoint.pending:
            return None
        if self.checkpoint.given_up:
            return "resource", f"the last checkpoint could not be written: {self.checkpoint.unkept}"
        if self._kept_round < self.version:
            return None
        return "done", self._goal or f"all {self.version} rounds are finished"

    def _deadlines(self) -> Iterable[float | None]:
        yield self.checkpoint.again_at

    def _waits(self) -> Iterable[Wait]:
        for session, task in self.sampling.items():
            yield self._wait(session, "sample", task.since, "sampled nothing")
        if self.round is not None:
            for share in self.round.shares:
                if share.session is not None:
                    yield self._wait(share.session, "learn", share.since, "has not trained its groups")

    def _wait(self, session: int, kind: str, since: float, lacks: str) -> Wait:
        slowest = self._slowest.get((session, kind))
        most = FIRST_TASK_S if slowest is None else max(TASK_S, TASK_FACTOR * slowest)
        return Wait(session, since, since + most, lacks)

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        yield from super()._invariants()
        if self._has_ended:
            return
        live = set(self.desk.workers)
        yield set(self.sampling) <= live, "a worker that is gone samples"
        sampled = [group for task in self.sampling.values() for group in task.groups]
        judged = [group for task in self.judging.values() for group in task.groups]
        yield all(group.phase is GroupPhase.SAMPLING for group in sampled), "a task samples a group twice"
        yield all(group.phase is GroupPhase.JUDGING for group in judged), "a group is judged in two tasks"
        count = sum(group.phase in {GroupPhase.SAMPLING, GroupPhase.JUDGING} for group in self.pool)
        yield count == len(sampled) + len(judged), f"{count} groups are on their way, tasks have {len(sampled)}"
        if self.round is not None:
            yield self.round.number == self.version + 1, f"round {self.round.number} after version {self.version}"
            sessions = [share.session for share in self.round.shares if share.session is not None]
            yield len(set(sessions)) == len(sessions) and set(sessions) <= live, f"shares are with {sessions}"
            yield not set(sessions) & set(self.sampling), "a worker samples and trains at once"
            lags = [self.version - version for share in self.round.shares for version in share.sampled]
            yield all(0 <= lag <= self.desk.policy.lag for lag in lags) or self.round.imitates, f"lags are {lags}"
        # A group that takes part in a round is not in the pool any more.
        numbers = [group.number for group in self.pool.of()]
        yield len(numbers) == len(set(numbers)), "a group is there twice"
