"""Expert workers with false claims, harmful updates or disagreement; and redundant work of honest ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lockstep_trainer import expert_runner
from mixture_checks import check_equal, check_streams, composing, of_kind, spoil, trained
from mixture_stage import MixtureStage, make_plan
from moe_support import OPTIONS, TINY, worker
from msgspec.structs import replace

from planetary.core.configuration.step_options import StepOptions
from planetary.models.initial import draw
from planetary.models.latent_moe import expert_parameters
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.methods.acceptance import Policy, Refusal
from planetary.runs.mixture.methods.delta import Delta
from planetary.runs.mixture.methods.sketch import Sketch, encode
from planetary.runs.mixture.records import ExpertsAdvanced, SyncNote
from planetary.runs.mixture.training.audit import FEW_ROWS, audit, disagreements, effect
from planetary.runs.mixture.training.expert_work import Improved, improve

SLOTS = np.array([0, 2], np.int32)


def some_sketch(seed: int, tokens: int = TINY.batch_size * TINY.sequence_length) -> Sketch:
    rng = np.random.default_rng(seed)
    u, g_y = (rng.standard_normal((tokens, TINY.n_latent)).astype(np.float32) for _ in range(2))
    ids = np.stack([rng.permutation(TINY.n_expert)[: TINY.n_active] for _ in range(tokens)])
    return Sketch(0, 1, 0, u, g_y * 0.01, np.sort(ids, axis=1), rng.random(ids.shape).astype(np.float32))


def experts(config: Any = TINY) -> dict[str, np.ndarray]:
    whole = draw({"layers": {"0": {"experts": expert_parameters(config, config.n_expert)}}}, 0)
    return {name: np.asarray(value)[SLOTS] for name, value in whole["layers"]["0"]["experts"].items()}


def made(trust: float = 0.0, steps: int = 1, seed: int = 1) -> tuple[dict[str, np.ndarray], Improved]:
    """Experts, and an honest worker's result with one sketch."""
    before = experts()
    run = worker()
    moments = {
        s.name: np.zeros_like(s.empty()) for s in run.program.functions["update"].arguments if s.name.startswith("adam")
    }
    improved = improve(
        run,
        before,
        moments,
        [encode(some_sketch(seed), "f32")],
        rate=3e-3,
        slots=SLOTS,
        experts=TINY.n_expert,
        inner_steps=steps,
        trust=trust,
        proxies=True,
    )
    return before, improved


def found(before: dict[str, np.ndarray], improved: Improved, other: Sketch | None = None, **options: float) -> dict:
    known = {"layer": 0, "slots": SLOTS, "config": TINY}
    return audit(before, improved, [some_sketch(1)], other, **known, **options)


@pytest.mark.parametrize(
    "options", [{}, {"activation": "swiglu"}, {"ternary": True}], ids=["relu2", "swiglu", "ternary"]
)
@pytest.mark.slow
def test_effect_of_an_update_is_the_change_of_the_proxy(options: dict) -> None:
    config = replace(TINY, **options)
    run = expert_runner(config, 2, TINY.batch_size * TINY.sequence_length, StepOptions(), False)
    before = experts(config)
    rng = np.random.default_rng(2)
    after = {n: v + 0.05 * rng.standard_normal(v.shape).astype(np.float32) for n, v in before.items()}
    sketch = some_sketch(3)
    gates = np.zeros((len(sketch.ids), config.n_expert), np.float32)
    np.put_along_axis(gates, sketch.ids, sketch.gates, axis=1)
    rows = {"u": sketch.inputs, "g_y": sketch.output_gradients, "gates": gates[:, SLOTS]}
    proxies = [run("proxy", {**weights, **rows})["proxy"].astype(np.float64) for weights in (before, after)]
    seen = effect(before, after, sketch, SLOTS, config)
    np.testing.assert_allclose(seen.change, proxies[1] - proxies[0], rtol=1e-3, atol=1e-7)
    assert (np.abs(seen.cosine) <= 1).all()
    assert seen.rows.tolist() == [(sketch.ids == e).sum() for e in SLOTS]


@pytest.mark.parametrize(("trust", "steps"), [(0.0, 1), (0.5, 3)])
def test_an_honest_claim_is_believed_and_a_false_one_named(trust: float, steps: int) -> None:
    before, improved = made(trust, steps)
    assert (improved.proxy_after < improved.proxy_before).all()
    assert found(before, improved, trust=trust) == {}
    backwards = {n: v - (improved.weights[n] - v) for n, v in before.items()}
    lied = found(before, replace(improved, weights=backwards), trust=trust)
    assert {slot: one.refusal for slot, one in lied.items()} == dict.fromkeys((0, 1), Refusal.FALSE_CLAIM)
    assert "layer 0 expert 2: it claims a gain of" in lied[1].why
    boast = replace(improved, proxy_before=improved.proxy_before + np.array([0, 1]))
    assert list(found(before, boast, trust=trust)) == [1]
    nonsense = {n: v * np.nan for n, v in before.items()}
    assert found(before, replace(improved, weights=nonsense)) == {}  # refused for what it is
    lossy = replace(improved, weights=backwards, deltas={"up": Delta("exact", (1,), ())})
    assert found(before, lossy) == {}  # its claim was about something else
    assert (
        audit(before, improved, [some_sketch(1)], None, layer=0, slots=np.array([0, -1]), config=TINY, trust=trust)
        == {}
    )


def test_an_update_that_harms_other_tokens_is_refused() -> None:
    before, _ = made()
    other = some_sketch(5, tokens=4 * FEW_ROWS)
    run = expert_runner(TINY, 2, len(other.ids), OPTIONS, False)
    gates = np.zeros((len(other.ids), TINY.n_expert), np.float32)
    np.put_along_axis(gates, other.ids, other.gates, axis=1)
    rows = {"u": other.inputs, "g_y": other.output_gradients, "gates": gates[:, SLOTS]}
    after = before
    for _ in range(12):
        gradients = run("gradients", {**after, **rows})
        after = {n: v + 0.03 * gradients[f"gradient.{n}"] for n, v in after.items()}
    seen = effect(before, after, other, SLOTS, TINY)
    assert (seen.cosine > 0.3).all()
    harmful = Improved(after, {}, np.zeros(2), -seen.change, deltas={"up": Delta("exact", (1,), ())})
    verdicts = found(before, harmful, other)
    assert {one.refusal for one in verdicts.values()} == {Refusal.HARMFUL}
    few = replace(other, inputs=other.inputs[:9], output_gradients=other.output_gradients[:9], ids=other.ids[:9])
    assert found(before, harmful, replace(few, gates=other.gates[:9])) == {}


def test_two_results_agree_up_to_rounding() -> None:
    before, improved = made()
    known = {"layer": 0, "slots": SLOTS}
    near = {n: v * np.float32(1 + 1e-6) for n, v in improved.weights.items()}
    assert disagreements(before, improved, replace(improved, weights=near), **known) == {}
    for wrong in (before, {n: v * np.nan for n, v in before.items()}):
        verdicts = disagreements(before, improved, replace(improved, weights=wrong), **known)
        assert {one.refusal for one in verdicts.values()} == {Refusal.DISAGREEMENT}
        assert sorted(verdicts) == [0, 1]


# --- on the fabric ----------------------------------------------------------------------------------------------


def begin(folder: Path, names: str, steps: int = 24, **checks: float) -> MixtureStage:
    policy = Policy(norm_ratio=10, **checks)
    cluster = MixtureStage(folder, make_plan(folder, steps=steps, sketches="owner", acceptance=policy), seed=9)
    for name in names:
        cluster.start(name)
    return cluster


def boasting(improved: Improved) -> Improved:
    return replace(improved, proxy_before=improved.proxy_before + 1)


def other_weights(improved: Improved) -> Improved:
    return replace(improved, weights={n: v * np.float32(0.9) for n, v in improved.weights.items()})


@pytest.mark.parametrize("sketches", [pytest.param("owner", marks=pytest.mark.slow), "all"])
def test_checked_work_of_honest_workers_changes_nothing(tmp_path: Path, sketches: Any) -> None:
    policy = Policy(norm_ratio=10, redundant=0.5, audited=1.0)
    plan = make_plan(tmp_path, steps=4, pace="lockstep", sketches=sketches, precision="4bit", acceptance=policy)
    cluster = MixtureStage(tmp_path, plan)
    for name in "abcd":
        cluster.start(name)
    assert cluster.finish().ok
    state = trained(plan)
    for composer in state.composers:
        check_equal(composing(cluster, composer.number).dense, composer.dense)
    assert not of_kind(cluster, SyncNote)
    given = [s for s in cluster.told if isinstance(s, mm.ImproveExperts)]
    updates = of_kind(cluster, ExpertsAdvanced)
    assert len(updates) == plan.steps * plan.model.n_layer * plan.training.composers
    twice = len(given) - len(updates)
    assert 0 < twice < len(updates)
    places = [(s.shard, s.layer, s.progress) for s in given]
    assert len(set(places)) == len(updates)


@pytest.mark.slow
def test_false_gains_change_nothing_and_end_after_three(tmp_path: Path) -> None:
    """A worker that claims false gains changes nothing and is used no more after three."""
    cluster = begin(tmp_path, "abw", audited=1.0)
    spoil(cluster.workers["w"], boasting)
    cluster.until(lambda: "w" in cluster.controller.membership.banned)
    assert not any(record.accepted for record in of_kind(cluster, ExpertsAdvanced))
    assert "it claims a gain of" in cluster.controller.membership.banned["w"]
    notes = of_kind(cluster, SyncNote)
    assert [note.what for note in notes] == ["false claim"] * 3
    assert all(note.why.startswith("w: layer") for note in notes)
    cluster.until(lambda: cluster.workers["w"].session == 0)
    cluster.start("x")
    assert cluster.finish().ok
    assert {r.worker for r in of_kind(cluster, ExpertsAdvanced) if r.accepted} == {"x"}
    assert sum(line.own.updates.get("false claim", 0) for line in cluster.lines) > 0
    check_streams(cluster)


@pytest.mark.slow
def test_disputed_updates_do_not_count_and_name_both_workers(tmp_path: Path) -> None:
    """Updates that two workers do not agree about do not count and both are named."""
    cluster = begin(tmp_path, "abvw", redundant=1.0)
    spoil(cluster.workers["w"], other_weights)
    assert cluster.finish().ok
    updates = of_kind(cluster, ExpertsAdvanced)
    assert updates
    assert not any(record.accepted for record in updates)
    assert {reason for record in updates for reason in record.refused} <= {"disagreement", "no gain"}
    notes = [note.why for note in of_kind(cluster, SyncNote) if note.what == "disagreement"]
    assert all(why.startswith(("v and w:", "w and v:")) for why in notes)
    assert len(notes) == len(updates)
    assert {record.version for record in updates} == {0}
    check_streams(cluster, all_moved=False)


@pytest.mark.slow
def test_work_for_two_is_judged_alone_without_the_second(tmp_path: Path) -> None:
    cluster = begin(tmp_path, "abvw", steps=40, redundant=1.0)
    cluster.until(lambda: len(of_kind(cluster, ExpertsAdvanced)) > 2)
    for name in ("v", "w"):  # in the middle of the second's work, or before it
        one = cluster.workers.get(name)
        assert one is not None
        enough = len(of_kind(cluster, ExpertsAdvanced)) + 2
        cluster.kill(one)
        cluster.until(lambda enough=enough: len(of_kind(cluster, ExpertsAdvanced)) > enough)
        cluster.start(name)
    assert cluster.finish().ok
    assert not [note for note in of_kind(cluster, SyncNote) if note.what == "disagreement"]
    assert all(record.accepted for record in of_kind(cluster, ExpertsAdvanced)[:3])
    check_streams(cluster)
