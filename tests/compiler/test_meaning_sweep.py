"""Layers of JAX's libraries keep their gradient: a sample of bench/meaning_sweep.py, which takes all of them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("meaning_sweep")
    for name in [name for name in sys.modules if name == "meaning_sweep" or name.partition(".")[0] == "meaning"]:
        del sys.modules[name]


def kinds(sweep: Any, only: str) -> dict[str, str]:
    return {one.name: f"{one.kind} {one.why}".strip() for one in sweep.sweep("jax_cases", only)}


@pytest.mark.slow
def test_a_layer_with_a_rule_of_its_own_is_equal(sweep: Any) -> None:
    assert kinds(sweep, "jax.nn.relu6") == {"relu6": "equal"}


def test_another_gradient_is_no_equal_layer(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep sees a lost rule: with JAX's plain lowering, a stopped gradient is silent or caught."""
    import jax

    from planetary.compiler.frontend import export

    monkeypatch.setattr(export, "lower_with_rules", lambda f, *given: jax.jit(f, keep_unused=True).lower(*given))
    table = importlib.import_module("meaning.jax_cases")
    case = table.of_function(lambda x: x * jax.lax.stop_gradient(x))
    assert sweep.judge("here", "stopped", case).kind == "caught"


@pytest.mark.slow
def test_every_function_of_jax_nn_is_equal(sweep: Any) -> None:
    found = {name: kind for name, kind in kinds(sweep, "jax.nn.").items() if not kind.startswith("no layer")}
    assert len(found) > 25
    assert set(found.values()) == {"equal"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flax.nnx.BatchNorm", "flax.nnx.WeightNorm", "equinox.nn.SpectralNorm"])
def test_a_layer_of_a_library_is_equal(sweep: Any, name: str) -> None:
    pytest.importorskip(name.partition(".")[0])
    assert set(kinds(sweep, name).values()) == {"equal"}
