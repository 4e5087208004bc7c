"""The rule table is complete and its page is current."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir.dialects import _chlo_ops_gen, _stablehlo_ops_gen

from planetary.compiler.autodiff.explain import explain, operations_page
from planetary.compiler.autodiff.rule_table import entries, inactive

STRUCTURE = {"stablehlo.return", "stablehlo.custom_call", "stablehlo.composite"}


def names_of(dialect: object) -> set[str]:
    found = (getattr(item, "OPERATION_NAME", None) for item in vars(dialect).values())
    return {name for name in found if name}


def test_every_operation_of_both_dialects_stands_in_the_table() -> None:
    everything = names_of(_stablehlo_ops_gen) | names_of(_chlo_ops_gen)
    assert len(everything) > 150
    assert everything - set(entries()) == STRUCTURE


def test_each_entry_is_exactly_one_thing_and_says_why() -> None:
    for entry in entries().values():
        kinds = [entry.rule is not None, entry.inactive is not None, entry.unsupported is not None]
        assert kinds.count(True) == 1, entry.name
        assert entry.rule is not None or len(entry.inactive or entry.unsupported or "") > 10, entry.name


def test_an_operation_cannot_be_entered_twice() -> None:
    with pytest.raises(AssertionError, match="twice"):
        inactive("a second opinion", "stablehlo.add")


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "ops.md"
    assert page.read_text() == operations_page(), "run: python -m planetary.compiler.autodiff.explain > docs/ops.md"


def test_explain_tells_the_status_of_a_models_operations() -> None:
    def model(x: jax.Array) -> jax.Array:
        return jnp.nextafter(jnp.floor(x) * x, 2.0)

    found = {use.name: use.status for use in explain(jax.jit(model).lower(jnp.ones(3)).as_text())}
    assert found["stablehlo.multiply"] == "rule"
    assert found["stablehlo.floor"] == "inactive"
    assert found["chlo.next_after"] == "unsupported"
