"""Surrogates that travel as changes of low rank or of few bits: composers have the owner's bits, or get whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixture_checks import check_streams, of_kind
from mixture_stage import MixtureStage, Worker, make_plan
from moe_support import BASE, TINY, train
from msgspec.structs import replace

from planetary.artifacts.packed_arrays import pack_arrays
from planetary.core.errors import ProtocolError, RemoteProtocolError, TrustError, UserError
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.methods.delta import Delta, expand
from planetary.runs.mixture.methods.surrogate import surrogate_message
from planetary.runs.mixture.methods.tiers import Cadence
from planetary.runs.mixture.payloads.surrogates import (
    change_bytes,
    changed_surrogates,
    empty_bank,
    install,
    messages_of,
    surrogates_bytes,
    surrogates_from,
)
from planetary.runs.mixture.records import SurrogatesRefreshed
from planetary.runs.mixture.training.composer import install as fitted_into

ROWS = TINY.n_latent, 3
COPIES = {"rank": TINY.n_hidden, "refresh_form": "4bit"}
FORMS = pytest.mark.parametrize(
    "form", [{"delta_rank": 1}, {"refresh_form": "bf16"}, {"refresh_form": "4bit"}, COPIES], ids=str
)


def started(folder: Path, form: dict[str, Any]) -> tuple[MixtureStage, Worker, Worker]:
    """Two composers whose surrogates have gone on by changes for a while."""
    cluster = MixtureStage(folder, make_plan(folder, steps=40, **form), seed=5)
    workers = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: min(w.machine.done for w in workers) >= 8)
    return cluster, *workers


def check_banks(cluster: MixtureStage) -> None:
    """Every composer has of the others exactly what the store has."""
    cluster.settle(2.0)
    for worker in cluster.workers.values():
        bank = worker.driver.bank
        assert bank is not None
        for number, shard in enumerate(cluster.controller.state.shards):
            if number in worker.machine.speaks:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "numbers"),
    [
        ({"delta_rank": 1}, 4 * 2 * sum(ROWS)),
        ({"refresh_form": "bf16"}, 2 * 2 * ROWS[0] * ROWS[1]),
        ({"refresh_form": "4bit"}, (8 * 2 + 8 * 4) + (3 * 4 + 3 * 4)),  # rows of 3 are padded to 4; a scale for each
    ],
)
def test_change_gives_the_owners_bits_to_holders_of_its_base(
    tmp_path: Path, form: dict[str, Any], numbers: int
) -> None:
    plan = make_plan(tmp_path, steps=4, **form)
    trainer, states, _ = train(2, **form)
    before, state = states[-1].surrogates, states[-1].composers[0]
    assert before is not None
    fits = trainer.steps.fit(state, before)
    messages = messages_of(fits, 0, 2)
    data = change_bytes(messages, fits)
    experts = len(fits[0].experts)
    assert [fit.nbytes for fit in fits] == [numbers * experts] * TINY.n_layer
    assert [fit.nbytes for fit in trainer.steps.fit(state, before, whole=True)] == [
        experts * 2 * ROWS[0] * ROWS[1] * 4
    ] * TINY.n_layer
    for found, sent in zip(changed_surrogates(data, before.of, plan.training), messages, strict=True):
        assert (found.a == sent.a).all()
        assert (found.b == sent.b).all()
        assert found.checksum == sent.checksum
    with pytest.raises(TrustError, match="damaged"):
        install(empty_bank(plan), changed_surrogates(data, empty_bank(plan).of, plan.training), plan)
    fields = {"layer": 0, "expert": 0, "owner": 0, "version": 1, "checksum": ""}
    for wrong in (fields, fields | {"layer": 9}):
        with pytest.raises(RemoteProtocolError, match=r"lack '0\.a\.0'|another model"):
            changed_surrogates(pack_arrays("refresh", [wrong], {}), before.of, plan.training)
    other = {f"0.{name}.{part}": np.zeros(5, np.float32) for name in "ab" for part in "01"}
    with pytest.raises(ProtocolError, match=r"not fit|need codes"):
        changed_surrogates(pack_arrays("refresh", [fields], other), before.of, plan.training)
    whole = trainer.steps.fit(state, before, whole=True)
    assert not any(fit.changes for fit in whole)
    assert whole[0].nbytes > fits[0].nbytes


@FORMS
@pytest.mark.slow
def test_surrogates_travel_as_changes_after_the_first_refresh(tmp_path: Path, form: dict[str, Any]) -> None:
    cluster, *_ = started(tmp_path, form)
    assert cluster.finish().ok
    said = [s for s in cluster.sent if isinstance(s, mm.PublishSurrogates)]
    told = [s for s in cluster.told if isinstance(s, mm.SurrogatesReady)]
    assert len(said) == len(of_kind(cluster, SurrogatesRefreshed))
    assert all(s.change for s in said)
    assert [s.step for s in told if not s.change] == [0, 0, 0, 0]  # what it starts from
    check_banks(cluster)
    check_streams(cluster)


@FORMS
@pytest.mark.parametrize("lost", ["the base", "the connection", "the gateway", "the store"])
@pytest.mark.slow
def test_an_unchangeable_surrogate_is_sent_whole_once(tmp_path: Path, lost: str, form: dict[str, Any]) -> None:
    cluster, a, b = started(tmp_path, form)
    state, shard = cluster.controller.state, a.machine.shard
    if lost == "the base":
        name = state.shards[shard].surrogates
        cluster.store.remove(name)
    elif lost == "the connection":
        cluster.cut(a)
        cluster.until(lambda: a.machine.done >= 14)
        cluster.connect(a)
    elif lost == "the gateway":
        cluster.restart_gateway()
    else:
        cluster.store_away = True
        cluster.until(lambda: min(a.machine.done, b.machine.done) >= 14)
        cluster.store_away = False
    begin = len(cluster.sent)
    assert cluster.finish().ok
    said = [s for s in cluster.sent[begin:] if isinstance(s, mm.PublishSurrogates) and s.shard == shard]
    whole = [i for i, s in enumerate(said) if not s.change]
    assert len(whole) == 1
    assert whole[0] <= 2
    assert len(said) > whole[0] + 5
    assert of_kind(cluster, SurrogatesRefreshed)[-1].change
    check_banks(cluster)
    check_streams(cluster)


@pytest.mark.slow
def test_damaged_or_wrong_change_does_not_count(tmp_path: Path) -> None:
    cluster, a, _ = started(tmp_path, {"delta_rank": 1})
    said = next(s for s in reversed(cluster.sent) if isinstance(s, mm.PublishSurrogates) and s.shard == 0)
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
    assert a.machine.done >= 8


@pytest.fixture(scope="module")
def refreshed(tmp_path_factory: pytest.TempPathFactory) -> MixtureStage:
    """A mixture whose first shard has published surrogates; the checks of a message change nothing."""
    return started(tmp_path_factory.mktemp("refreshed"), COPIES)[0]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["shape", "type", "twice", "missing", "another's", "NaN"])
def test_surrogates_must_be_all_experts_of_their_shard(refreshed: MixtureStage, wrong: str) -> None:
    """Surrogates that are not those of all experts of a shard are refused."""
    cluster = refreshed
    said = next(s for s in reversed(cluster.sent) if isinstance(s, mm.PublishSurrogates) and s.of == 0)
    ones = [
        {"owner": 0, "version": 9, "a": one.a, "b": one.b, "layer": one.layer, "expert": one.expert}
        for one in surrogates_from(cluster.store.get(said.payload))
    ]
    assert cluster.checks.defect(said, surrogates_bytes([surrogate_message(**one) for one in ones])) == ""
    expected = "not the surrogates of all experts of shard 0"
    if wrong == "shape":
        ones[0]["a"], expected = ones[0]["a"][:1], "its A of layer 0 expert 0 is float32[1, 12]"
    elif wrong == "type":
        ones[0]["b"], expected = ones[0]["b"].astype(np.int32), "its B of layer 0 expert 0 is int32[12, 8]"
    elif wrong == "twice":
        ones.append(ones[0])
    elif wrong == "missing":
        del ones[0]
    elif wrong == "another's":
        ones[0]["layer"] = -1  # as numpy counts, it would be the last one
    else:
        ones[0]["a"], expected = ones[0]["a"] * np.nan, "A of layer 0 expert 0 contains NaN"
    found = cluster.checks.defect(said, surrogates_bytes([surrogate_message(**one) for one in ones]))
    assert expected in found, found


@pytest.mark.slow
def test_a_former_speaker_is_sent_surrogates_whole(tmp_path: Path) -> None:
    """While it speaks it may connect anew and be sent what it has published itself."""
    plan = make_plan(tmp_path, steps=80, delta_rank=1, composers=3, batch_size=6, replicas=2)
    cluster = MixtureStage(tmp_path, plan, seed=21, grace_s=2.0)
    for name in ("a", "b", "c"):
        cluster.start(name)
    cluster.until(lambda: all(w.machine.done >= 6 for w in cluster.workers.values()))
    by_shard = {w.machine.shard: w for w in cluster.workers.values()}
    first, second = by_shard[0], by_shard[1]
    cluster.kill(first)
    cluster.until(lambda: any(record.by == 1 for record in of_kind(cluster, SurrogatesRefreshed)))
    go_on = second.take_no_step()  # it will be overtaken
    cluster.cut(second)
    cluster.connect(second)
    cluster.until(lambda: second.machine.connected and 0 in second.machine.speaks)
    again = cluster.start(first.name)
    cluster.until(lambda: again.machine.composes)
    cluster.until(lambda: second.machine.speaks == (1,))
    go_on()
    assert cluster.finish().ok
    said = [s for s in cluster.sent if isinstance(s, mm.PublishSurrogates) and s.of == 0 and s.shard == 0]
    assert said[-1].change
    check_banks(cluster)
    check_streams(cluster)


@pytest.mark.slow
def test_four_bit_copy_stays_within_the_last_change() -> None:
    """What a change drops is in the next one: errors do not add up, and once nothing changes they vanish."""
    cadence = Cadence(backbone=2, refresh=1)
    trainer, states, _ = train(6, cadence=cadence, **COPIES)
    bank, owned = states[-1].surrogates, states[-1].composers[0]
    before = states[-2].composers[0]
    assert bank is not None
    for slot, expert in enumerate(owned.slots[0]):
        wanted, moved = owned.experts[0]["up"][slot], owned.experts[0]["up"][slot] - before.experts[0]["up"][slot]
        assert 0 < np.linalg.norm(bank.a[0][expert] - wanted) < 0.5 * np.linalg.norm(moved)
    left = []
    for _ in range(8):
        bank = fitted_into(bank, trainer.steps.fit(owned, bank), 9)
        left.append(np.abs(bank.a[0][owned.slots[0]] - owned.experts[0]["up"]).max())
    assert left[-1] < 1e-3 * left[0]


def test_two_ways_to_send_changes_are_refused_together() -> None:
    with pytest.raises(UserError, match=r'delta_rank = 1 and moe\.refresh_form = "4bit" are two ways'):
        replace(BASE, delta_rank=1, refresh_form="4bit")
