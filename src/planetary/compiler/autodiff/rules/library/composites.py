"""Rules of composites: the marks of `planetary.compiler.frontend.markers`.

Any other composite is differentiated through the decomposition. To give one a rule by name, register
`rule_many("stablehlo.composite @its.name")` before the model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from planetary.compiler import ir, ops
from planetary.compiler.autodiff import library_calls, routines
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, inactive, rule_many
from planetary.compiler.autodiff.traced import dtype_name, emit_pull_back
from planetary.compiler.frontend.markers import CUSTOM_VJP, STOP_GRADIENT
from planetary.compiler.ir import Value
from planetary.core.errors import UnsupportedOpError

inactive("the author asked for no gradient", f"stablehlo.composite @{STOP_GRADIENT}")


@rule_many(f"stablehlo.composite @{CUSTOM_VJP}", note="the author's own gradient")
def _custom_vjp(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    count = ir.dictionary(site.op, "composite_attributes")["arguments"]
    arguments, unused = site.inputs[:count], site.inputs[count:]
    results = len(unused)
    cotangents = [ops.zeros(blank.type) if ct is None else ct for blank, ct in zip(unused, cts[:results], strict=True)]
    gradients = list(ir.clone(site.op, [*arguments, *cotangents]).results)[results:]
    parts: list[Contribution] = []
    for argument in arguments:
        parts.append(gradients.pop(0) if ir.is_differentiable_type(argument.type) else None)
    return [*parts, *([None] * results)]


_ROUTINES = {routine.name: routine for routine in routines.ROUTINES}
_CALLS = {call.name: call for call in library_calls.CALLS}


@rule_many(
    *(f"stablehlo.composite @{routines.PREFIX}{name}" for name in (*_ROUTINES, *_CALLS)),
    note="a JAX library routine, recognised in the exported operations; the gradient is JAX's own",
)
def _library_routine(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    name = ir.text(site.op, "name").removeprefix(routines.PREFIX)
    if name in _ROUTINES:
        function = _ROUTINES[name].load()
    else:
        function = _CALLS[name].load(ir.shape_of(site.y), dtype_name(ir.element_of(site.y)))
    try:
        return emit_pull_back(function, cts, site.inputs, site.needs)
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedOpError(ir.text(site.op, "name"), ir.location_text(site.op), f"JAX says: {error}") from error
