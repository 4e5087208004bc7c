"""The rules, grouped by kind of operation; importing this package fills `rule_table`."""

from __future__ import annotations

from planetary.compiler.autodiff import rule_table
from planetary.compiler.autodiff.rules import (
    control_flow,
    convolution,
    dot,
    elementwise,
    fft,
    gather_scatter,
    rare,
    reduce,
    shape,
    sorting,
    window,
)
from planetary.compiler.autodiff.rules.library import composites, library_functions, softmax, special
from planetary.compiler.autodiff.rules.matrices import lapack, linear_algebra, qr

__all__ = [
    "composite_names",
    "composites",
    "control_flow",
    "convolution",
    "dot",
    "elementwise",
    "fft",
    "gather_scatter",
    "lapack",
    "library_functions",
    "linear_algebra",
    "qr",
    "rare",
    "reduce",
    "shape",
    "softmax",
    "sorting",
    "special",
    "window",
]

_COMPOSITE = "stablehlo.composite @"


def composite_names() -> list[str]:
    """Names of the composites with an entry of their own; all others are replaced by their decomposition."""
    return [name.removeprefix(_COMPOSITE) for name in rule_table.entries() if name.startswith(_COMPOSITE)]
