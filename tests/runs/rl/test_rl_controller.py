"""The controller of reinforcement learning on a fake clock: workers come, lie and are lost, and rounds are made."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from policy_model import SHAPE

from planetary.core.schedules import Schedule
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import WorkerBanned, WorkerLeft, WorkerLost
from planetary.machine.journal import Record, replay
from planetary.runs.rl.controller import (
    HOPELESS_GROUPS,
    LAST_CHECKPOINT_TRIES,
    TASK_S,
    ReinforcementController,
    ReinforcementDesk,
)
from planetary.runs.rl.events import (
    ForgetGroups,
    GroupOutcome,
    JudgeRollouts,
    KeepReference,
    PolicyOfRun,
    RolloutsJudged,
)
from planetary.runs.rl.messages import (
    LearnRollouts,
    PolicyReady,
    PolicyWeights,
    RolloutsLearned,
    RolloutsSampled,
    SampleRollouts,
)
from planetary.runs.rl.prompt_groups import PromptGroup
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
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runs.rounds.records import CheckpointFailed, RoundFinished
from planetary.version import __version__

GROUPS, COMPLETIONS = 4, 2


def policy(**changes: object) -> PolicyOfRun:
    values: dict[str, object] = {
        "run": "learned",
        "startup_grace_s": 50.0,
        "abandon_after_s": 0.0,
        "heartbeat_s": 1.0,
        "silent_after_s": 5.0,
        "iree_version": "",
        "params": (),
        "state": (),
        "shape": SHAPE,
        "config_hash": "",
        "rounds": 6,
        "merge": "mean",
        "groups": GROUPS,
        "completions": COMPLETIONS,
        "lag": 1,
        "ahead": 0,
        "equal": "drop",
        "imitated": 1,
        "imitation_goal": 0.0,
        "imitation_every": 2,
        "held_out": 3,
        "goal": 0.0,
        "ends": (0,),
        "vocabulary": 50,
        "teaches": False,
        "staleness": None,
        "refers": False,
        "reference": False,
        "rate": 1e-3,
        "decay": "constant",
        "schedule": Schedule(total_steps=10),
        "eval_every": 2,
        "checkpoint_every": 2,
        "persists": True,
        **changes,
    }
    return PolicyOfRun(**values)  # type: ignore[arg-type]


class Fabric:
    """A controller with workers that answer when they are told to, in simulated time."""

    def __init__(self, made: PolicyOfRun, state: ReinforcementState | None = None) -> None:
        self.policy, self.now, self.sessions = made, 0.0, 0
        self.controller = ReinforcementController(ReinforcementDesk(made, state or ReinforcementState()), 10.0, 0.0)
        self.tasks: dict[int, SampleRollouts | LearnRollouts] = {}
        self.weights: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.judging: list[JudgeRollouts] = []
        self.journal: list[Record] = []
        self.metrics: dict[int, RoundMetrics] = {}
        self.reference = 0
        self.forgotten: list[int] = []
        self.merging: e.TakeOuterStep | None = None
        self.finish: e.Finish | None = None
        self.attachments: set[int] = set()
        self._attachment = 0
        self.full_disk = 0  # checkpoints that cannot be written from now on
        self.slow_line = False
        self.unsent: list[e.PayloadSent] = []  # payloads that have not left on a slow line

    def post(self, event: e.Event) -> None:
        instructions = self.controller.handle(event, self.now)
        self.unsent += [
            e.PayloadSent(one.session, one.message)
            for one in instructions
            if isinstance(one, e.Send) and one.payload is not None
        ]
        for one in instructions:
            match one:
                case e.Compile():
                    self.post(e.Compiled(one.backend, one.target, "", "module", 1, 1.0, "fine", "ref"))
                case e.Send(message=PolicyWeights() as message, session=session):
                    self.weights[session] = message.version
                case e.Send(message=(SampleRollouts() | LearnRollouts()) as message, session=session):
                    assert session not in self.tasks, "a worker gets a task while it has one"
                    assert self.weights[session] == message.version, "a task needs other weights than were sent"
                    self.tasks[session] = message
                case e.Close(session=session):
                    self.forget(session)
                case e.Append():
                    self.journal.append(one.record)  # type: ignore[arg-type]
                case JudgeRollouts():
                    self.judging.append(one)
                    self.attachments.discard(one.attachment)
                case e.DropAttachment():
                    self.attachments.discard(one.attachment)
                case e.TakeOuterStep():
                    assert self.merging is None
                    self.merging = one
                    self.attachments -= {attachment for _, _, attachment in one.contributions}
                case e.WriteMetrics():
                    self.metrics[one.metrics.round] = one.metrics
                case e.WriteCheckpoint() if self.full_disk:
                    self.full_disk -= 1
                    self.post(e.CheckpointLost(one.mark.round, "no space"))
                case e.WriteCheckpoint():
                    self.post(e.CheckpointDone(one.mark.round, "folder", 0.1))
                case ForgetGroups(held_out=False):
                    self.forgotten += one.groups
                case KeepReference():
                    self.reference = self.controller.version
                case e.Finish():
                    self.finish = one
        self.controller.validate()
        while self.unsent and not self.slow_line:
            self.post(self.unsent.pop(0))

    def join(self, name: str, roles: tuple[str, ...] = ()) -> int:
        self.sessions += 1
        session, self.names[self.sessions] = self.sessions, name
        hello = m.Hello(
            role="worker", protocol=14, software=__version__, token="", worker=name, node=name, pid=session,
            backend="cpu", target="host", target_features="", iree_version="", roles=roles,
        )  # fmt: skip
        self.post(e.Received(session, hello))
        self.post(e.Received(session, PolicyReady(artifact="module", device="d", verified="")))
        return session

    def forget(self, session: int) -> None:
        self.tasks.pop(session, None)
        self.weights.pop(session, None)

    def lose(self, session: int) -> None:
        self.forget(session)
        self.post(e.Closed(session, "gone"))

    def attach(self) -> int:
        self._attachment += 1
        self.attachments.add(self._attachment)
        return self._attachment

    def answer(self, session: int) -> None:
        message = self.tasks.pop(session)
        if isinstance(message, SampleRollouts):
            done: m.Message = RolloutsSampled(task=message.task, version=message.version, seconds=1.0)
        else:
            done = learned(message)
        self.post(e.Received(session, done, attachment=self.attach()))

    def judge(self, rewards: dict[int, tuple[float | None, ...]] | None = None, **more: object) -> None:
        """Answer the oldest judgement; rewards differ unless they are given."""
        one = self.judging.pop(0)
        if more:
            self.post(RolloutsJudged(one.task, **more))  # type: ignore[arg-type]
            return
        outcomes = tuple(
            GroupOutcome(number, rewards=(rewards or {}).get(number, (1.0, 0.5) if one.held_out else (1.0, 0.0)))
            for number in one.groups
        )
        self.post(RolloutsJudged(one.task, outcomes, tokens=10 * len(outcomes)))

    def merge(self) -> None:
        assert self.merging is not None
        made, self.merging = self.merging, None
        self.post(e.OuterStepDone(made.round, 0.5))

    def of(self, kind: type[Record]) -> list:  # type: ignore[type-arg]
        return [record for record in self.journal if isinstance(record, kind)]

    def run(self, most: int = 2000) -> None:
        """Answer everything at once until the run ends."""
        for _ in range(most):
            self.now += 0.1
            if self.finish is not None:
                return
            if self.judging:
                self.judge()
            elif self.merging is not None:
                self.merge()
            elif self.tasks:
                self.answer(min(self.tasks))
            else:
                self.post(e.Tick())
        raise AssertionError("the run does not end")


def learned(message: LearnRollouts, loss: float = 0.1) -> RolloutsLearned:
    return RolloutsLearned(
        task=message.task, round=message.round, steps=1, tokens=30, loss=loss, grad_norm=1.0, seconds=0.5,
        divergence=0.01, entropy=2.0,
    )  # fmt: skip


def gradients(fabric: Fabric) -> list[int]:
    """The groups that became gradients, in order."""
    return [group for record in fabric.of(GroupsLearned) for group in record.groups]


def check_whole(fabric: Fabric) -> None:
    """What holds after any run: every round is there once, and every group became one gradient or was dropped."""
    rounds = [record.round for record in fabric.of(RoundFinished)]
    assert rounds == list(range(1, fabric.policy.rounds + 1))
    trained = Counter(gradients(fabric))
    assert set(trained.values()) <= {1}
    dropped = {record.group for record in fabric.of(GroupDropped)}
    assert not dropped & set(trained)
    for record in fabric.of(GroupsLearned):
        assert all(0 <= record.version - version <= fabric.policy.lag for version in record.sampled) or (
            record.round <= fabric.policy.imitated
        )
    assert replay(fabric.journal, ReinforcementState()).round == fabric.policy.rounds
    assert not fabric.attachments


def test_a_worker_imitates_samples_and_trains_by_turns() -> None:
    fabric = Fabric(policy())
    fabric.join("a")
    fabric.run()
    check_whole(fabric)
    assert fabric.finish is not None
    assert fabric.finish.ok
    assert len(gradients(fabric)) == GROUPS * COMPLETIONS + 5 * GROUPS
    assert fabric.reference == 1  # the imitation's end
    assert [record.version for record in fabric.of(HeldOutJudged)] == [1, 2, 4, 6]
    last = fabric.metrics[6].own
    assert last is not None
    assert (last.reward, last.staleness) == (0.5, {0: GROUPS})
    assert (last.held_out_reward, last.held_out_sampled) == (1.0, 0.5)


def test_rate_falls_from_the_imitations_end_to_the_last_round() -> None:
    made = policy(rounds=10, imitated=6, decay="linear", schedule=Schedule(kind="constant", peak=0.5))
    assert [made.rate_of(round_, 6) for round_ in (1, 6)] == [0.5, 0.5]
    assert [made.rate_of(round_, 6) for round_ in (7, 8, 9, 10)] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert policy(rounds=10).rate_of(10, 6) == pytest.approx(1e-3)
    fabric = Fabric(made)
    session = fabric.join("a")
    for _ in range(6):
        task = fabric.tasks[session]
        assert isinstance(task, LearnRollouts)
        assert task.rate == 0.5
        fabric.answer(session)
        fabric.merge()
        while session in fabric.tasks and isinstance(fabric.tasks[session], SampleRollouts):
            fabric.answer(session)
            fabric.judge()
    learning = fabric.tasks[session]
    assert isinstance(learning, LearnRollouts)
    assert learning.rate == pytest.approx(1e-3)


def test_last_checkpoint_is_tried_again() -> None:
    """The last checkpoint is tried again and earlier ones have successors."""
    fabric = Fabric(policy(rounds=5, imitated=0, held_out=0, checkpoint_every=4))
    fabric.full_disk = 3  # that of round 4, and the last one twice
    fabric.join("a")
    fabric.run()
    assert fabric.finish is not None
    assert fabric.finish.ok
    assert [record.round for record in fabric.of(CheckpointFailed)] == [4, 5, 5]
    hopeless = Fabric(policy(rounds=5, imitated=0, held_out=0, checkpoint_every=100))
    hopeless.full_disk = 100
    hopeless.join("a")
    hopeless.run()
    assert hopeless.finish is not None
    assert (hopeless.finish.ok, hopeless.finish.kind) == (False, "resource")
    assert len(hopeless.of(CheckpointFailed)) == LAST_CHECKPOINT_TRIES


def test_a_worker_that_is_let_go_has_finished_its_task() -> None:
    fabric = Fabric(policy(rounds=3, imitated=1, held_out=0))
    learning = fabric.join("a")
    assert isinstance(fabric.tasks[learning], LearnRollouts)
    fabric.post(e.LetGo("a", "another run needs it", "drained"))
    assert fabric.of(WorkerLeft) == []
    fabric.answer(learning)
    assert [(one.worker, one.kind) for one in fabric.of(WorkerLeft)] == [("a", "drained")]
    fabric.merge()
    sampling, _ = fabric.join("b"), fabric.join("c")
    assert isinstance(fabric.tasks[sampling], SampleRollouts)
    fabric.post(e.LetGo("b", "another run needs it"))
    assert len(fabric.of(WorkerLeft)) == 1
    fabric.answer(sampling)
    assert [one.worker for one in fabric.of(WorkerLeft)] == ["a", "b"]
    fabric.run()
    assert fabric.finish is not None
    assert fabric.finish.ok
    assert fabric.of(WorkerLost) == []


def test_goal_on_a_full_disk_leaves_all_tries_of_the_last() -> None:
    """A goal reached while the disk is full leaves the last checkpoint all its tries."""
    fabric = Fabric(policy(rounds=9, imitated=0, held_out=1, eval_every=2, checkpoint_every=2, goal=0.5))
    fabric.full_disk = LAST_CHECKPOINT_TRIES - 1  # the first is that of a round which then turns out to be the last
    fabric.join("a")
    fabric.run()
    assert fabric.finish is not None
    assert fabric.finish.ok
    assert [record.round for record in fabric.of(CheckpointFailed)] == [2] * (LAST_CHECKPOINT_TRIES - 1)


def test_an_imitation_ends_at_its_goal_also_after_a_resume() -> None:
    fabric = Fabric(policy(imitated=5, imitation_goal=0.5, eval_every=2))
    fabric.join("a")
    fabric.run()
    check_whole(fabric)
    assert [(record.version, record.reward) for record in fabric.of(ImitationEnded)] == [(2, 1.0)]
    assert [line.own.imitates for line in fabric.metrics.values() if line.own] == [True] * 2 + [False] * 4
    assert fabric.reference == 2
    state = replay(fabric.journal[:-1], ReinforcementState())
    again = Fabric(policy(imitated=5, imitation_goal=0.5, rounds=8), state)
    again.join("a")
    again.run()
    assert [line.own.imitates for line in again.metrics.values() if line.own] == [False, False]


def test_an_imitation_is_evaluated_at_a_rate_of_its_own() -> None:
    fabric = Fabric(policy(imitated=3, imitation_every=1, eval_every=2, rounds=7))
    fabric.join("a")
    fabric.run()
    assert [record.version for record in fabric.of(HeldOutJudged)] == [1, 2, 3, 4, 6, 7]


def test_what_is_sampled_ahead_is_as_many_versions_old() -> None:
    fabric = Fabric(policy(ahead=2, lag=2, rounds=8))
    fabric.join("a")
    fabric.run()
    check_whole(fabric)
    stale = [fabric.metrics[number].own.staleness for number in range(4, 9)]  # type: ignore[union-attr]
    assert stale == [{2: GROUPS}] * 5


def test_actors_and_learners_keep_their_roles_and_shares() -> None:
    fabric = Fabric(policy(held_out=0))
    actor = fabric.join("actor", ("actor",))
    learners = [fabric.join(name, ("learner",)) for name in ("x", "y")]
    assert set(fabric.tasks) == {learners[0]}  # it was there first, and the round began
    fabric.answer(learners[0])
    fabric.merge()
    assert set(fabric.tasks) == {actor}
    fabric.answer(actor)
    fabric.judge()
    assert set(fabric.tasks) == set(learners)
    fabric.run()
    check_whole(fabric)
    for record in fabric.of(GroupsLearned):
        assert record.worker in {"x", "y"}
        assert len(record.groups) == (GROUPS * COMPLETIONS if record.round == 1 else GROUPS // 2)


def test_a_run_without_a_learner_says_so() -> None:
    fabric = Fabric(policy())
    fabric.join("actor", ("actor",))
    assert "waiting for a worker that may be learner" in fabric.controller.stalls.why


@pytest.mark.parametrize(("equal", "trained", "dropped"), [("drop", 3, 1), ("keep", 4, 0), ("replace", 4, 1)])
def test_a_group_with_equal_rewards_is_dropped_kept_or_replaced(equal: str, trained: int, dropped: int) -> None:
    fabric = Fabric(policy(equal=equal, imitated=0, held_out=0, rounds=1))
    session = fabric.join("a")
    fabric.answer(session)
    fabric.judge({1: (0.5, 0.5)})
    if equal == "replace":
        fabric.answer(session)
        fabric.judge()
    fabric.run()
    assert len(gradients(fabric)) == trained
    assert [record.why for record in fabric.of(GroupDropped)] == ["equal"] * dropped
    found = fabric.metrics[1].own
    assert found is not None
    assert found.groups_dropped == ({"equal": 1} if dropped else {})


def test_a_round_of_equal_groups_still_ends() -> None:
    fabric = Fabric(policy(imitated=0, held_out=0, rounds=1))
    session = fabric.join("a")
    fabric.answer(session)
    fabric.judge(dict.fromkeys(range(1, GROUPS + 1), (1.0, 1.0)))
    fabric.run()
    assert len(gradients(fabric)) == GROUPS


def test_a_group_without_any_reward_is_dropped_and_replaced() -> None:
    fabric = Fabric(policy(imitated=0, held_out=0, rounds=1))
    session = fabric.join("a")
    fabric.answer(session)
    fabric.judge({2: (None, None)})
    assert [(record.group, record.why) for record in fabric.of(GroupDropped)] == [(2, "unusable")]
    fabric.run()
    assert gradients(fabric) == [1, 3, 4, 5]


def test_a_group_that_is_too_old_is_dropped() -> None:
    """Groups that an actor returned late are as old as the versions made meanwhile, and no older one is trained."""
    fabric = Fabric(policy(imitated=0, held_out=0, lag=0, ahead=0, rounds=2))
    fabric.controller.pool.add(PromptGroup(99, version=-1, reward=0.5))
    fabric.join("a")
    fabric.run()
    assert [(record.group, record.why) for record in fabric.of(GroupDropped)] == [(99, "stale")]
    assert 99 not in gradients(fabric)


def test_groups_in_place_of_stale_ones_are_sampled_at_once() -> None:
    """Nothing else was under way that could have had them sampled, and the run waited for ever."""
    fabric = Fabric(policy(imitated=0, held_out=0, lag=0, ahead=0, rounds=1))
    fabric.controller.pool.update(PromptGroup(number, version=-1, reward=0.5) for number in range(90, 90 + GROUPS))
    actor = fabric.join("actor", ("actor",))
    assert fabric.tasks == {}
    fabric.join("x", ("learner",))
    assert [record.why for record in fabric.of(GroupDropped)] == ["stale"] * GROUPS
    assert set(fabric.tasks) == {actor}
    fabric.run()


def test_late_result_is_dropped_and_lost_texts_sampled_again() -> None:
    """A late result is dropped and a lost worker's texts are sampled elsewhere."""
    fabric = Fabric(policy(imitated=0, held_out=0, rounds=1))
    first = fabric.join("a")
    late = fabric.tasks[first]
    assert isinstance(late, SampleRollouts)
    fabric.lose(first)
    second = fabric.join("b")
    fabric.post(e.Received(second, RolloutsSampled(task=late.task, version=0, seconds=1.0), attachment=fabric.attach()))
    assert not fabric.judging
    fabric.run()
    check_whole(fabric)
    assert {record.worker for record in fabric.of(GroupSampled)} == {"b"}


def test_liar_is_banned_after_three_refusals() -> None:
    """A liar is banned after three refusals and its groups are sampled by others."""
    fabric = Fabric(policy(imitated=0, held_out=0, rounds=2))
    fabric.join("honest", ("learner",))
    liar = fabric.join("liar", ("actor",))
    for _ in range(3):
        fabric.answer(liar)
        fabric.judge(defect="a token's log-probability is another")
    assert [record.worker for record in fabric.of(WorkerBanned)] == ["liar"]
    assert fabric.of(WorkerBanned)[0].lasting
    assert len(fabric.of(RolloutsRefused)) == 3
    fabric.join("other", ("actor",))
    fabric.run()
    check_whole(fabric)
    assert {record.worker for record in fabric.of(GroupSampled)} == {"other"}


def test_a_worker_that_hangs_is_restarted() -> None:
    fabric = Fabric(policy(imitated=0, held_out=0, rounds=1))
    session = fabric.join("a")
    fabric.now += 1.0
    fabric.answer(session)
    fabric.judge()
    assert isinstance(fabric.tasks[session], LearnRollouts)
    fabric.now += 300.0 + TASK_S
    fabric.post(e.Tick())
    assert session not in fabric.tasks
    fabric.join("a")
    fabric.run()
    check_whole(fabric)


def test_no_worker_is_stuck_while_weights_are_in_flight() -> None:
    fabric = Fabric(policy(imitated=0, held_out=0, rounds=1))
    fabric.slow_line = True
    session = fabric.join("a")
    fabric.now += 5000.0
    fabric.post(e.Tick())
    assert session in fabric.tasks
    fabric.slow_line = False
    fabric.now += 299.0
    fabric.post(e.Tick())
    assert session in fabric.tasks
    fabric.now += 300.0
    fabric.post(e.Tick())
    assert session not in fabric.tasks
    assert "sampled nothing for 300 s" in fabric.of(WorkerLost)[0].reason


def test_the_goal_ends_the_run_with_a_checkpoint_of_its_version() -> None:
    fabric = Fabric(policy(goal=0.5, checkpoint_every=100))
    fabric.join("a")
    fabric.run()
    assert fabric.finish is not None
    assert fabric.finish.ok
    assert "has reached rl.goal" in fabric.finish.reason
    assert fabric.controller.version == 1


def test_an_environment_that_does_not_start_ends_the_run() -> None:
    fabric = Fabric(policy(imitated=0))
    fabric.answer(fabric.join("a"))
    fabric.judge(broken="no module of this name")
    assert fabric.finish is not None
    assert (fabric.finish.ok, fabric.finish.kind) == (False, "data")


def test_a_resumed_run_samples_no_group_again() -> None:
    fabric = Fabric(policy(rounds=3))
    fabric.join("a")
    fabric.run()
    state = replay(fabric.journal[:-1], ReinforcementState())
    again = Fabric(policy(rounds=5), state)
    again.join("a")
    again.run()
    assert not set(gradients(again)) & set(gradients(fabric))
    assert [record.round for record in again.of(RoundFinished)] == [4, 5]


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules_use_every_gradient_once(seed: int) -> None:
    """Workers of any role are lost, fail, lie and answer late, in any order; the controller validates itself."""
    rng = np.random.default_rng(seed)
    made = policy(
        rounds=5,
        lag=int(rng.integers(1, 3)),
        ahead=int(rng.integers(0, 2)),
        equal=str(rng.choice(["drop", "keep", "replace"])),
        imitated=int(rng.integers(0, 3)),
    )
    fabric = Fabric(made)
    roles: list[tuple[str, ...]] = [(), ("actor",), ("learner",), ()]
    faults = 0
    for number, role in enumerate(roles):
        fabric.join(f"w{number}", role)
    for step in range(4000):
        if fabric.finish is not None:
            break
        fabric.now += float(rng.exponential(0.5))
        live = sorted(fabric.controller.desk.workers)
        choice = rng.random()
        if choice < 0.06 and live and faults < 40:
            faults += 1
            session = int(rng.choice(live))
            name = fabric.names[session]
            fabric.lose(session)
            fabric.join(name, roles[int(name[1])])
        elif choice < 0.08 and fabric.tasks and faults < 40:
            faults += 1
            session = int(rng.choice(sorted(fabric.tasks)))
            task = fabric.tasks.pop(session).task
            fabric.post(e.Received(session, m.TaskFailed(task=task, kind="resource", reason="no memory")))
        elif choice < 0.11 and fabric.judging and faults < 40:
            faults += 1
            fabric.judge(defect="it lies")
        elif choice < 0.5 and fabric.judging:
            rewards = {
                number: tuple(float(x) for x in rng.integers(0, 2, 2 if fabric.judging[0].held_out else COMPLETIONS))
                for number in fabric.judging[0].groups
            }
            fabric.judge(rewards)
        elif choice < 0.6 and fabric.merging is not None:
            fabric.merge()
        elif fabric.tasks:
            fabric.answer(int(rng.choice(sorted(fabric.tasks))))
        else:
            fabric.post(e.Tick())
        # A banned worker returns under another name.
        for name in [n for n in fabric.controller.membership.banned if n in fabric.names.values()]:
            fresh = f"w{name[1]}" + "x" * step
            for session, one in list(fabric.names.items()):
                if one == name:
                    fabric.names[session] = ""
            fabric.join(fresh, roles[int(name[1])])
    assert fabric.finish is not None, f"seed {seed}: {fabric.controller.stalls.why}"
    assert fabric.finish.ok
    assert faults
    check_whole(fabric)


@pytest.mark.parametrize("once", [False, True])
def test_groups_without_any_reward_end_the_run(once: bool) -> None:
    """An environment that fails on every completion ends the run; a single reward starts the count again."""
    fabric = Fabric(policy(rounds=5, imitated=0, held_out=0))
    fabric.join("a")
    judged = 0
    while fabric.finish is None and judged < 100:
        if fabric.judging:
            numbers = fabric.judging[0].groups
            rewards = dict.fromkeys(numbers, (None, None))
            if once and judged < HOPELESS_GROUPS - len(numbers) <= judged + len(numbers):
                rewards[numbers[-1]] = (1.0, 0.0)  # type: ignore[assignment]
            judged += len(numbers)
            fabric.judge(rewards)
        else:
            fabric.answer(min(fabric.tasks))
    assert fabric.finish is not None
    assert (fabric.finish.ok, fabric.finish.kind) == (False, "data")
    assert "groups in a row have no reward" in fabric.finish.reason
    assert (judged > HOPELESS_GROUPS + GROUPS) == once
