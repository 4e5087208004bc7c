"""The cost model gives every number that the PARALLAX report prints in tables 3 and 4 and sections 5 to 5.2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lockstep_trainer import MoeTrainer
from moe_support import BASE, train
from msgspec.structs import replace

from planetary.cli.main import main
from planetary.core.config import apply_overrides, load_config
from planetary.core.errors import UserError
from planetary.models.initial import count
from planetary.models.latent_moe import PRESETS, LatentMoeConfig, dense_parameters, parameters
from planetary.runs.mixture.cost import cost
from planetary.runs.mixture.cost.cost import REPORT_20B, REPORT_176B, MoeShape
from planetary.runs.mixture.cost.table import (
    Workload,
    configured,
    named_shape,
    operations,
    shape_of,
    table,
    tier_parameters,
)
from planetary.runs.mixture.methods.sketch import Precision, encode, sketch_from_gates
from planetary.runs.mixture.methods.tiers import Cadence, Tier
from planetary.runs.mixture.payloads.experts import experts_bytes, weights_bytes
from planetary.runs.mixture.training.expert_work import HeldExperts

EXAMPLES = Path(__file__).parents[4] / "examples"

TABLE_3 = [
    (REPORT_20B, 4, "48.00", "3.92", "11.29", "1.85", "2.29"),
    (REPORT_20B, 8, "48.00", "7.63", "20.95", "2.16", "2.43"),
    (REPORT_20B, 16, "48.00", "14.49", "36.57", "2.35", "2.51"),
    (REPORT_176B, 4, "85.33", "3.95", "11.59", "1.59", "1.83"),
    (REPORT_176B, 8, "85.33", "7.79", "22.18", "1.76", "1.90"),
    (REPORT_176B, 16, "85.33", "15.11", "40.82", "1.87", "1.94"),
]
TABLE_4 = [
    (REPORT_20B, 4, "10.3", "77.2", "618", "81.8"),
    (REPORT_20B, 8, "5.5", "38.6", "722", "95.4"),
    (REPORT_20B, 16, "3.2", "19.3", "773", "102.2"),
    (REPORT_176B, 4, "89.0", "687.6", "1649", "526.9"),
    (REPORT_176B, 8, "46.5", "343.8", "1924", "614.7"),
    (REPORT_176B, 16, "25.3", "171.9", "2062", "658.6"),
]


@pytest.mark.parametrize("row", TABLE_3, ids=lambda row: f"{row[0].name}-{row[1]}")
def test_every_cell_of_table_3(row: tuple[MoeShape, int, str, str, str, str, str]) -> None:
    shape, composers, *printed = row
    direct, offload = cost.rho_direct(shape, composers), cost.rho_offload(shape, composers)
    values = [
        cost.expert_forward_flops(shape) / cost.surrogate_forward_flops(shape),
        1 / direct,
        1 / offload,
        cost.total_reduction(shape, direct),
        cost.total_reduction(shape, offload),
    ]
    assert [f"{value:.2f}" for value in values] == printed


@pytest.mark.parametrize("row", TABLE_4, ids=lambda row: f"{row[0].name}-{row[1]}")
def test_every_cell_of_table_4(row: tuple[MoeShape, int, str, str, str, str]) -> None:
    shape, composers, weights, state, moved, surrogates = row
    assert f"{cost.expert_weight_bytes(shape, composers) / 1e9:.1f}" == weights
    assert f"{cost.expert_state_bytes(shape, composers) / 1e9:.1f}" == state
    assert f"{cost.all_to_all_bytes(shape, composers, 1024, 1024) / 1e9:.0f}" == moved
    assert f"{cost.surrogate_sync_bytes(shape, composers, 8) / 1e6:.1f}" == surrogates


def test_the_numbers_of_section_5() -> None:
    assert f"{cost.rho_direct(REPORT_20B, 4):.1%}" == "25.5%"
    assert f"{1 / cost.rho_direct(REPORT_20B, 4):.1f}" == "3.9"
    assert f"{cost.rho_direct(REPORT_20B, 8):.1%}" == "13.1%"
    assert f"{1 / cost.rho_direct(REPORT_20B, 8):.1f}" == "7.6"
    assert f"{cost.rho_offload(REPORT_20B, 8):.2%}" == "4.77%"
    assert f"{1 / cost.rho_offload(REPORT_20B, 8):.1f}" == "20.9"
    assert REPORT_20B.rank / REPORT_20B.hidden == 1 / 48


def test_the_numbers_of_section_5_1() -> None:
    assert f"{cost.all_to_all_bytes(REPORT_20B, 4, 512, 1024) / 1e9:.0f}" == "309"
    assert f"{cost.all_to_all_bytes(REPORT_20B, 8, 1024, 1024) / 1e9:.0f}" == "722"


def test_the_numbers_of_section_5_2() -> None:
    assert f"{cost.one_expert_params(REPORT_20B) / 1e6:.2f}" == "4.72"
    assert f"{cost.worker_state_bytes(REPORT_20B) / 1e6:.1f}" == "75.5"


def test_input_gradient_doubles_expert_cost_under_offload() -> None:
    for shape in (REPORT_20B, REPORT_176B):
        counted, honest = cost.rho_offload(shape, 8), cost.rho_offload_with_input_gradient(shape, 8)
        assert honest - counted == pytest.approx(1 / 24)
    assert f"{1 / cost.rho_offload_with_input_gradient(REPORT_20B, 8):.1f}" == "11.2"


def test_sketches_of_the_20b_model_are_1_6_gb_a_step() -> None:
    """Sketches of the 20B model with 8 composers are 1.6 GB a step before scales ids and gates."""
    numbers, everything = cost.sketch_bytes(REPORT_20B, 1024 * 1024 // 8)
    assert f"{numbers / 1e9:.1f}" == "1.6"
    assert everything == numbers + 16 * 131072 * (2 * 4 + 16 * 3)


@pytest.mark.parametrize("precision", ["4bit", "f32"])
@pytest.mark.parametrize("latent", [64, 24])  # 24 has no power of two of 16 in it, so four-bit rows are padded to 32
def test_sketches_are_as_large_as_the_cost_model_says(precision: Precision, latent: int) -> None:
    shape = MoeShape("x", 1, 8, 2, latent, 16, 4, 1e9)
    rows = np.ones((5, latent), np.float32)
    gates = np.tile(np.array([0.5, 0.5, 0, 0, 0, 0, 0, 0], np.float32), (5, 1))
    made = encode(sketch_from_gates((0, 0, 0), rows, rows, gates, 2), precision, 8)
    assert cost.sketch_bytes(shape, 5, precision=precision)[1] == made.nbytes


@pytest.mark.parametrize("ternary", [False, True])
def test_experts_in_transit_have_the_cost_models_size(ternary: bool) -> None:
    config = replace(TINY, n_latent=32, n_hidden=128, ternary=ternary)
    shape = shape_of("x", config, rank=0)
    trainer = MoeTrainer(config, replace(BASE, rank=0), optimise=False)
    sent, given = 0, 0
    for composer in trainer.initial().composers:
        for weights, moments in zip(composer.experts, composer.expert_moments, strict=True):
            held = HeldExperts(weights, moments)
            sent, given = sent + len(weights_bytes(held, config)), given + len(experts_bytes(held))
    assert cost.updated_weights_bytes(shape) == pytest.approx(sent, rel=0.05, abs=1500)  # names and shapes
    assert cost.worker_traffic_bytes(shape) / 2 == pytest.approx(given, rel=0.05)


def test_totals_differ_from_the_reports_rounded_ones() -> None:
    assert REPORT_20B.layers * REPORT_20B.experts * cost.one_expert_params(REPORT_20B) == 19_327_352_832
    assert REPORT_176B.layers * REPORT_176B.experts * cost.one_expert_params(REPORT_176B) == 171_798_691_840


def test_a_shape_that_is_no_mixture_is_refused() -> None:
    with pytest.raises(UserError, match="5 active experts per token, but 4"):
        MoeShape("x", 1, 4, 5, 8, 8, 2, 1e9)
    with pytest.raises(UserError, match="fewer than those of the active"):
        MoeShape("x", 1, 4, 2, 8, 8, 2, 10)
    with pytest.raises(UserError, match="at least 1 step"):
        cost.tier_bytes(10, 2, 0)


def test_the_command_prints_the_table_and_names_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["moe", "cost", "--composers", "8"]) == 0
    printed = capsys.readouterr().out
    assert "20.95×" in printed
    assert "722 GB" in printed
    assert main(["moe", "cost", "--composers", "8", "--replicas", "2"]) == 0
    printed = capsys.readouterr().out
    assert "3.92×" in printed  # as of four composers
    assert "77.2 GB" in printed
    assert "308.8 GB" in printed  # 2 · 2 · 19.3·10⁹ numbers of four bytes
    assert "offload" not in printed
    assert main(["moe", "cost", "--composers", "4,8", "--replicas", "5"]) != 0
    assert "between 1 and 4 owners" in capsys.readouterr().err
    assert main(["moe", "cost", "--composers", "zero"]) != 0
    assert "--composers" in capsys.readouterr().err


# --- arithmetic, tiers, and shapes of models that exist -----------------------------------------------------------

TINY = LatentMoeConfig(**PRESETS["tiny"])  # width 16, vocabulary 32, 1 layer, 2 of 4 experts of 8 → 12 → 8


def cells(shape: MoeShape, composers: int, work: Workload) -> dict[str, str]:
    return {label: values[0] for label, values in table(shape, [composers], work)}


def test_tiers_of_a_small_model_counted_by_hand() -> None:
    found = tier_parameters(TINY)
    # 4 experts · 16; 16 · 8 down and up; embedding and head 32 · 16, three norms, attention 2 · 16² + 2 · 16 · 8
    assert found == {Tier.ROUTER: 64, Tier.LATENT: 256, Tier.BACKBONE: 2 * 512 + 3 * 16 + 768}
    shape = shape_of("tiny", TINY, rank=3)
    assert shape.active_params == 64 + 256 + 1840 + 2 * 192  # two active experts of 2 · 8 · 12
    assert cost.dense_params(shape) + cost.all_expert_params(shape) == count(parameters(TINY))


@pytest.mark.parametrize("name", list(PRESETS))
def test_tiers_and_active_experts_are_all_active_parameters(name: str) -> None:
    shape, config = named_shape(name, rank=16)
    assert cost.dense_params(shape) + cost.active_expert_params(shape) == pytest.approx(shape.active_params)
    assert (shape.layers, shape.experts, shape.latent, shape.hidden) == (
        config.n_layer,
        config.n_expert,
        config.n_latent,
        config.n_hidden,
    )
    if name not in cost.SHAPES:  # the report's own backbones are what is left of its active parameters
        assert cost.dense_params(shape) == count(dense_parameters(config))


def test_the_reports_shapes_get_their_tiers_alone() -> None:
    shape, _ = named_shape("20b", rank=16)
    assert replace(shape, router_params=0.0, latent_params=0.0, backbone_params=0.0) == REPORT_20B
    assert shape.router_params == 16 * 256 * 2048
    assert shape.latent_params == 16 * 2 * 2048 * 768


def test_arithmetic_of_a_small_shape_by_hand() -> None:
    shape = shape_of("tiny", TINY, rank=3)
    # 6 · 2,160 outside experts; an expert's training is 12 · 8 · 12 = 1,152, and two are chosen
    assert cost.train_flops(shape) == 12960 + 2304
    # half of them owned; a surrogate costs 4 · 8 · 3 = 96, and one of the two chosen is one
    assert cost.surrogate_flops(shape, 2) == pytest.approx(96)
    assert cost.train_flops(shape, cost.rho_direct(shape, 2)) == pytest.approx(12960 + 1152 + 96)
    # forward pass and dX of the owned one: 8 · 8 · 12
    assert cost.train_flops(shape, cost.rho_offload_with_input_gradient(shape, 2)) == pytest.approx(12960 + 768 + 96)
    attached = replace(shape, detach=False)  # the gradient passes through the surrogate as well
    assert cost.train_flops(attached, cost.rho_direct(attached, 2)) == pytest.approx(12960 + 1152 + 192)


def test_swiglu_experts_and_surrogates_have_three_matrices() -> None:
    shape = shape_of("swiglu", replace(TINY, activation="swiglu"), rank=3)
    assert cost.one_expert_params(shape) == 3 * 8 * 12
    assert cost.train_flops(shape) == 12960 + 2 * 18 * 96
    assert cost.train_flops(shape, cost.rho_direct(shape, 2)) == pytest.approx(12960 + 18 * 96 + 144)
    assert cost.expert_weight_bytes(shape, 2) == pytest.approx(2 * (2 * 288 + 2 * 3 * 8 * 3))
    assert cost.worker_state_bytes(shape) == 16 * 288


def test_the_rows_of_a_small_shape_by_hand() -> None:
    shape = shape_of("tiny", TINY, rank=3)
    found = cells(shape, 2, Workload(batch=4, length=8, delta_rank=1, cadence=Cadence(2, 4, 8, refresh=3)))
    assert found["training a token, end-to-end"] == "15.26 kFLOP"
    assert found["training a token, direct"] == "14.21 kFLOP"
    assert found["training a token, offload with dX"] == "13.82 kFLOP"
    assert found["training a token, surrogates alone"] == "96 FLOP"
    assert found["a step, end-to-end, all tokens"] == "488.4 kFLOP"  # 32 tokens
    assert found["a composer's step, direct"] == "227.3 kFLOP"  # 16 tokens
    assert found["a composer's step, offload with dX"] == "221.2 kFLOP"
    assert found["a composer's step, surrogates alone"] == "1.536 kFLOP"
    assert found["state of all else per composer"] == "34.6 kB"  # 16 · 2,160
    # two composers publish and pull four bytes a parameter, once in H steps
    assert found["router tier per step at the syncer, H = 2"] == "0.5 kB"
    assert found["latent tier per step at the syncer, H = 4"] == "1.0 kB"
    assert found["backbone tier per step at the syncer, H = 8"] == "3.7 kB"
    assert found["all tiers per step at the syncer"] == "5.2 kB"
    assert found["all tiers per composer and step"] == "2.6 kB"
    assert found["an update of all experts, to workers and back"] == "18.4 kB"  # 768 weights and two moments, twice
    assert found["and then to composers"] == "3.1 kB"
    packed = cells(replace(shape, ternary=True), 2, Workload(batch=4, length=8))
    assert packed["and then to composers, ternary"] == "0.2 kB"  # and eight scales
    assert found["surrogate deltas of rank 1 per step, refresh every 3"] == "0.0 kB"
    wide = replace(
        shape, layers=1000, active_params=1e9
    )  # 1000 · 4 · ½ · 2 · (8 + 3) numbers of two bytes, or 2 · 8 · 3
    found = cells(wide, 2, Workload(delta_rank=1, cadence=Cadence(refresh=4)))
    assert found["surrogate deltas of rank 1, all (table 4)"] == "88.0 kB"
    assert found["surrogate deltas of rank 1 per step, refresh every 4"] == "22.0 kB"
    assert found["whole surrogates per step, refresh every 4"] == "48.0 kB"


def test_rows_without_a_subject_are_left_out() -> None:
    shape = shape_of("tiny", TINY, rank=3)
    labels = " ".join(cells(shape, 2, Workload(replicas=2)))
    assert "offload" not in labels
    assert "sketches" not in labels
    assert "merge of all copies" in labels
    found = cells(replace(shape, rank=0), 2, Workload(delta_rank=0))
    assert "surrogate" not in " ".join(found)
    assert found["expert compute, direct (table 3)"] == "2.00×"


# Of bench/parallax_cost.py --compute (bench/results/parallax.md), as XLA counts the compiled programs of moe-tiny with
# rank 8, where every expert and every surrogate is computed for every token: direct, direct without detach, offload.
MEASURED = [(2, 0.527, 0.537, 0.358), (4, 0.277, 0.287, 0.193), (8, 0.152, 0.162, 0.110)]


@pytest.mark.parametrize(("composers", "direct", "attached", "offload"), MEASURED)
def test_ratios_are_those_of_compiled_programs(composers: int, direct: float, attached: float, offload: float) -> None:
    config = LatentMoeConfig(**PRESETS["moe-tiny"])
    for detach, ratio, measured in (
        (True, cost.rho_direct, direct),
        (False, cost.rho_direct, attached),
        (True, cost.rho_offload_with_input_gradient, offload),
    ):
        shape = shape_of("", replace(config, n_active=config.n_expert), rank=8, detach=detach)
        expected = ratio(shape, composers) + cost.dense_bank(shape, composers)
        assert measured == pytest.approx(expected, rel=0.06)


def test_a_configuration_is_costed_as_it_is_written() -> None:
    config = load_config(EXAMPLES / "parallax-offload.toml")
    shape, model, work = configured(apply_overrides(config, ["moe.detach=false", "moe.sketch_fraction=0.5"]))
    assert (shape.name, shape.experts, shape.rank, shape.detach) == ("parallax-offload", 16, 8, False)
    assert cost.dense_params(shape) == count(dense_parameters(model))
    # 4 sequences of each of 4 composers; refreshed every 5 steps, merged as [moe] has it
    assert work == Workload(16, 128, 0, 1, Cadence(2, 2, 8, 5), "4bit", 0.5)
    with pytest.raises(UserError, match="latent_moe:build"):
        configured(load_config(EXAMPLES / "stdlib.toml"))


def test_the_command_costs_presets_and_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["moe", "cost", "--model", "moe-small"]) == 0
    printed = capsys.readouterr().out
    assert "moe-small: 8 MoE layers × 64 experts" in printed
    assert "C = 4 computes rows for any choice: 4.94 times an even share" in printed  # 4 if blocks were full
    assert main(["moe", "cost", str(EXAMPLES / "parallax-tiny.toml")]) == 0
    printed = capsys.readouterr().out
    assert "C = 4\n" in printed
    assert "16 × 128 tokens a step" in printed
    assert "backbone tier per step at the syncer, H = 8" in printed
    asked = ["--set", "moe.latent_every=6", "--router-every", "4", "--backbone-every", "12", "--composers", "2"]
    assert main(["moe", "cost", str(EXAMPLES / "parallax-tiny.toml"), *asked]) == 0
    printed = capsys.readouterr().out
    assert "router tier per step at the syncer, H = 4" in printed
    assert "latent tier per step at the syncer, H = 6" in printed
    assert "backbone tier per step at the syncer, H = 12" in printed
    assert "C = 2\n" in printed


def test_operations_have_four_digits_and_a_prefix() -> None:
    assert operations(96) == "96 FLOP"
    assert operations(999_960) == "1 MFLOP"
    assert operations(1.2345e13) == "12.35 TFLOP"


@pytest.mark.parametrize("rank", [3, TINY.n_hidden])
@pytest.mark.slow
def test_four_bit_surrogate_changes_cost_what_a_refresh_sends(rank: int) -> None:
    _, _, (report,) = train(1, TINY, cadence=Cadence(refresh=1), rank=rank, refresh_form="4bit")
    sent_to_all = report.surrogate_bytes  # once for all receivers
    each = cost.surrogate_four_bit_bytes(shape_of("tiny", TINY, rank=rank), 2)
    assert each * 2 == sent_to_all  # each of the two needs the half of it that it does not own
