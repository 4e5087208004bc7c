"""Presets are settings that a configuration takes, and the plan's arithmetic follows them."""

from __future__ import annotations

import runpy
from pathlib import Path

import msgspec
import pytest

from planetary.core.config import config_from_tables, load_config
from planetary.core.configuration.presets import PRESETS, preset_of
from planetary.core.errors import UserError
from planetary.core.extension_points import CODECS
from planetary.sync.plan import (
    GAPS,
    MEASURED,
    TOLERATED,
    WELL_USED,
    Cluster,
    Prediction,
    payload_bytes,
    plan,
    predict,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "stdlib.toml"
CLUSTER = Cluster(params=30.8e6, workers=4, bandwidth=50e6 / 8, gateway_bandwidth=50e6 / 8, rtt_s=0.08, step_s=0.13)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
@pytest.mark.parametrize("workers", [1, 4])
def test_every_preset_passes_the_checks(preset, workers: int) -> None:
    config = load_config(EXAMPLE, [*preset.overrides(workers), f"fabric.workers={workers}"])
    tables = config.tables()
    expected = {**preset.settings, **(preset.alone if workers == 1 else {})}
    assert {key: tables[key.split(".")[0]][key.split(".")[1]] for key in expected} == expected


def test_set_is_on_top_of_a_preset() -> None:
    config = config_from_tables({}, [*preset_of("diloco").overrides(2), "outer.momentum=0.5"])
    assert (config.outer.learning_rate, config.outer.momentum) == (0.7, 0.5)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean sparseloco"):
        preset_of("sparseloko")


def test_every_preset_has_a_published_gap_and_its_source() -> None:
    assert set(GAPS) == set(MEASURED) == set(PRESETS)


def test_plan_repeats_the_published_blocking_arithmetic() -> None:
    """4 workers, 30.8M parameters, 3.9 s of compute, each on a link of its own, float32: 8.9, 28 and 66 % utilised."""
    for mbit, dense in ((50, 0.089), (200, 0.28), (1000, 0.66)):
        own = msgspec.structs.replace(CLUSTER, bandwidth=mbit * 1e6 / 8, gateway_bandwidth=1e13, rtt_s=0.0)
        assert predict(preset_of("diloco"), own).utilisation == pytest.approx(dense, abs=0.01)


@pytest.mark.parametrize("codec", CODECS.built_in)
def test_planned_bytes_are_those_of_the_codec(codec: str) -> None:
    few = {"int8": 1.0039, "int4": 0.5039, "fp4": 0.53125, "sign": 0.125977, "sparse": 0.027347}
    known = {"float32": 4.0, "bf16": 2.0, **few}
    assert payload_bytes(codec, 1e6) == pytest.approx(known[codec] * 1e6, rel=1e-3)


def test_relayed_plan_has_one_payload_per_other_worker() -> None:
    """Relayed updates are planned with one payload per other worker up to whole parameters."""
    relay = preset_of("rda-relay")
    two, four, many = (predict(relay, msgspec.structs.replace(CLUSTER, workers=count)) for count in (2, 4, 100))
    assert two.down == two.up
    assert four.down == pytest.approx(3 * four.up)
    assert many.down == pytest.approx(predict(preset_of("rda"), CLUSTER).down)


def test_fast_link_gets_least_loss_and_slow_fewest_bytes() -> None:
    fast = msgspec.structs.replace(CLUSTER, bandwidth=1e12, gateway_bandwidth=1e12, rtt_s=1e-5)
    assert plan(fast)[1].startswith("ddp:")
    slow = msgspec.structs.replace(CLUSTER, params=1e9, bandwidth=2e6, gateway_bandwidth=2e6)
    found, recommended = plan(slow)
    assert "none with a tolerable loss is used 95%" in recommended
    best = max((one for one in found if tolerable(one)), key=lambda one: one.utilisation)
    assert recommended.startswith(best.preset)


def tolerable(one: Prediction) -> bool:
    return one.measured is not None and one.measured <= TOLERATED


@pytest.mark.parametrize("mbit", [1, 5, 20, 50, 200, 1000, 10_000])
def test_every_preset_may_be_recommended_by_its_own_results(mbit: float) -> None:
    """No preset that lost much here, or was not measured, is recommended, and none of the others is passed over."""
    rate = mbit * 1e6 / 8
    found, recommended = plan(msgspec.structs.replace(CLUSTER, bandwidth=rate, gateway_bandwidth=4 * rate))
    best = next(one for one in found if recommended.startswith(f"{one.preset}:"))
    assert tolerable(best)
    well = [one for one in found if tolerable(one) and one.utilisation >= WELL_USED]
    if well and best.preset != "ddp":
        assert best in well
        assert all(best.measured <= one.measured for one in well)


@pytest.mark.parametrize(
    ("field", "value"), [("params", 0), ("workers", 0), ("bandwidth", float("nan")), ("rtt_s", -1), ("step_s", 0)]
)
def test_impossible_numbers_are_refused(field: str, value: float) -> None:
    with pytest.raises(UserError, match=r"expected a number from .*, found"):
        plan(msgspec.structs.replace(CLUSTER, **{field: value}))


@pytest.mark.parametrize(("topology", "least"), [("star", 3 + 4), ("ring", 2)])
def test_adam_takes_one_more_copy_where_the_outer_state_is(topology: str, least: int) -> None:
    settings = {**preset_of("diloco").settings, "sync.topology": topology}
    nesterov, adam = (
        predict(msgspec.structs.replace(preset_of("diloco"), settings={**settings, "outer.optimizer": name}), CLUSTER)
        for name in ("nesterov", "adam")
    )
    copy = 4 * CLUSTER.params
    assert nesterov.gateway_memory == least * copy
    assert adam.gateway_memory == (least + 1) * copy
    assert adam.worker_memory - nesterov.worker_memory == (copy if topology == "ring" else 0)


def test_eager_waits_only_for_what_the_steps_do_not_hide() -> None:
    eager = predict(preset_of("eager-diloco"), msgspec.structs.replace(CLUSTER, bandwidth=1e9, gateway_bandwidth=1e9))
    assert eager.wait_s == CLUSTER.rtt_s  # the next lease is asked for
    assert eager.utilisation > 0.97


def test_the_docs_print_the_table_of_presets() -> None:
    made = runpy.run_path(str(EXAMPLE.parents[1] / "docs" / "make_presets.py"))
    text = made["PAGE"].read_text()
    assert made["page"](text) == text, "run `python docs/make_presets.py`"
