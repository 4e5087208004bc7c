"""The rule of the composite `planetary.attention`."""

from __future__ import annotations

from collections.abc import Sequence

from planetary.compiler import ir
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, rule_many
from planetary.compiler.autodiff.traced import emit_traced
from planetary.compiler.frontend.attention import ATTENTION, Form
from planetary.compiler.ir import Value


@rule_many(f"stablehlo.composite @{ATTENTION}", note="by tiles, in memory that is linear in the length")
def _attention(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    form = Form(**ir.dictionary(site.op, "composite_attributes"))
    gradients = emit_traced(form.gradient, *site.inputs, *site.results, cts[0])
    return [*gradients, *([None] * (len(site.inputs) - 3))]
