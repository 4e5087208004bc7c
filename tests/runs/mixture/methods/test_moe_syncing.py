"""Merging, tiers and cadences; acceptance of updates."""

from __future__ import annotations

import numpy as np
import pytest
from lockstep_trainer import mean_gradients
from msgspec.structs import replace

from planetary.core.errors import LocalProtocolError, NumericsError, UserError
from planetary.core.tensors import TensorSpec
from planetary.runs.mixture.methods.acceptance import ExpertState, Policy, Refusal, Update, Verdict, judge
from planetary.runs.mixture.methods.averaging import FragmentMergeRule, PublishedParameters, merge
from planetary.runs.mixture.methods.moments import MomentRule
from planetary.runs.mixture.methods.tiers import Cadence, Tier, fragments_by_bytes, names_of, tier_of
from planetary.sync.radial import radial_average, weighted_mean

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_merged_delta_has_mean_length_and_mean_direction() -> None:
    a, b = np.array([3.0, 0.0]), np.array([0.0, 1.0])
    found = radial_average([a, b], [1.0, 3.0])
    assert np.linalg.norm(found) == pytest.approx((1 * 3 + 3 * 1) / 4)
    np.testing.assert_allclose(found / np.linalg.norm(found), np.array([1.0, 3.0]) / np.sqrt(10))


def test_equal_deltas_merge_unchanged_and_opposite_to_the_mean() -> None:
    delta = normal(4, 5).astype(np.float64)
    np.testing.assert_allclose(radial_average([delta, delta], [1.0, 2.0]), delta)
    np.testing.assert_allclose(radial_average([delta, -delta], [1.0, 1.0]), 0 * delta, atol=1e-12)
    np.testing.assert_allclose(radial_average([delta, -2 * delta], [1.0, 1.0]), -0.5 * delta)
    assert (radial_average([0 * delta, 0 * delta], [1.0, 1.0]) == 0).all()


def test_a_composer_alone_gets_its_parameters_back_bit_for_bit() -> None:
    before, after = {"w": normal(9, 3)}, {"w": normal(9, 3)}
    found, _ = merge(before, {}, [PublishedParameters(0, after, 100, 5)])
    assert (found["w"] == after["w"]).all()


def test_embeddings_and_plain_merges_take_the_weighted_mean() -> None:
    before = {"embedding.weight": normal(4, 2), "w": normal(4, 2)}
    ends = [{name: normal(4, 2) for name in before} for _ in range(3)]
    published = [PublishedParameters(i, ends[i], 10 * (i + 1), 2) for i in range(3)]
    weights = [p.weight for p in published]
    assert weights == [50, 200, 450]
    radial, _ = merge(before, {}, published)
    plain, _ = merge(before, {}, published, FragmentMergeRule(radial=False))
    mean = {name: weighted_mean([e[name] for e in ends], weights) for name in before}
    np.testing.assert_allclose(radial["embedding.weight"], mean["embedding.weight"], rtol=1e-6)
    np.testing.assert_allclose(plain["w"], mean["w"], rtol=1e-6)
    assert np.abs(radial["w"] - mean["w"]).max() > 0.01


def test_outer_step_is_nesterov_in_any_order_of_arrival() -> None:
    """The outer step is Nesterov's and the order of arrival does not matter."""
    before, velocity = {"w": normal(3, 3)}, {"w": normal(3, 3)}
    published = [PublishedParameters(i, {"w": normal(3, 3)}, 10, 1) for i in range(3)]
    rule = FragmentMergeRule(rate=0.7, momentum=0.5)
    theta, v = merge(before, velocity, published, rule)
    delta = radial_average([before["w"].astype(np.float64) - p.tensors["w"] for p in published], [1, 1, 1])
    expected = 0.5 * velocity["w"] + delta
    np.testing.assert_allclose(v["w"], expected, rtol=1e-5)
    np.testing.assert_allclose(theta["w"], before["w"] - 0.7 * (delta + 0.5 * expected), rtol=1e-4, atol=1e-6)
    again, _ = merge(before, velocity, published[::-1], rule)
    assert (again["w"] == theta["w"]).all()


def test_merges_that_cannot_be_are_refused() -> None:
    one = PublishedParameters(0, {"w": normal(2)}, 1, 1)
    with pytest.raises(LocalProtocolError, match="no composer"):
        merge({"w": normal(2)}, {}, [])
    with pytest.raises(LocalProtocolError, match="twice"):
        merge({"w": normal(2)}, {}, [one, one])
    with pytest.raises(LocalProtocolError, match="0 tokens"):
        merge({"w": normal(2)}, {}, [replace(one, tokens=0)])
    with pytest.raises(NumericsError, match="'w'"):
        merge({"w": normal(2)}, {}, [replace(one, tensors={"w": np.full(2, np.nan, np.float32)})])


def test_gradients_are_averaged_by_tokens() -> None:
    found = mean_gradients([{"w": np.float32([1])}, {"w": np.float32([5])}], [3, 1])
    assert found["w"].tolist() == [2]


def test_parameters_belong_to_tiers_by_name() -> None:
    names = {
        "layers.1.router.weight": Tier.ROUTER,
        "layers.1.latent.down": Tier.LATENT,
        "layers.1.experts.up": Tier.EXPERTS,
        "layers.0.attention.q_proj.weight": Tier.BACKBONE,
        "embedding.weight": Tier.BACKBONE,
    }
    assert {name: tier_of(name) for name in names} == names
    specs = [TensorSpec(name, "f32", (1,)) for name in names]
    assert names_of(specs, Tier.BACKBONE) == ("layers.0.attention.q_proj.weight", "embedding.weight")


def test_fragments_hold_every_tensor_once_and_about_equal_bytes() -> None:
    specs = [TensorSpec(f"t{i}", "f32", (int(n),)) for i, n in enumerate(RNG.integers(1, 1000, 40))]
    parts = fragments_by_bytes(specs, 6)
    assert sorted(name for part in parts for name in part) == sorted(s.name for s in specs)
    sizes = [sum(s.nbytes for s in specs if s.name in part) for part in parts]
    assert max(sizes) - min(sizes) <= max(s.nbytes for s in specs)
    assert len(fragments_by_bytes(specs[:2], 6)) == 2
    assert all(fragments_by_bytes([TensorSpec(f"e{i}", "f32", (0,)) for i in range(3)], 3))


def test_tiers_are_due_at_horizons_and_fragments_in_turn() -> None:
    """Tiers are due at their horizons and backbone fragments one after the other."""
    cadence = Cadence(router=1, latent=2, backbone=8, backbone_fragments=4)
    due = {step: cadence.due(step) for step in range(1, 25)}
    assert due[1] == ((Tier.ROUTER, 0),)
    assert due[8] == ((Tier.ROUTER, 0), (Tier.LATENT, 0), (Tier.BACKBONE, 0))
    assert [f for step in range(9, 17) for tier, f in due[step] if tier is Tier.BACKBONE] == [1, 2, 3, 0]
    assert all(len([1 for tier, _ in found if tier is Tier.BACKBONE]) <= 1 for found in due.values())
    assert Cadence(refresh=5).refresh_due(10)
    warm = Cadence(backbone=4, refresh=5, warm_start=8)
    assert [warm.refresh_due(step) for step in (1, 8, 9, 10)] == [True, True, False, True]
    assert [step for step in range(1, 17) for tier, _ in warm.due(step) if tier is Tier.BACKBONE] == [12, 16]
    assert warm.of_step(8) == Cadence(1, 1, 1, 1)
    assert warm.of_step(9) == Cadence(backbone=4, refresh=5)
    with pytest.raises(UserError, match="multiple of the backbone's horizon 8, found 4"):
        Cadence(warm_start=4)
    with pytest.raises(UserError, match=r"found 4, 2, 8: set moe\.latent_every to at least 4"):
        Cadence(router=4, latent=2)
    with pytest.raises(UserError, match="backbone_fragments"):
        Cadence(backbone=2, backbone_fragments=3)


STATE = ExpertState(1, 5, 2, 7, {"up": np.full((3, 3), 1.0, np.float32)})
UPDATE = Update(1, 5, 2, 6, {"up": np.full((3, 3), 0.01, np.float32)}, {"m": np.ones((3, 3), np.float32)}, 0.0, -1.0)


def verdict_on(update: Update, policy: Policy) -> Verdict:
    return judge(STATE, update, policy, MomentRule())


def test_a_good_update_counts_and_says_which_version_it_makes() -> None:
    verdict = verdict_on(UPDATE, Policy())
    assert verdict.accepted
    assert "version 8" in verdict.why


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"expert": 4}, Refusal.WRONG_OWNER),
        ({"owner": 3}, Refusal.WRONG_OWNER),
        ({"base_version": 8}, Refusal.FUTURE),
        ({"base_version": 4}, Refusal.STALE),
        ({"proxy_after": float("nan")}, Refusal.NOT_FINITE),
        ({"deltas": {"up": np.full((3, 3), np.inf, np.float32)}}, Refusal.NOT_FINITE),
        ({"moments": {"m": np.full((3, 3), np.nan, np.float32)}}, Refusal.NOT_FINITE),
        ({"proxy_after": 0.0}, Refusal.NO_GAIN),
        ({"deltas": {"up": np.full((3, 3), 0.2, np.float32)}}, Refusal.TOO_LARGE),
    ],
)
def test_a_bad_update_is_refused_with_its_reason(change: dict[str, object], refusal: Refusal) -> None:
    """That nothing of it stays: `test_expert_acceptance.py`."""
    verdict = verdict_on(replace(UPDATE, **change), Policy())
    assert verdict.refusal is refusal
    assert verdict.why


def test_the_spectral_cap_and_wrong_limits() -> None:
    assert verdict_on(UPDATE, Policy(spectral_ratio=0.005)).refusal is Refusal.SPECTRAL
    assert verdict_on(UPDATE, Policy(spectral_ratio=0.02)).accepted
    with pytest.raises(UserError, match="norm_ratio"):
        Policy(norm_ratio=0)
