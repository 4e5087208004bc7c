"""Rules of `reduce_window` (pooling and cumulative operations) and `select_and_scatter`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.reverse import pull_back_through
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, rule_many
from planetary.compiler.autodiff.rules import bodies
from planetary.compiler.autodiff.rules.reduce import tree
from planetary.compiler.ir import Block, Operation, Value
from planetary.core.errors import UnsupportedOpError


@dataclass(frozen=True)
class Windows:
    """The attributes of a windowed operation, one number per dimension."""

    size: list[int]
    stride: list[int]
    base_dilation: list[int]
    dilation: list[int]
    padding: list[tuple[int, int]]

    def attributes(self) -> dict[str, ir.Attribute]:
        return {
            "window_dimensions": ir.ints_attribute(self.size),
            "window_strides": ir.ints_attribute(self.stride),
            "base_dilations": ir.ints_attribute(self.base_dilation),
            "window_dilations": ir.ints_attribute(self.dilation),
            "padding": ir.padding_attribute(self.padding),
        }

    def running_dimension(self, shape: Sequence[int]) -> tuple[int, bool] | None:
        """(dimension, reversed) if this is a cumulative operation along one dimension of `shape`."""
        trivial = (self.stride, self.base_dilation, self.dilation)
        if any(n != 1 for numbers in trivial for n in numbers):
            return None
        wide = [d for d, n in enumerate(self.size) if n != 1]
        flat = [pair for d, pair in enumerate(self.padding) if d not in wide]
        if len(wide) != 1 or any(pair != (0, 0) for pair in flat):
            return None
        d = wide[0]
        if self.size[d] != shape[d]:
            return None
        if self.padding[d] == (shape[d] - 1, 0):
            return d, False
        return (d, True) if self.padding[d] == (0, shape[d] - 1) else None


def _windows(op: Operation) -> Windows:
    size = ir.ints(op, "window_dimensions")
    ones = [1] * len(size)
    flat = ir.ints(op, "padding", [0] * (2 * len(size)))
    return Windows(
        size,
        ir.ints(op, "window_strides", ones),
        ir.ints(op, "base_dilations", ones),
        ir.ints(op, "window_dilations", ones),
        [(flat[2 * d], flat[2 * d + 1]) for d in range(len(size))],
    )


def reduce_window(xs: Sequence[Value], inits: Sequence[Value], windows: Windows, body: ops.Body) -> list[Value]:
    """Emit a `reduce_window`; the body gets accumulators, then elements."""
    shape = [_places(n, windows, d) for d, n in enumerate(ir.shape_of(xs[0]))]
    kinds = [ir.tensor(shape, ir.element_of(x)) for x in xs]
    op = ir.emit("stablehlo.reduce_window", [*xs, *inits], kinds, windows.attributes(), regions=1)
    scalars = [init.type for init in inits]
    ir.fill_region(op, 0, scalars + scalars, body)
    return list(op.results)


def _dilated(n: int, dilation: int) -> int:
    return 0 if n == 0 else (n - 1) * dilation + 1


def _places(n: int, windows: Windows, d: int) -> int:
    low, high = windows.padding[d]
    room = _dilated(n, windows.base_dilation[d]) + low + high
    window = _dilated(windows.size[d], windows.dilation[d])
    return 0 if room < window else (room - window) // windows.stride[d] + 1


@rule_many(
    "stablehlo.reduce_window",
    note="max and min: to the first extremum of a window; cumulative ones share among ties, as in JAX",
)
def _reduce_window(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    count = len(site.results)
    body = ir.region_block(site.op, 0)
    windows = _windows(site.op)
    kind = bodies.single_operation(body) if count == 1 else None
    ct = cts[0]
    if 0 in ir.shape_of(site.y) or 0 in ir.shape_of(site.x):
        return [None] * len(site.inputs)
    if kind == "stablehlo.add" and ct is not None:
        by_init = ops.reduce_sum(ct, list(range(len(ir.shape_of(ct))))) if site.needs[1] else None
        return [_sum_backward(ct, site.x, windows) if site.needs[0] else None, by_init]
    running = windows.running_dimension(ir.shape_of(site.x))
    if running is not None and not any(site.needs[count:]):
        return pull_back_through(site, cts, lambda: running_reduce(body, site.inputs[:count], *running))
    dense = all(n == 1 for n in windows.dilation)
    if kind in ("stablehlo.maximum", "stablehlo.minimum") and ct is not None and dense and not site.needs[1]:
        direction = "GE" if kind == "stablehlo.maximum" else "LE"
        return [_to_the_first(site.x, ct, windows, direction), None]
    xs, inits = site.inputs[:count], site.inputs[count : 2 * count]
    return pull_back_through(site, cts, lambda: _by_patches(body, xs, inits, windows))


def _sum_backward(ct: Value, x: Value, windows: Windows) -> Value:
    """Every element gathers the cotangents of the windows it lies in: again a windowed sum."""
    low, high = [], []
    for d, n in enumerate(ir.shape_of(x)):
        window = _dilated(windows.size[d], windows.dilation[d])
        places = _dilated(ir.shape_of(ct)[d], windows.stride[d])
        before = window - windows.padding[d][0] - 1
        low.append(before)
        high.append(_dilated(n, windows.base_dilation[d]) + window - 1 - places - before)
    zero = ops.scalar(ir.element_of(ct), 0)
    wide = ops.pad(ct, zero, low, high, [s - 1 for s in windows.stride])
    flat = [(0, 0)] * len(low)
    back = Windows(windows.size, windows.base_dilation, [1] * len(low), windows.dilation, flat)
    return reduce_window([wide], [zero], back, ops.binary_body("stablehlo.add"))[0]


def _to_the_first(x: Value, ct: Value, windows: Windows, direction: str) -> Value:
    """The cotangent of every window goes to the window's first greatest (GE) or least (LE) element.

    Padding is laid out before, as JAX does it: with padding of its own, XLA's select_and_scatter takes another one than
    the first of several equal elements.
    """
    low, high = [pair[0] for pair in windows.padding], [pair[1] for pair in windows.padding]
    holes = [n - 1 for n in windows.base_dilation]
    if not any(low + high + holes):
        return _select_and_scatter(x, ct, windows, direction)
    nothing = ops.scalar(ir.element_of(x), -math.inf if direction == "GE" else math.inf)
    found = _select_and_scatter(ops.pad(x, nothing, low, high, holes), ct, windows, direction)
    zero = ops.scalar(ir.element_of(found), 0)
    found = ops.pad(found, zero, [-n for n in low], [-n for n in high], [0] * len(low))
    return ops.slice_(found, [0] * len(low), ir.shape_of(found), windows.base_dilation)


def _select_and_scatter(x: Value, ct: Value, windows: Windows, direction: str) -> Value:
    attributes = {
        "window_dimensions": ir.ints_attribute(windows.size),
        "window_strides": ir.ints_attribute(windows.stride),
    }
    zero = ops.scalar(ir.element_of(ct), 0)
    op = ir.emit("stablehlo.select_and_scatter", [x, ct, zero], [x.type], attributes, regions=2)
    kind = ir.tensor((), ir.element_of(x))
    ir.fill_region(op, 0, [kind, kind], lambda args: [ops.compare(args[0], args[1], direction)])
    ir.fill_region(op, 1, [kind, kind], ops.binary_body("stablehlo.add"))
    return op.results[0]


# --- cumulative -------------------------------------------------------------------------------------------


def running_reduce(body: Block, xs: Sequence[Value], dimension: int, backwards: bool) -> list[Value]:
    """Inclusive prefix reductions along a dimension, in logarithmic depth (Blelloch 1990, odd-even form)."""
    if backwards:
        xs = [ops.reverse(x, [dimension]) for x in xs]
    done = _prefixes(body, list(xs), dimension)
    return [ops.reverse(x, [dimension]) for x in done] if backwards else done


def _prefixes(body: Block, xs: list[Value], d: int) -> list[Value]:
    n = ir.shape_of(xs[0])[d]
    if n < 2:
        return xs
    first = [ops.slice_dim(x, d, 0, n - 1, 2) for x in xs]
    second = [ops.slice_dim(x, d, 1, n, 2) for x in xs]
    odd = _prefixes(body, bodies.vectorized(body, [*first, *second]), d)
    later = [ops.slice_dim(x, d, 2, n, 2) for x in xs] if n > 2 else []
    known = odd if n % 2 else [ops.slice_dim(x, d, 0, n // 2 - 1) for x in odd]
    even = [ops.slice_dim(x, d, 0, 1) for x in xs]
    if later:
        merged = bodies.vectorized(body, [*known, *later])
        even = [ops.concatenate([e, m], d) for e, m in zip(even, merged, strict=True)]
    return [_interleave(e, o, d) for e, o in zip(even, odd, strict=True)]


def _interleave(even: Value, odd: Value, d: int) -> Value:
    """Elements of `even` and `odd` in turn along dimension `d`; `even` may have one more."""
    zero = ops.scalar(ir.element_of(even), 0)
    total = ir.shape_of(even)[d] + ir.shape_of(odd)[d]
    rank = len(ir.shape_of(even))

    def spread(x: Value, before: int) -> Value:
        after = total - before - _dilated(ir.shape_of(x)[d], 2)
        only = [int(i == d) for i in range(rank)]
        return ops.pad(x, zero, [before * i for i in only], [after * i for i in only], only)

    return ops.add(spread(even, 0), spread(odd, 1))


# --- any body, any window ---------------------------------------------------------------------------------


def _by_patches(body: Block, xs: Sequence[Value], inits: Sequence[Value], windows: Windows) -> list[Value]:
    """Lay every window out along a new leading dimension and reduce that."""
    patches = [_patches(x, init, windows) for x, init in zip(xs, inits, strict=True)]
    return tree(body, patches, inits)


def _patches(x: Value, fill: Value, windows: Windows) -> Value:
    """`[window elements, places...]`: the elements of each window, padding filled with a scalar."""
    low = [pair[0] for pair in windows.padding]
    high = [pair[1] for pair in windows.padding]
    places = [_places(n, windows, d) for d, n in enumerate(ir.shape_of(x))]
    x = ops.pad(x, fill, low, high, [n - 1 for n in windows.base_dilation])
    rank = len(places)
    for d in range(rank):
        rows = np.arange(windows.size[d])[:, None] * windows.dilation[d]
        table = rows + np.arange(places[d])[None, :] * windows.stride[d]
        # By now d new dimensions stand in front, each before the matching dimension.
        x = _take(x, table.astype(np.int32), d + d)
    # Now ordered [w0, p0, w1, p1, ...].
    order = [2 * d for d in range(rank)] + [2 * d + 1 for d in range(rank)]
    return ops.reshape(ops.transpose(x, order), [math.prod(windows.size), *places])


def _take(x: Value, table: np.ndarray, dimension: int) -> Value:
    """Replace one dimension by the two of an index table."""
    shape = ir.shape_of(x)
    rest = [d for d in range(len(shape)) if d != dimension]
    offset = [d if d < dimension else d + 1 for d in rest]
    numbers = ir.gather_dimensions(offset, [dimension], [], [], [dimension], 2)
    sizes = [1 if d == dimension else n for d, n in enumerate(shape)]
    kind = ir.tensor([*shape[:dimension], *table.shape, *shape[dimension + 1 :]], ir.element_of(x))
    return ops.gather(x, ops.constant(table), numbers, sizes, kind)


# --- select and scatter -----------------------------------------------------------------------------------


@rule_many("stablehlo.select_and_scatter", note="by the source: where it was added; by the operand: zero")
def _select_and_scatter_rule(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    x, _, _ = site.inputs
    ct = cts[0]
    select, scatter = ir.region_block(site.op, 0), ir.region_block(site.op, 1)
    comparison = bodies.single_operation(select)
    direction = ir.direction_of(ir.operations(select)[0]) if comparison == "stablehlo.compare" else ""
    if bodies.single_operation(scatter) != "stablehlo.add" or direction not in ("GE", "GT", "LE", "LT"):
        raise UnsupportedOpError(
            site.name,
            ir.location_text(site.op),
            "only the form that selects by comparison and scatters by addition has a rule",
        )
    assert ct is not None
    by_source = None
    if site.needs[1]:
        lowest = -math.inf if direction[0] == "G" else math.inf
        inits = [ops.scalar(ir.element_of(x), lowest), ops.scalar(ir.element_of(ct), 0)]

        def choose(args: list[Value]) -> list[Value]:
            kept = bodies.vectorized(select, [args[0], args[2]])[0]
            return [ops.select(kept, args[0], args[2]), ops.select(kept, args[1], args[3])]

        by_source = reduce_window([x, ct], inits, _windows(site.op), choose)[1]
    by_init = ops.reduce_sum(ct, list(range(len(ir.shape_of(ct))))) if site.needs[2] else None
    return [None, by_source, by_init]
