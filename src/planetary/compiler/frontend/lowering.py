"""Lowers a JAX function so the author's derivative rules survive as composites.

`stop_gradient`, `custom_jvp` and `custom_vjp` leave no trace in StableHLO that `jax.jit` lowers, but JAX has a
primitive for each while it lowers. Here these primitives are lowered to the composites of `markers`: a stopped gradient
to `planetary.stop_gradient`, and everything with a separate rule to `planetary.custom_vjp`, whose decomposition
computes the results and, for given cotangents, the gradients that `jax.vjp` traces. Since this happens while JAX
lowers, it reaches loops, branches, `vmap`, `remat` and nested `jit` alike.

Factorisations that JAX calls LAPACK for are lowered to loops of plain operations (`matrices`): a call of a library on
the host is no portable StableHLO.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import ad_util, core, custom_derivatives, debugging, pjit
from jax._src.interpreters import mlir
from jax._src.lax import lax as lax_internal
from jax._src.lax import linalg as linalg_internal
from jax._src.lax.control_flow import solves

from planetary.compiler.frontend import matrices
from planetary.compiler.frontend.attention import ATTENTION
from planetary.compiler.frontend.cross_entropy import LINEAR_CROSS_ENTROPY
from planetary.compiler.frontend.markers import CUSTOM_VJP, STOP_GRADIENT, composite_of

_Rule = Callable[..., Sequence[Any]]


def lower_with_rules(function: Callable[..., Any], *arguments: Any) -> Any:
    """Trace and lower `function` as `jax.jit(function).lower(*arguments)` does, with the derivative rules marked."""
    parameters = mlir.LoweringParameters(override_lowering_rules=_MARKING)  # pyright: ignore[reportArgumentType]
    return jax.jit(function, keep_unused=True).trace(*arguments).lower(_private_parameters=parameters)


def _is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


# --- marks ----------------------------------------------------------------------------------------------------


def _stop_gradient(context: Any, x: Any) -> Sequence[Any]:
    if not _is_inexact(context.avals_in[0]):
        return [x]
    return mlir.lower_fun(jax.lax.composite(lambda y: y, STOP_GRADIENT), multiple_results=False)(context, x)


def _composite(context: Any, *operands: Any, name: str, **parameters: Any) -> Sequence[Any]:
    """Lower a composite; marks within an author's own gradient count for nothing, so it is lowered without."""
    if name == CUSTOM_VJP:
        context = context.replace(module_context=_unmarked(context.module_context))
    return lax_internal._composite_lowering(context, *operands, name=name, **parameters)


def _unmarked(module: Any) -> Any:
    """A context for the same module, without marks. The caches are separate: a marked function is another one."""
    parameters = dataclasses.replace(module.lowering_parameters, override_lowering_rules=_PLAIN)
    return module.replace(lowering_parameters=parameters, lowering_cache={}, cached_primitive_lowerings={})


def _with_gradient(primitive: Any, plain: _Rule | None = None) -> _Rule:
    """Return the lowering of a primitive to a composite that carries JAX's gradient.

    Args:
        primitive: with a separate rule.
        plain: the lowering where the author marked the function by `markers`, so no second mark is needed.
    """

    def rule(context: Any, *operands: Any, **parameters: Any) -> Sequence[Any]:
        if plain is not None and _has_mark(parameters["call_jaxpr"].jaxpr):
            return plain(context, *operands, **parameters)
        if not any(map(_is_inexact, context.avals_in)) or not any(map(_is_inexact, context.avals_out)):
            return _lower_plainly(context, primitive, operands, parameters)
        skipped = parameters.get("num_consts", 0)  # values the function closes over, which have no gradient
        return mlir.lower_fun(_marked(primitive, parameters, context.avals_out, skipped))(context, *operands)

    return rule


def _lower_plainly(context: Any, primitive: Any, operands: Sequence[Any], parameters: dict[str, Any]) -> Sequence[Any]:
    def call(*arguments: Any) -> Any:
        found = _bind(primitive, parameters, arguments)
        return found if primitive.multiple_results else [found]

    return mlir.lower_fun(call)(context.replace(module_context=_unmarked(context.module_context)), *operands)


def _bind(primitive: Any, parameters: dict[str, Any], arguments: Sequence[Any]) -> Any:
    return primitive.bind(*arguments, **primitive.get_bind_params(parameters))


def _marked(
    primitive: Any, parameters: dict[str, Any], results: Sequence[Any], skipped: int
) -> Callable[..., Sequence[Any]]:
    def marked(*arguments: Any) -> Sequence[Any]:
        count = len(arguments)
        inexact = [i for i, argument in enumerate(arguments) if _is_inexact(argument)]
        wanted = [i for i in inexact if i >= skipped]

        # The cotangents here are zeros and the gradients stay unused, so they are removed; `differentiate` calls it
        # again with real ones.
        def both(*given: Any, **_: Any) -> list[Any]:
            values, cotangents = list(given[:count]), given[count:]

            def of_wanted(*inner: Any) -> tuple[Any, ...]:
                full = list(values)
                for position, value in zip(wanted, inner, strict=True):
                    full[position] = value
                found = _bind(primitive, parameters, full)
                return tuple(found) if primitive.multiple_results else (found,)

            out, pull_back = jax.vjp(of_wanted, *(values[i] for i in wanted))
            zero = jax.dtypes.float0
            real = tuple(
                ct if _is_inexact(y) else np.zeros(y.shape, zero) for y, ct in zip(out, cotangents, strict=True)
            )
            gradients = dict(zip(wanted, pull_back(real), strict=True))
            return [*out, *(gradients.get(i, jnp.zeros_like(values[i])) for i in inexact)]

        blank = [jnp.zeros(aval.shape, aval.dtype) for aval in results]
        return composite_of(both, arguments, blank)[: len(results)]

    return marked


_MARKS = (STOP_GRADIENT, CUSTOM_VJP, ATTENTION, LINEAR_CROSS_ENTROPY)


def _has_mark(jaxpr: Any) -> bool:
    """Whether a function consists of a composite of `markers`."""
    for equation in jaxpr.eqns:
        if equation.primitive is lax_internal.composite_p and equation.params["name"] in _MARKS:
            return True
        if any(_has_mark(inner) for inner in core.jaxprs_in_params(equation.params)):
            return True
    return False


# --- factorisations -------------------------------------------------------------------------------------------


def _expanded(primitive: Any, function: Callable[..., Any]) -> _Rule:
    """Return the lowering of a primitive by a JAX function of the arguments and parameters, where the function takes
    them.
    """

    def rule(context: Any, *operands: Any, **parameters: Any) -> Sequence[Any]:
        if any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in context.avals_in):
            return _by_jax(primitive)(context, *operands, **parameters)
        if parameters.get("pivoting"):
            return _by_jax(primitive)(context, *operands, **parameters)
        return mlir.lower_fun(function, primitive.multiple_results)(context, *operands, **parameters)

    return rule


def _by_jax(primitive: Any) -> _Rule:
    entry: Any = mlir._platform_specific_lowerings["cpu"].get(primitive) or mlir._lowerings[primitive]
    return getattr(entry, "rule", entry)


_EXPANSIONS: dict[Any, Callable[..., Any]] = {
    linalg_internal.cholesky_p: matrices.cholesky,
    linalg_internal.lu_p: matrices.lu,
    linalg_internal.qr_p: matrices.qr,
    linalg_internal.triangular_solve_p: matrices.triangular_solve,
}
_FACTORISATIONS = tuple((primitive, _expanded(primitive, function)) for primitive, function in _EXPANSIONS.items())
_PLAIN: tuple[tuple[Any, _Rule], ...] = (
    *_FACTORISATIONS,
    # A worker is one device, and has no Python: neither changes a value.
    (pjit.sharding_constraint_p, lambda _, x, **__: [x]),
    (debugging.debug_callback_p, lambda *_, **__: []),
    (debugging.debug_print_p, lambda *_, **__: []),
)
_by_call = custom_derivatives._custom_jvp_vjp_call_lowering
_MARKING: tuple[tuple[Any, _Rule], ...] = (
    (ad_util.stop_gradient_p, _stop_gradient),
    (lax_internal.composite_p, _composite),
    (custom_derivatives.custom_jvp_call_p, _with_gradient(custom_derivatives.custom_jvp_call_p, _by_call)),
    (custom_derivatives.custom_vjp_call_p, _with_gradient(custom_derivatives.custom_vjp_call_p, _by_call)),
    (custom_derivatives.linear_call_p, _with_gradient(custom_derivatives.linear_call_p)),
    (solves.linear_solve_p, _with_gradient(solves.linear_solve_p)),
    *((primitive, _with_gradient(primitive)) for primitive in _EXPANSIONS),
    *_PLAIN[len(_FACTORISATIONS) :],
)
