"""Compares `differentiate` with `jax.vjp` on a JAX function; used by the tests and by
bench/differentiate_sweep.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import xla_client

from planetary.compiler.autodiff.differentiate import differentiate

TOLERANCE = {
    "bfloat16": 3e-2,
    "float16": 6e-3,
    "float32": 2e-5,
    "complex64": 2e-5,
    "float64": 1e-10,
    "complex128": 1e-10,
}


def run_stablehlo(text: str, arguments: Sequence[Any]) -> list[np.ndarray]:
    """Compile StableHLO text with XLA for the host and run it."""
    client = jax.devices()[0].client
    devices = xla_client.DeviceList(tuple(client.local_devices()[:1]))
    executable = client.compile_and_load(text, devices, xla_client.CompileOptions())
    return [np.asarray(x) for x in executable.execute([jax.device_put(a) for a in arguments])]


def has_gradient(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def random_cotangents(outputs: Sequence[Any], seed: int) -> list[Any]:
    """Normal numbers in each output's dtype, zeros for integer outputs."""
    draw = np.random.default_rng(seed)
    made = []
    for out in outputs:
        if not has_gradient(out):
            made.append(jnp.zeros(out.shape, out.dtype))
            continue
        numbers = draw.normal(size=out.shape)
        if jnp.issubdtype(out.dtype, jnp.complexfloating):
            numbers = numbers + 1j * draw.normal(size=out.shape)
        made.append(jnp.asarray(numbers, out.dtype))
    return made


def both_gradients(
    function: Callable[..., Any], arguments: Sequence[Any], wrt: Sequence[int], seed: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(ours, JAX's) gradients by the `wrt` arguments for one random set of cotangents."""
    text = jax.jit(function, keep_unused=True).lower(*arguments).as_text()
    ours_text = differentiate(text, wrt=wrt)

    def flat(*inner: Any) -> list[Any]:
        full = list(arguments)
        for position, value in zip(wrt, inner, strict=True):
            full[position] = value
        return jax.tree.leaves(function(*full))

    primals = [arguments[i] for i in wrt]
    outputs = jax.eval_shape(flat, *primals)
    cotangents = random_cotangents(outputs, seed)
    theirs = jax.jit(_vjp, static_argnums=0)(flat, primals, cotangents)
    return run_stablehlo(ours_text, [*arguments, *cotangents]), [np.asarray(g) for g in theirs]


def _vjp(function: Callable[..., list[Any]], primals: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
    outputs, pull_back = jax.vjp(function, *primals)
    zero = jax.dtypes.float0
    fitting = [c if has_gradient(o) else np.zeros(o.shape, zero) for o, c in zip(outputs, cotangents, strict=True)]
    return pull_back(fitting)


def deviation(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference relative to the largest magnitude; infinite if NaN or infinities differ."""
    assert ours.shape == theirs.shape, f"shapes differ: {ours.shape} and {theirs.shape}"
    assert ours.dtype == theirs.dtype, f"dtypes differ: {ours.dtype} and {theirs.dtype}"
    if ours.size == 0:
        return 0.0
    wide = np.complex128 if np.iscomplexobj(ours) else np.float64
    a, b = ours.astype(wide), theirs.astype(wide)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.abs(a[finite] - b[finite]).max() / max(np.abs(b[finite]).max(), 1e-3))


def check(
    function: Callable[..., Any],
    *arguments: Any,
    wrt: Sequence[int] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> float:
    """Assert that both gradients agree; returns the largest relative deviation.

    `wrt` defaults to every float or complex argument, the tolerance to what the dtypes allow.
    """
    arrays = [jnp.asarray(a) for a in arguments]
    positions = [i for i, a in enumerate(arrays) if has_gradient(a)] if wrt is None else list(wrt)
    ours, theirs = both_gradients(function, arrays, positions, seed)
    allowed = tolerance or max(TOLERANCE[str(arrays[i].dtype)] for i in positions)
    worst = 0.0
    for position, a, b in zip(positions, ours, theirs, strict=True):
        found = deviation(a, b)
        assert found <= allowed, f"argument {position}: deviation {found:.3g} > {allowed:.3g}\n{a}\n{b}"
        worst = max(worst, found)
    return worst


def check_together(cases: Sequence[Any]) -> dict[str, float]:
    """Compare several one-module-sized cases (see sweep_cases.Case) in one compilation.

    Every case keeps its own arguments, so that its gradients depend on it alone. Returns deviation over tolerance by
    "name dtype": a case passes if that is at most 1.
    """
    arguments: list[Any] = []
    spans: list[tuple[int, int]] = []
    for case in cases:
        spans.append((len(arguments), len(arguments) + len(case.arguments)))
        arguments += case.arguments

    def together(*flat: Any) -> list[Any]:
        return [case.function(*flat[a:b]) for case, (a, b) in zip(cases, spans, strict=True)]

    positions = [i for i, a in enumerate(arguments) if has_gradient(a)]
    ours, theirs = both_gradients(together, arguments, positions)
    found = dict(zip(positions, zip(ours, theirs, strict=True), strict=True))
    ratios: dict[str, float] = {}
    for case, (a, b) in zip(cases, spans, strict=True):
        allowed = case.tolerance or TOLERANCE[case.dtype]
        ratios[f"{case.name} {case.dtype}"] = max(
            (deviation(*found[i]) / allowed for i in range(a, b) if i in found), default=0.0
        )
    return ratios


def jax_can(case: Any) -> str:
    """Why JAX has no gradient for a case, or an empty string if it has."""

    def gradient(*arguments: Any) -> Any:
        outputs, pull_back = jax.vjp(
            lambda *a: [o for o in jax.tree.leaves(case.function(*a)) if has_gradient(o)], *arguments
        )
        return pull_back([jnp.ones_like(o) for o in outputs])

    try:
        jax.jit(gradient).lower(*case.arguments)
    except Exception as error:  # noqa: BLE001 - whatever JAX raises is the answer
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""
