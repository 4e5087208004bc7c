"""Surrogates that travel as low-rank changes: everybody has the owner's bits, and whole ones are sent where needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mixture_checks import check_streams, of_kind
from mixture_cluster import MixtureCluster, Worker, make_plan
from moe_support import TINY, train
from msgspec.structs import replace

from planetary.artifacts.packed_arrays import pack_arrays
from planetary.core.errors import RemoteProtocolError, TrustError
from planetary.moe.delta import Delta, expand
from planetary.moe.records import SurrogatesRefreshed
from planetary.moe.surrogate_payloads import (
    change_bytes,
    changed_surrogates,
    empty_bank,
    install,
    messages_of,
    surrogates_bytes,
    surrogates_from,
)
from planetary.wire import messages as m

ROWS = TINY.n_latent, 3


def started(folder: Path, **options: int) -> tuple[MixtureCluster, Worker, Worker]:
    """Two composers whose surrogates have gone on by changes for a while."""
    cluster = MixtureCluster(folder, make_plan(folder, steps=40, delta_rank=1, **options), seed=5)
    workers = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: min(w.driver.machine.done for w in workers) >= 8)
    return cluster, *workers


def check_banks(cluster: MixtureCluster) -> None:
    """Every composer has of the others exactly what the store has."""
    while any(w.driver._inbox for w in cluster.workers.values()):
        cluster.turn()
    for worker in cluster.workers.values():
        bank = worker.driver.bank
        assert bank is not None
        for number, shard in enumerate(cluster.controller.state.shards):
            if number in worker.driver.machine.speaks:
                continue
            for message in surrogates_from(cluster.store.get(shard.surrogates)):
                assert (bank.a[message.layer][message.expert] == message.a).all()
                assert (bank.b[message.layer][message.expert] == message.b).all()


def test_a_low_rank_change_is_added_in_one_order_everywhere() -> None:
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 6), (6, 30)))
    found = expand(Delta("rank", (40, 30), (left, right)))
    one_by_one = np.zeros((40, 30), np.float32)
    for i in range(40):
        for j in range(30):
            total = np.float32(0)
            for k in range(6):
                total = np.float32(total + np.float32(left[i, k] * right[k, j]))
            one_by_one[i, j] = total
    assert (found == one_by_one).all()
    with pytest.raises(Exception, match="does not fit its shape"):
        expand(Delta("rank", (30, 40), (left, right)))


def test_a_change_gives_the_owners_bits_to_who_has_what_was_changed_and_an_error_to_others(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=4, delta_rank=1)
    trainer, states, _ = train(2, delta_rank=1)
    before, state = states[-1].surrogates, states[-1].composers[0]
    assert before is not None
    fits = trainer.steps.fit(state, before)
    messages = messages_of(fits, 0, 2)
    data = change_bytes(messages, fits)
    numbers = sum(TINY.n_layer * [2 * sum(ROWS) * len(fits[0].experts)]) * 4
    assert len(data) - numbers < len(surrogates_bytes(messages)) - numbers * ROWS[0] * ROWS[1] / sum(ROWS) + 1000
    for found, sent in zip(changed_surrogates(data, before), messages, strict=True):
        assert (found.a == sent.a).all()
        assert (found.b == sent.b).all()
        assert found.checksum == sent.checksum
    with pytest.raises(TrustError, match="damaged"):
        install(empty_bank(plan), changed_surrogates(data, empty_bank(plan)), plan)
    fields = {"layer": 0, "expert": 0, "owner": 0, "version": 1, "checksum": ""}
    for wrong in (fields, fields | {"layer": 9}):
        with pytest.raises(RemoteProtocolError, match=r"lack '0\.a\.left'|another model"):
            changed_surrogates(pack_arrays("refresh", [wrong], {}), before)
    whole = trainer.steps.fit(state, before, whole=True)
    assert not any(fit.changes for fit in whole)
    assert whole[0].nbytes > fits[0].nbytes


def test_after_the_first_refresh_surrogates_travel_as_changes_both_ways(tmp_path: Path) -> None:
    cluster, *_ = started(tmp_path)
    assert cluster.finish().ok
    said = [s for s in cluster.sent if isinstance(s, m.PublishSurrogates)]
    told = [s for s in cluster.told if isinstance(s, m.SurrogatesReady)]
    assert len(said) == len(of_kind(cluster, SurrogatesRefreshed))
    assert all(s.change for s in said)
    assert [s.step for s in told if not s.change] == [0, 0, 0, 0]  # what it starts from
    check_banks(cluster)
    check_streams(cluster)


@pytest.mark.parametrize("lost", ["the base", "the connection", "the gateway", "the store"])
def test_what_cannot_be_changed_is_sent_whole_once_and_changes_go_on_from_there(tmp_path: Path, lost: str) -> None:
    cluster, a, b = started(tmp_path)
    state, shard = cluster.controller.state, a.driver.machine.shard
    if lost == "the base":
        name = state.shards[shard].surrogates
        cluster.store.remove(name)
    elif lost == "the connection":
        cluster.cut(a)
        cluster.until(lambda: a.driver.machine.done >= 14)
        cluster.connect(a)
    elif lost == "the gateway":
        cluster.restart_gateway()
    else:
        cluster.store_away = True
        cluster.until(lambda: min(a.driver.machine.done, b.driver.machine.done) >= 14)
        cluster.store_away = False
    begin = len(cluster.sent)
    assert cluster.finish().ok
    said = [s for s in cluster.sent[begin:] if isinstance(s, m.PublishSurrogates) and s.shard == shard]
    whole = [i for i, s in enumerate(said) if not s.change]
    assert len(whole) == 1
    assert whole[0] <= 2
    assert len(said) > whole[0] + 5
    assert of_kind(cluster, SurrogatesRefreshed)[-1].change
    check_banks(cluster)
    check_streams(cluster)


def test_a_change_that_is_damaged_or_makes_something_else_does_not_count(tmp_path: Path) -> None:
    cluster, a, _ = started(tmp_path)
    said = next(s for s in reversed(cluster.sent) if isinstance(s, m.PublishSurrogates) and s.shard == 0)
    change = cluster.store.get(said.change)
    for wrong, data, why in (
        (said, change[:-8], "expected a refresh"),
        (replace(said, change="refresh/" + "0" * 64), change, "its payload is damaged"),
        (replace(said, payload="surrogate/" + "0" * 64), change, "its payload is damaged"),
        (replace(said, base=said.payload), change, "is damaged: expected sha256"),
        (replace(said, base="../nowhere"), change, "expected a payload's name"),
        (replace(said, base="surrogate/" + "0" * 64), change, "was never put there"),
    ):
        name, defect = cluster.checks.keep(cluster.store, wrong, data)
        assert why in defect, defect
        assert not name or why == "its payload is damaged"
    assert a.driver.machine.done >= 8


def test_who_spoke_for_others_experts_is_sent_these_whole_when_it_does_no_more(tmp_path: Path) -> None:
    """While it speaks it may connect anew and be sent what it has published itself."""
    plan = make_plan(tmp_path, steps=80, delta_rank=1, composers=3, batch_size=6, replicas=2)
    cluster = MixtureCluster(tmp_path, plan, seed=21, grace_s=2.0)
    for name in ("a", "b", "c"):
        cluster.start(name)
    cluster.until(lambda: all(w.driver.machine.done >= 6 for w in cluster.workers.values()))
    by_shard = {w.driver.machine.shard: w for w in cluster.workers.values()}
    first, second = by_shard[0], by_shard[1]
    cluster.kill(first)
    cluster.until(lambda: any(record.by == 1 for record in of_kind(cluster, SurrogatesRefreshed)))
    take_step, second.driver._step = second.driver._step, lambda: None  # it will be overtaken
    cluster.cut(second)
    cluster.connect(second)
    cluster.until(lambda: second.driver.machine.connected and 0 in second.driver.machine.speaks)
    again = cluster.start(first.name)
    cluster.until(lambda: again.driver.machine.composes)
    cluster.until(lambda: second.driver.machine.speaks == (1,))
    second.driver._step = take_step
    assert cluster.finish().ok
    said = [s for s in cluster.sent if isinstance(s, m.PublishSurrogates) and s.of == 0 and s.shard == 0]
    assert said[-1].change
    check_banks(cluster)
    check_streams(cluster)
