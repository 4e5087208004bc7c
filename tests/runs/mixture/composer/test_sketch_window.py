"""No composer has more sketches of a layer out than the window, and none waits for an answer that will not come."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from mixture_checks import (
    check_steps,
    check_streams,
    check_window,
    of_kind,
    spoil,
    stale,
    unanswered,
    waiting_work,
)
from mixture_stage import MixtureStage, Worker, make_plan
from msgspec.structs import replace

from planetary.artifacts.jsonl import JsonLinesWriter
from planetary.fleet.gateway.run_files import EVENTS
from planetary.fleet.protocol.records import WorkerLost
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.composer.machine import SketchWindow
from planetary.runs.mixture.controller.offload import WaitingSketches
from planetary.runs.mixture.methods.acceptance import Policy
from planetary.runs.mixture.records import FORGET_STEPS, ExpertsAdvanced, ExpertWorkEnded

WINDOW = 2


def told(window: SketchWindow, gateway: WaitingSketches, session: int = 1) -> None:
    window.take_report(0, *gateway.report(session, 0, 0))


def connected() -> tuple[SketchWindow, WaitingSketches]:
    """A composer with two sketches out, of steps 4 and 6, which have come."""
    window, gateway = SketchWindow(1, WINDOW), WaitingSketches()
    assert not window.may_offer(0)  # the gateway's word has not come
    told(window, gateway)
    for step in (4, 6):
        assert window.may_offer(0)
        window.offered(0, step)
        gateway.arrived(1, 0, 0, step)
        gateway.waits(0, 0, step)
    assert not window.may_offer(0)
    return window, gateway


def test_an_unrelated_update_frees_no_place_in_the_window() -> None:
    window, gateway = connected()
    for _ in range(3):
        told(window, gateway)
        assert not window.may_offer(0)
    assert gateway.end(0, 0, 4)
    assert not gateway.end(0, 0, 4)
    told(window, gateway)
    told(window, gateway)
    assert window.may_offer(0)
    window.offered(0, 7)
    told(window, gateway)  # what was said before it came
    assert not window.may_offer(0)


def test_one_message_answers_as_many_sketches_as_have_an_answer() -> None:
    window, gateway = connected()
    gateway.end(0, 0, 4)
    gateway.end(0, 0, 6)
    gateway.arrived(1, 0, 0, 8)  # one that is refused at once
    told(window, gateway)
    for step in (9, 10):
        assert window.may_offer(0)
        window.offered(0, step)
    assert not window.may_offer(0)


def test_sketches_in_flight_on_a_lost_connection_do_not_count() -> None:
    window, gateway = connected()
    gateway.end(0, 0, 4)
    told(window, gateway)
    window.offered(0, 8)  # does not come
    window.forget()
    gateway.lost(1)
    assert not window.may_offer(0)
    told(window, gateway, session=2)
    assert window.may_offer(0)
    window.offered(0, 9)
    assert not window.may_offer(0)
    gateway.end(0, 0, 6)  # not of this connection, and answered on it
    told(window, gateway, session=2)
    assert window.may_offer(0)
    again = WaitingSketches([(0, 0, 6)])  # as a gateway begins that finds one in its queue
    window.forget()
    told(window, again, session=1)
    assert window.may_offer(0)
    window.offered(0, 10)
    assert not window.may_offer(0)


def test_old_sketches_expire_unless_their_work_has_begun() -> None:
    window, gateway = connected()
    gateway.waits(1, 0, 4)
    assert gateway.forget(0, 4 + FORGET_STEPS - 1, ()) == []
    assert gateway.forget(0, 6 + FORGET_STEPS, [(0, 0, 4)]) == [0]
    assert gateway.forget(0, 6 + FORGET_STEPS, [(0, 0, 4)]) == []
    assert not window.may_offer(0)  # the word is on its way
    assert gateway.report(1, 0, 0) == (6, (4,))
    told(window, gateway)
    assert window.may_offer(0)
    assert gateway.is_waiting(0, 0, 4)
    assert not gateway.is_waiting(0, 0, 6)
    assert gateway.is_waiting(1, 0, 4)


@pytest.mark.parametrize("seed", range(20))
def test_sketch_window_survives_lost_messages(seed: int) -> None:
    """Sketches and answers take their time, only the newest answer is sent, connections and owners change."""
    rng = random.Random(seed)
    window, gateway, session, step = SketchWindow(1, WINDOW), WaitingSketches(), 1, 0
    up: list[int] = []
    down: list[tuple[int, tuple[int, ...]]] = [gateway.report(session, 0, 0)]
    queue: set[int] = set()
    offered = 0
    for _ in range(400):
        match rng.choice("sssuuuddoocf"):
            case "s":
                if window.may_offer(0) and not up:
                    window.offered(0, step)
                    up.append(step)
                    offered += 1
                step += 1
            case "u" if up:
                came = up.pop(0)
                gateway.arrived(session, 0, 0, came)
                if rng.random() < 0.2:  # refused at once
                    down.append(gateway.report(session, 0, 0))
                else:
                    gateway.waits(0, 0, came)
                    queue.add(came)
            case "d" if down:
                window.take_report(0, *down.pop())
                down.clear()
            case "o" if queue:
                done = rng.choice(sorted(queue))
                queue.discard(done)
                gateway.end(0, 0, done)
                if rng.random() < 0.8:  # otherwise it is not told until it is told something else
                    down.append(gateway.report(session, 0, 0))
            case "f":
                begun = {s for s in queue if s % 3 == 0}
                if gateway.forget(0, step, [(0, 0, s) for s in begun]):
                    down.append(gateway.report(session, 0, 0))
                queue = {s for s in queue if s > step - FORGET_STEPS} | begun
            case "c" if rng.random() < 0.3:
                up.clear()
                window.forget()
                gateway.lost(session)
                session += 1
                step = max(0, step - rng.randrange(6)) if rng.random() < 0.5 else step  # a new owner goes back
                down = [gateway.report(session, 0, 0)]
            case _:
                pass
        assert len({*queue, *up}) <= WINDOW
    assert offered > 15


def offloaded(
    folder: Path, steps: int, seed: int, *, source: str = "owner", window: int = WINDOW
) -> tuple[MixtureStage, Worker, Worker]:
    """Two composers and no expert worker."""
    plan = make_plan(folder, steps=steps, sketches=source, acceptance=Policy(norm_ratio=10, window=window))
    cluster = MixtureStage(folder, plan, seed=seed, grace_s=2.0)
    return cluster, cluster.start("a"), cluster.start("b")


def watched(cluster: MixtureStage, reached: Callable[[], bool]) -> None:
    """As `cluster.until`, and never more sketches are out than the window."""

    def looked() -> bool:
        check_window(cluster)
        return reached()

    cluster.until(looked)


@pytest.mark.slow
def test_returning_composer_still_has_one_sketch_window(tmp_path: Path) -> None:
    """A composer that comes back again and again still has one window of sketches out."""
    cluster, a, b = offloaded(tmp_path, 60, 3)
    for times in range(5):
        done = a.machine.done
        watched(cluster, lambda done=done: min(a.machine.done, b.machine.done) >= done + 3)
        for worker in (a, b):
            assert len(unanswered(cluster, worker, 0)) == WINDOW
            cluster.cut(worker)
            cluster.connect(worker)
        if times == 3:
            cluster.restart_gateway()
    assert len(waiting_work(cluster)) == 2 * WINDOW
    cluster.start("w")
    watched(cluster, lambda: cluster.finished is not None)
    assert stale(cluster) == 0
    assert sum(record.accepted for record in of_kind(cluster, ExpertsAdvanced)) > 40
    check_steps(cluster)
    check_streams(cluster)


@pytest.mark.slow
def test_a_shards_next_owner_counts_its_predecessors_sketches(tmp_path: Path) -> None:
    cluster, a, b = offloaded(tmp_path, 60, 5)
    watched(cluster, lambda: min(a.machine.done, b.machine.done) >= 5)
    shard, left = a.machine.shard, unanswered(cluster, a, 0)
    assert len(left) == WINDOW
    cluster.kill(a)
    watched(cluster, lambda: cluster.controller.syncing.machine.owners()[shard] is None)  # the grace time is over
    heir = cluster.start("d")
    watched(cluster, lambda: heir.machine.composes and heir.machine.done >= 7)
    assert heir.machine.shard == shard
    assert unanswered(cluster, heir, 0) == left
    cluster.start("w")
    watched(cluster, lambda: cluster.controller.state.experts[shard, 0].step > max(left))  # of its own
    watched(cluster, lambda: cluster.finished is not None)
    assert stale(cluster) == 0
    check_streams(cluster)


@pytest.mark.slow
def test_unasked_experts_free_no_place_in_the_window(tmp_path: Path) -> None:
    cluster, a, b = offloaded(tmp_path, 40, 7)
    watched(cluster, lambda: min(a.machine.done, b.machine.done) >= 1)
    for _ in range(30):
        for one in list(cluster.controller.composing.values()):
            cluster.controller.offload.send_experts(one.session, one.shard, 0)
        end = cluster.now + 0.4
        cluster.advance(lambda: check_window(cluster) or False, end)
    assert min(a.machine.done, b.machine.done) >= 8
    assert [len(unanswered(cluster, worker, 0)) for worker in (a, b)] == [WINDOW, WINDOW]


@pytest.mark.slow
def test_unusable_result_is_no_answer_while_others_may_try(tmp_path: Path) -> None:
    cluster, a, b = offloaded(tmp_path, 40, 8)
    watched(cluster, lambda: min(a.machine.done, b.machine.done) >= 4)
    shard, waiting = a.machine.shard, unanswered(cluster, a, 0)
    spoil(cluster.start("w"), lambda made: replace(made, proxy_before=made.proxy_before[:1]))
    watched(cluster, lambda: sum(cluster.controller.rounds.updates.values()) > 0)
    assert set(cluster.controller.rounds.updates) == {"unusable"}
    watched(cluster, lambda: not waiting & {s.step for s in waiting_work(cluster) if s.shard == shard})
    watched(
        cluster, lambda: len(unanswered(cluster, a, 0)) == WINDOW
    )  # after the message that no worker tries any more
    assert cluster.finish().ok


@pytest.mark.slow
def test_a_sketch_that_cannot_be_kept_or_read_is_answered(tmp_path: Path) -> None:
    cluster, a, _ = offloaded(tmp_path, 60, 9)
    watched(cluster, lambda: a.machine.done >= 4)
    ends = [ExpertWorkEnded(shard=w.shard, layer=w.layer, step=w.step, why="old") for w in waiting_work(cluster)]
    cluster.process.kill()
    with JsonLinesWriter(cluster.run_folder / EVENTS, checksums=True) as journal:
        for end in ends:
            journal.append(end)
    cluster.until(lambda: cluster.has_begun)  # the next gateway finds none
    cluster.store_away = True
    watched(cluster, lambda: cluster.controller.rounds.refused.get("unusable", 0) > 10)
    offers = [s.step for s in cluster.sent if isinstance(s, mm.OfferSketches) and s.shard == a.machine.shard]
    done = a.machine.done
    watched(cluster, lambda: a.machine.done >= done + 8)
    found = [s.step for s in cluster.sent if isinstance(s, mm.OfferSketches) and s.shard == a.machine.shard]
    assert len(found) > len(offers) + WINDOW
    wrong = replace(next(s for s in cluster.sent if isinstance(s, mm.OfferSketches)), epoch=a.machine.epoch)
    a.say(replace(wrong, shard=a.machine.shard, layer=7), b"nonsense")
    cluster.store_away = False
    watched(cluster, lambda: len(unanswered(cluster, a, 0)) == WINDOW)
    cluster.start("w")
    assert cluster.finish().ok
    check_streams(cluster)


@pytest.mark.slow
def test_work_that_the_queue_drops_frees_a_place_in_the_window(tmp_path: Path) -> None:
    cluster, a, b = offloaded(tmp_path, 100, 10)
    watched(cluster, lambda: min(a.machine.done, b.machine.done) >= 4)
    go_on = a.take_no_step()  # it is overtaken
    shard, left = a.machine.shard, unanswered(cluster, a, 0)
    assert len(left) == WINDOW
    watched(cluster, lambda: not [work for work in waiting_work(cluster) if work.shard == shard])
    go_on()
    done = a.machine.done
    assert done < FORGET_STEPS
    watched(cluster, lambda: len(unanswered(cluster, a, 0)) == WINDOW)
    assert a.machine.done <= done + 2 * WINDOW  # an answer takes its time
    assert not of_kind(cluster, WorkerLost)  # its surrogates are of later steps of the run than its own
    assert cluster.finish().ok


@pytest.mark.slow
def test_work_given_before_a_restart_is_given_again_at_once(tmp_path: Path) -> None:
    """Work that was given away before the gateway was restarted is given again at once."""
    cluster, a, b = offloaded(tmp_path, 60, 11, window=1)
    w = cluster.start("w")
    w.hang()  # as one that hangs
    watched(cluster, lambda: min(a.machine.done, b.machine.done) >= 4)
    assert [loan.kind for loan in cluster.controller.board.loans()] == ["work"]
    leased = {(work.shard, work.step) for work in waiting_work(cluster)}
    cluster.kill(w)
    cluster.restart_gateway()  # which does not hear of it
    cluster.start("x")
    began = cluster.now
    watched(cluster, lambda: leased <= {(r.shard, r.step) for r in of_kind(cluster, ExpertsAdvanced)})
    assert cluster.now - began < 20  # a lease takes 50 s
    assert cluster.finish().ok
    assert stale(cluster) == 0


@pytest.mark.slow
@pytest.mark.parametrize("source", ["owner", "all"])
def test_on_a_slow_line_no_sketch_is_made_with_old_experts(tmp_path: Path, source: str) -> None:
    cluster, a, _ = offloaded(tmp_path, 100, 12, source=source)
    cluster.start("w")
    a.slow(down_s=4.0)  # an answer takes longer than a sketch may wait
    watched(cluster, lambda: cluster.finished is not None)
    assert stale(cluster) == 0
    steps = [s.step for s in cluster.sent if isinstance(s, mm.OfferSketches) and s.shard == a.machine.shard]
    assert len(steps) >= 4
    check_streams(cluster, all_moved=False)


@pytest.mark.slow
def test_expired_work_is_not_leased(tmp_path: Path) -> None:
    cluster, a, b = offloaded(tmp_path, 60, 13)
    watched(cluster, lambda: min(a.machine.done, b.machine.done) >= 3)
    for worker in (a, b):
        worker.machine.may_offer = lambda _: False
    watched(cluster, lambda: not (unanswered(cluster, a, 0) or unanswered(cluster, b, 0)))
    assert min(a.machine.done, b.machine.done) >= FORGET_STEPS
    assert not waiting_work(cluster)
    ended = of_kind(cluster, ExpertWorkEnded)
    assert [one.why for one in ended] == ["old"] * 2 * WINDOW
    w = cluster.start("w")
    watched(cluster, lambda: w.session in cluster.controller.desk.workers)
    assert not [s for s in cluster.told if isinstance(s, mm.ImproveExperts)]
    assert cluster.finish().ok


@pytest.mark.slow
def test_leased_work_never_expires(tmp_path: Path) -> None:
    cluster, a, b = offloaded(tmp_path, 120, 14)
    w = cluster.start("w")
    w.hang()
    watched(cluster, lambda: min(a.machine.done, b.machine.done) >= 2 * FORGET_STEPS)
    shard, first = next((s.shard, s.progress) for s in cluster.told if isinstance(s, mm.ImproveExperts))
    worker = a if a.machine.shard == shard else b
    assert first <= 1
    assert min(unanswered(cluster, worker, 0)) <= 1
    assert max(unanswered(cluster, worker, 0)) >= FORGET_STEPS
    w.go_on()
    watched(cluster, lambda: cluster.controller.state.experts[shard, 0].version >= 2 * WINDOW)
    assert stale(cluster) == 0
    assert cluster.finish().ok
