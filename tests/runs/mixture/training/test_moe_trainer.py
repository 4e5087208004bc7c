"""Composers, syncer, refresh and expert workers in lock step: the exact cases, cadences, and refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from lockstep_trainer import MoeTrainer
from moe_support import BASE, OPTIONS, TINY, TOGETHER, Interpreted, batch, model_of, train
from msgspec.structs import replace

from planetary.compiler.check.interpreter import run_interpreter
from planetary.compiler.frontend.export import export_model
from planetary.compiler.step.train_step import build_train_step
from planetary.core.errors import NumericsError, UserError
from planetary.runs.mixture.cost import cost
from planetary.runs.mixture.methods.acceptance import Policy, Refusal
from planetary.runs.mixture.methods.tiers import Cadence, Tier, tier_of
from planetary.runs.mixture.training.composer import ComposerSteps
from planetary.runs.mixture.training.participant_states import TrainingState, merged_model


def test_float_offload_equals_direct_ownership_bit_for_bit() -> None:
    """Offload from the owners' float sketches equals direct ownership bit for bit."""
    cadence = Cadence(backbone=2, refresh=2)
    _, direct, _ = train(4, cadence=cadence)
    _, offload, reports = train(4, cadence=cadence, sketches="owner")
    expected, found = model_of(direct[-1]), model_of(offload[-1])
    assert all((found[name] == value).all() for name, value in expected.items())
    assert any((value != model_of(direct[0])[name]).any() for name, value in expected.items() if "up" in name)
    assert all(report.sketch_bytes > 0 for report in reports)


@pytest.mark.slow
def test_ternary_experts_learn_the_same_when_offloaded() -> None:
    """But for rounding: under offload composers get the scales, which their program would add up in another order."""
    config = replace(TINY, ternary=True)
    _, direct, _ = train(6, config)
    _, offload, _ = train(6, config, sketches="owner")
    start, expected, found = model_of(direct[0]), model_of(direct[-1]), model_of(offload[-1])
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) < 2e-5 * np.linalg.norm(value - start[name]), name
    assert all((value != start[name]).any() for name, value in expected.items() if "up" in name)


@pytest.mark.slow
def test_exact_copies_without_horizons_are_end_to_end_training() -> None:
    config = replace(TINY, balance=0.0)  # the mean of balances over parts of a batch is not the whole batch's
    alone, one, first = train(6, config, composers=1, rank=0, cadence=TOGETHER)
    copies = {"rank": TINY.n_hidden, "detach": False, "sketches": "all", "cadence": TOGETHER}
    trainer, two, second = train(6, config, **copies)
    for a, b in zip(first, second, strict=True):
        assert b.cross_entropy == pytest.approx(a.cross_entropy, rel=1e-5)
    tokens, targets = batch(100)
    halves = [(tokens[:2], targets[:2]), (tokens[2:], targets[2:])]
    seen = alone.evaluate(two[-1], [(tokens, targets)])
    assert [trainer.evaluate_composer(two[-1], c, halves) for c in range(2)] == pytest.approx([seen, seen], rel=1e-4)
    assert alone.evaluate(one[-1], [(tokens, targets)]) == pytest.approx(seen, rel=1e-5)
    start, moved = model_of(one[0]), model_of(one[-1])
    for name, value in moved.items():
        travelled = np.linalg.norm(value - start[name])
        assert travelled > 0
        assert np.linalg.norm(model_of(two[-1])[name] - value) < 1e-4 * travelled, name


def test_tiers_merge_at_horizons_and_routers_never_differ() -> None:
    _, states, reports = train(4, cadence=Cadence(router=1, latent=2, backbone=4, refresh=3))
    assert [report.merged for report in reports] == [
        (),
        ((Tier.LATENT, 0),),
        (),
        ((Tier.LATENT, 0), (Tier.BACKBONE, 0)),
    ]
    assert [np.isnan(report.surrogate_error) for report in reports] == [True, True, False, True]

    def apart(state: TrainingState, tier: Tier) -> bool:
        first, second = (c.dense for c in state.composers)
        return any((first[n] != second[n]).any() for n in first if tier_of(n) is tier)

    assert not any(apart(state, Tier.ROUTER) for state in states)
    assert [apart(state, Tier.LATENT) for state in states] == [False, True, False, True, False]
    assert [apart(state, Tier.BACKBONE) for state in states] == [False, True, True, True, False]
    assert states[3].surrogates is not None
    assert (states[3].surrogates.versions == 3).all()


def test_warm_start_is_training_with_every_horizon_1() -> None:
    """A warm start is training with every horizon 1 and merges start from its end."""
    cadence = Cadence(backbone=2, refresh=3)
    trainer, warm, reports = train(4, cadence=replace(cadence, warm_start=2))
    _, together, _ = train(2, cadence=TOGETHER)
    for name, value in model_of(together[-1]).items():
        assert (model_of(warm[2])[name] == value).all(), name
    assert [report.merged for report in reports] == [(), (), (), ((Tier.BACKBONE, 0),)]
    start = warm[2].composers[0].dense
    assert all((value == start[name]).all() for name, value in warm[2].syncer.start.items())
    tokens = batch(9)[0][:2]
    alike, apart = trainer.agreement(warm[2], tokens), trainer.agreement(warm[3], tokens)
    assert (alike.overlap, alike.divergence) == (1.0, 0.0)  # one layer: experts do not reach its router
    assert apart.overlap <= 1
    assert 0 < apart.divergence < 1


def test_a_step_leaves_the_state_before_it_as_it_was() -> None:
    trainer, states, _ = train(2, cadence=TOGETHER, sketches="all")
    again, _ = trainer.step(states[1], *batch(1))
    expected = model_of(states[2])
    assert all((value == expected[name]).all() for name, value in model_of(again).items())


def test_refused_updates_leave_experts_and_are_counted() -> None:
    _, states, reports = train(2, sketches="owner", acceptance=Policy(norm_ratio=1e-6))
    experts = TINY.n_layer * TINY.n_expert
    assert all(len(report.verdicts) == experts for report in reports)
    refused = {v.refusal for report in reports for v in report.verdicts}
    assert refused <= {Refusal.TOO_LARGE, Refusal.NO_GAIN}
    assert Refusal.TOO_LARGE in refused
    for before, after in zip(states[0].composers, states[2].composers, strict=True):
        assert (after.experts[0]["up"] == before.experts[0]["up"]).all()
        assert (after.expert_moments[0]["adam.mean.up"] == 0).all()
    _, _, open_reports = train(2, sketches="owner", acceptance=Policy(norm_ratio=10))
    assert sum(v.accepted for report in open_reports for v in report.verdicts) >= experts


def test_more_inner_steps_go_further_and_trust_holds_them_back() -> None:
    def distance(**options: Any) -> float:
        _, states, _ = train(1, sketches="owner", **options)
        return float(np.linalg.norm(model_of(states[1])["0.up"] - model_of(states[0])["0.up"]))

    plain = distance()
    assert distance(inner_steps=3) > 1.5 * plain
    assert distance(inner_steps=3, trust=1.0) < distance(inner_steps=3)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_one_composer_takes_ordinary_steps_bit_for_bit(optimizer: str) -> None:
    """Without clipping: an ordinary step clips all gradients by one norm, a composer each tier by its own.

    Interpreted, because XLA fuses the two programs differently.
    """
    options = replace(OPTIONS, optimizer=optimizer, clip_norm=0.0)
    training = replace(BASE, composers=1, rank=0, cadence=TOGETHER, dense=options, experts=options)
    trainer = MoeTrainer(TINY, training, optimise=False)
    parts = Interpreted(trainer.composer.program), Interpreted(trainer.expert.program)
    trainer.steps = ComposerSteps(TINY, training, trainer.batch, *parts)
    config = replace(TINY, batch_size=trainer.batch)
    ordinary = build_train_step(export_model("planetary.models.latent_moe:build", msgspec.to_builtins(config)), options)
    spec, state = ordinary.spec, trainer.initial()
    names = [param.name for param in spec.params]
    held = [merged_model(state, TINY)[name] for name in names]
    moments = [np.zeros(one.shape, {"f32": np.float32, "i32": np.int32}[one.dtype]) for one in spec.opt_state]
    kinds = [*(one.dtype for one in (*spec.params, *spec.opt_state)), "f32", "f32"]
    for step in range(3):
        tokens, targets = batch(step)
        before, (state, _) = state, trainer.step(state, tokens, targets)
        rate = np.float32(training.dense_schedule.rate(step))
        arguments = [*held, *moments, np.int32(step), rate, tokens, targets]
        results = run_interpreter(ordinary.portable, "train_step", arguments, kinds)
        held, moments = results[: len(held)], results[len(held) : -2]
        for name, value in zip(names, held, strict=True):
            assert (merged_model(state, TINY)[name] == value).all(), name
            assert (merged_model(before, TINY)[name] != value).any(), name


def test_four_bit_sketches_have_the_cost_models_bytes() -> None:
    _, _, reports = train(1, sketches="all", precision="4bit")
    shape = cost.MoeShape("tiny", TINY.n_layer, TINY.n_expert, TINY.n_active, 8, TINY.n_hidden, 3, 1e6)
    tokens = 2 * TINY.sequence_length
    padded = tokens * 2 * 8 // 2  # rows of 8 numbers need no padding
    assert padded == cost.sketch_bytes(shape, tokens)[0]
    assert reports[0].sketch_bytes == 2 * cost.sketch_bytes(shape, tokens)[1]


def test_lossy_updates_still_train_and_send_less() -> None:
    """Lossy updates and sketches of some tokens still train and send less."""
    _, exact, reports = train(3, sketches="owner")
    _, lossy, fewer = train(3, sketches="owner", update_form="topk", update_keep=0.25, sketch_fraction=0.5)
    assert fewer[0].update_bytes == reports[0].update_bytes * 0.25 * 2  # an index beside each number
    assert fewer[0].sketch_bytes == reports[0].sketch_bytes / 2
    composer = lossy[-1].composers[0]
    assert np.abs(composer.residuals[0]["up"]).max() > 0
    moved = [np.linalg.norm(model_of(s[-1])["0.up"] - model_of(s[0])["0.up"]) for s in (exact, lossy)]
    assert 0 < moved[1] < 2 * moved[0]


def test_low_rank_surrogates_send_less_and_follow_whole_ones() -> None:
    """Surrogates refreshed by low rank deltas send less and follow the whole ones."""
    cadence = Cadence(backbone=2, refresh=1)
    _, whole, full = train(3, cadence=cadence)
    _, parts, fewer = train(3, cadence=cadence, delta_rank=1)
    numbers = TINY.n_layer * TINY.n_expert * 2  # matrices of 8 by 3
    assert [r.surrogate_bytes for r in full] == [numbers * 8 * 3 * 4] * 3
    assert [r.surrogate_bytes for r in fewer] == [numbers * (8 + 3) * 4] * 3
    start, exact, near = (states.surrogates for states in (whole[0], whole[1], parts[1]))
    assert start is not None
    assert exact is not None
    assert near is not None
    for before, after, found in zip(start.b[0], exact.b[0], near.b[0], strict=True):
        assert 0 < np.linalg.norm(found - after) < np.linalg.norm(before - after)
        assert np.linalg.matrix_rank(found - before) == 1
    with pytest.raises(UserError, match="delta_rank: expected a whole number >= 0"):
        replace(BASE, delta_rank=-1)


def test_unevenly_shared_mixture_trains_all_its_experts() -> None:
    """A mixture that the composers cannot share evenly trains all its experts."""
    trainer = MoeTrainer(TINY, BASE, np.array([[1, 0, 1]], np.int32), optimise=False)
    first = trainer.initial()
    after, _ = trainer.step(first, *batch(0))
    before, found = model_of(first)["0.up"], model_of(after)["0.up"]
    assert all((before[e] != found[e]).any() for e in range(3))
    assert after.composers[0].slots.tolist() == [[1, -1]]
    assert (after.composers[0].experts[0]["up"][1:] == 0).all()


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="4 sequences cannot be divided among 3"):
        replace(BASE, composers=3)
    with pytest.raises(UserError, match="about expert workers"):
        replace(BASE, inner_steps=2)
    with pytest.raises(UserError, match="ownership map for 2 composers"):
        MoeTrainer(TINY, BASE, np.array([[0, 1, 2]], np.int32), optimise=False)
    trainer, states, _ = train(0)
    broken = dict(states[0].composers[0].dense)
    broken["head.weight"] = np.full_like(broken["head.weight"], np.nan)
    composers = (replace(states[0].composers[0], dense=broken), states[0].composers[1])
    with pytest.raises(NumericsError, match="step 0"):
        trainer.step(replace(states[0], composers=composers), *batch(0))
