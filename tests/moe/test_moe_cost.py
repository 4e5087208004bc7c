"""The cost model gives every number that the PARALLAX report prints in tables 3 and 4 and sections 5 to 5.2."""

from __future__ import annotations

import pytest

from planetary.cli.main import main
from planetary.core.errors import UserError
from planetary.moe import cost
from planetary.moe.cost import REPORT_20B, REPORT_176B, MoeShape

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


def test_the_input_gradient_doubles_what_offload_leaves_of_the_owned_experts() -> None:
    for shape in (REPORT_20B, REPORT_176B):
        counted, honest = cost.rho_offload(shape, 8), cost.rho_offload_with_input_gradient(shape, 8)
        assert honest - counted == pytest.approx(1 / 24)
    assert f"{1 / cost.rho_offload_with_input_gradient(REPORT_20B, 8):.1f}" == "11.2"


def test_sketches_of_the_20b_model_with_8_composers_are_1_6_gb_a_step_before_scales_ids_and_gates() -> None:
    numbers, everything = cost.sketch_bytes(REPORT_20B, 1024 * 1024 // 8)
    assert f"{numbers / 1e9:.1f}" == "1.6"
    assert everything == numbers + 16 * 131072 * (2 * 4 + 16 * 3)


def test_totals_from_the_shape_differ_from_the_reports_rounded_ones() -> None:
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
