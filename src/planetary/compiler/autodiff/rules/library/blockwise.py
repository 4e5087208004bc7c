"""The rules of composites that compute block by block: each form has a gradient of its own."""

from __future__ import annotations

from collections.abc import Sequence

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, rule_many
from planetary.compiler.autodiff.traced import emit_traced
from planetary.compiler.frontend.attention import ATTENTION
from planetary.compiler.frontend.attention import Form as Attention
from planetary.compiler.frontend.cross_entropy import LINEAR_CROSS_ENTROPY, Head
from planetary.compiler.ir import Value


@rule_many(f"stablehlo.composite @{ATTENTION}", note="by tiles, in memory that is linear in the length")
def _attention(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    return _of_form(Attention(**ir.dictionary(site.op, "composite_attributes")), site, cts)


@rule_many(f"stablehlo.composite @{LINEAR_CROSS_ENTROPY}", note="by blocks of tokens, whose logits are computed again")
def _linear_cross_entropy(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    return _of_form(Head(**ir.dictionary(site.op, "composite_attributes")), site, cts)


def _of_form(form: Attention | Head, site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    pulls = [ops.zeros(y.type) if ct is None else ct for y, ct in zip(site.results, cts, strict=True)]
    gradients = emit_traced(form.gradient, *site.inputs, *site.results, *pulls)
    return [*gradients, *([None] * (len(site.inputs) - len(gradients)))]
