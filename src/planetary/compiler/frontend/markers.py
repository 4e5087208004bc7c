"""Marks of a JAX author in a model, which survive export to StableHLO.

`jax.lax.stop_gradient` and `jax.custom_vjp` leave no trace in exported StableHLO: only their operations
are there. The two functions below do the same in JAX, and also export a `stablehlo.composite` that
`differentiate` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

STOP_GRADIENT = "planetary.stop_gradient"
CUSTOM_VJP = "planetary.custom_vjp"


def stop_gradient(tree: Any) -> Any:
    """The same arrays, through which no gradient passes, in JAX and after export.

    Args:
        tree: any pytree of arrays.
    """
    import jax

    # JAX cannot batch a composite by itself; this one is the same whatever the shape.
    @jax.custom_batching.custom_vmap
    def marked(x: Any) -> Any:
        return jax.lax.composite(lambda y: y, STOP_GRADIENT)(x)

    marked.def_vmap(lambda size, batched, x: (marked(x), batched[0]))

    @jax.custom_jvp
    def stopped(x: Any) -> Any:
        return marked(x)

    stopped.defjvp(lambda primals, tangents: (stopped(*primals), jax.numpy.zeros_like(tangents[0])))
    return jax.tree.map(lambda x: stopped(x) if _has_gradient(x) else x, tree)


def custom_vjp(
    function: Callable[..., Any], backward: Callable[[tuple[Any, ...], Any, Any], Sequence[Any]]
) -> Callable[..., Any]:
    """A function with a separate gradient, in JAX and after export.

    Args:
        function: takes and returns arrays (or pytrees of them).
        backward: `backward(arguments, results, cotangents)` returns one gradient per argument, in the
        argument's
            structure, shapes and dtypes; those for integer arrays are ignored.

    Returns:
        A function to call in place of `function`.
    """
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def marked(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        shapes = jax.eval_shape(function, *arguments)
        result_leaves, result_structure = jax.tree.flatten(shapes)
        unused = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in result_leaves]

        # The decomposition computes results and gradients together. The cotangents that it is called with
        # here are zeros and its gradients stay unused, so they are removed; `differentiate` calls it
        # again with real ones.
        def both(*flat: Any, **_: Any) -> list[Any]:
            inner = jax.tree.unflatten(structure, flat[: len(leaves)])
            results = function(*inner)
            cotangents = jax.tree.unflatten(result_structure, flat[len(leaves) :])
            gradients = backward(inner, results, cotangents)
            flat_gradients = structure.flatten_up_to(tuple(gradients))
            kept = [g for g, leaf in zip(flat_gradients, leaves, strict=True) if _has_gradient(leaf)]
            return [*jax.tree.leaves(results), *kept]

        out = composite_of(both, leaves, unused)
        return jax.tree.unflatten(result_structure, out[: len(result_leaves)])

    def forward(*arguments: Any) -> tuple[Any, Any]:
        results = marked(*arguments)
        return results, (arguments, results)

    def pull_back(saved: Any, cotangents: Any) -> tuple[Any, ...]:
        arguments, results = saved
        gradients = tuple(backward(arguments, results, cotangents))
        zero = jax.dtypes.float0

        def fit(leaf: Any, gradient: Any) -> Any:
            return gradient if _has_gradient(leaf) else jnp.zeros(jnp.shape(leaf), zero)

        return tuple(
            jax.tree.map(fit, argument, gradient) for argument, gradient in zip(arguments, gradients, strict=True)
        )

    marked.defvjp(forward, pull_back)
    return marked


def composite_of(both: Callable[..., list[Any]], arguments: Sequence[Any], unused: Sequence[Any]) -> list[Any]:
    """Call a function as the composite `CUSTOM_VJP`.

    Args:
        both: takes the arguments and a cotangent per result; returns the results, and a gradient per floating-point
            argument. Arrays that it closes over become further arguments, whose gradients are zeros.
        arguments: arrays.
        unused: zeros of the results' shapes and types.
    """
    import jax
    import jax.extend
    import jax.numpy as jnp

    closed = jax.make_jaxpr(both)(*arguments, *unused)
    held = [jnp.asarray(one) for one in closed.consts]
    count = len(arguments) + len(held)

    def explicit(*flat: Any, **_: Any) -> list[Any]:
        given, constants, cotangents = flat[: len(arguments)], flat[len(arguments) : count], flat[count:]
        computed = jax.extend.core.jaxpr_as_fun(closed.replace(consts=list(constants)))(*given, *cotangents)
        return [*computed, *(jnp.zeros_like(one) for one in constants if _has_gradient(one))]

    return jax.lax.composite(explicit, CUSTOM_VJP)(*arguments, *held, *unused, arguments=count)


def _has_gradient(x: Any) -> bool:
    import jax.numpy as jnp

    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
