"""Rewrites of legal StableHLO that compilers mistreat. Each one names the failure without it, and
`tests/compiler/backends/test_compiler_defects.py` fails once a compiler has mended it.

The passes work on operations, never on text, and keep the meaning, but for changes in their docstrings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planetary.compiler import ir, ops
from planetary.compiler.rewrites.angles import reduce_angles
from planetary.compiler.rewrites.bounds import bound_indices
from planetary.compiler.rewrites.integers import narrow_integers
from planetary.compiler.rewrites.powers import powers_by_parity
from planetary.compiler.rewrites.precision import CONTRACTIONS
from planetary.core.artifact_label import ArtifactLabel


def order_products(module: ir.Module) -> None:
    """Swap the operands of products, in place, where the swapped one is faster; `x · y = (y · x)` transposed.

    Why: IREE 3.13 multiplies rows by columns. An operand laid out otherwise is transposed in memory first, and a
    right-hand side with long rows is slow where many of them are read one below the other: rows that are a multiple of
    4,096 bytes apart share one set of a CPU's first-level cache. Three kinds of products suffer:

    - gradients of weights, which contract the leading dimensions of both operands: the wider operand comes first. For
      512 × 2,048 with 2,048 tokens that is 3.5 to 4.5 times faster, the transposed result included;
    - products with batch dimensions, as in attention: the order that transposes fewer elements. With JAX's order for
      `einsum("bhts,bshd->bthd", weights, values)` it is the weights that are transposed;
    - products with a vector, as of one token with a weight stored as [outputs, inputs]: the order that transposes no
      matrix. With the other one a served function transposed every weight for each token.

    Meaning: unchanged; the terms of a sum may be added in another order. IREE knows no precision of single products, so
    the attribute that asks for one is left out.
    """
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> None:
        if op.operation.name == "stablehlo.dot_general":
            found.append(op.operation)

    ir.walk(module, visit)
    for op in found:
        if _read(op).better_swapped and ir.attribute(op, "algorithm") is None:  # an algorithm may treat them unlike
            _swap(op)


@dataclass(frozen=True)
class _Product:
    """Shapes and dimension numbers of a `dot_general`."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    lhs_batch: list[int]
    rhs_batch: list[int]
    lhs_contract: list[int]
    rhs_contract: list[int]

    @property
    def lhs_free(self) -> list[int]:
        return [d for d in range(len(self.lhs)) if d not in (*self.lhs_batch, *self.lhs_contract)]

    @property
    def rhs_free(self) -> list[int]:
        return [d for d in range(len(self.rhs)) if d not in (*self.rhs_batch, *self.rhs_contract)]

    @property
    def better_swapped(self) -> bool:
        if not self.lhs_contract:
            return False
        rows = math.prod(self.lhs[d] for d in self.lhs_free)
        columns = math.prod(self.rhs[d] for d in self.rhs_free)
        if self.lhs_batch or min(rows, columns) == 1:
            result = rows * columns * math.prod(self.lhs[d] for d in self.lhs_batch) if min(rows, columns) > 1 else 0
            return self._transposed(swapped=True) + result < self._transposed(swapped=False)
        leading = list(range(len(self.lhs_contract)))
        return self.lhs_contract == self.rhs_contract == leading and columns > rows

    def _transposed(self, *, swapped: bool) -> int:
        """How many elements are not in rows (of the first operand) or columns (of the second) of the product."""
        left, right = (self.lhs, self.lhs_contract), (self.rhs, self.rhs_contract)
        (first, contracted), (second, contracted_too) = (right, left) if swapped else (left, right)
        count = 0 if len(first) - 1 in contracted else math.prod(first)
        return count + (math.prod(second) if len(second) - 1 in contracted_too else 0)


def _read(op: ir.Operation) -> _Product:
    numbers = ir.dot_numbers(op)
    lhs, rhs = op.operands
    return _Product(
        tuple(ir.shape_of(lhs)),
        tuple(ir.shape_of(rhs)),
        list(numbers.lhs_batching_dimensions),
        list(numbers.rhs_batching_dimensions),
        list(numbers.lhs_contracting_dimensions),
        list(numbers.rhs_contracting_dimensions),
    )


def _swap(op: ir.Operation) -> None:
    product = _read(op)
    lhs, rhs = op.operands
    batch, rows, columns = len(product.lhs_batch), len(product.lhs_free), len(product.rhs_free)
    with ir.insert_before(op), ir.located(op):
        swapped = ops.dot_general(
            rhs,
            lhs,
            batch=(product.rhs_batch, product.lhs_batch),
            contract=(product.rhs_contract, product.lhs_contract),
            element=ir.element_of(op.results[0]),
        )
        back = [*range(batch), *range(batch + columns, batch + columns + rows), *range(batch, batch + columns)]
        ir.replace_uses(op.results[0], ops.transpose(swapped, back))
    op.erase()


def before_differentiation(module: ir.Module) -> None:
    """Rewrite a model, in place, so the gradient consists of operations every target compiles well."""
    lookups_to_matmuls(module)
    picks_to_selects(module)
    bound_indices(module)


def for_target(module: ir.Module, label: ArtifactLabel, replaced: Sequence[int]) -> None:
    """Prepare a training-step module, in place, for IREE.

    The rewrites are the same for every target, so a build for a machine at hand stands for the others when it is
    checked.

    Args:
        module: with `train_step` and `eval_step`.
        label: baked into `train_step` as reflection text.
        replaced: the argument of `train_step` overwritten by each first result.
    """
    rewrite_for_iree(module)
    train = ir.functions(module)["train_step"]
    mark_in_place(train, replaced)
    bake_label(train, label)


def bake_label(function: ir.Operation, label: ArtifactLabel) -> None:
    """Put a label into a function as reflection text, where `core.artifact_label` finds it."""
    text = label.encode().replace("\\", "\\5C").replace('"', "\\22")
    function.operation.attributes["iree.reflection"] = ir.parse_attribute(f'{{planetary = "{text}"}}')


def rewrite_for_iree(module: ir.Module) -> None:
    """Rewrite, in place, operations that IREE mistreats in any function of a module."""
    narrow_integers(module)
    negate_to_subtract(module)
    conditions_to_selects(module)
    split_long_reductions(module)
    keep_apart_broadcasts(module)
    counters_from_memory(module)
    powers_by_parity(module)
    contractions_to_f32(module)
    own_sorted_values(module)
    order_products(module)
    reduce_angles(module)
    scale_for_each_reader(module)


ONE_HOT_ROWS = 1024
"""Lookups in a table of more rows stay gathers."""


def lookups_to_matmuls(module: ir.Module) -> None:
    """Turn `table[indices]` (a gather of whole rows of a small float matrix) into `one_hot(indices) @ table`.

    Why: the gradient of a gather is a scatter-add, which IREE 3.13 runs one row after the other; that of a matmul is a
    matmul. On a CPU the whole step of the default model ran a third faster. The product costs as many operations as the
    model's own head, and the one-hot rows as much memory as the logits: with 50,257 rows that was most of a step
    (bench/results/cross_entropy.md). Meaning: a NaN or infinity anywhere in the table reaches every looked-up row
    instead of one row only.
    """
    for op in _find(module, "stablehlo.gather"):
        if _is_row_lookup(op):
            _replace_lookup(op)


def _is_row_lookup(op: ir.Operation) -> bool:
    table, indices = op.operands
    shape, result = ir.shape_of(table), ir.shape_of(op.results[0])
    if len(shape) != 2 or shape[0] > ONE_HOT_ROWS or not ir.is_float_element(ir.element_of(table)):
        return False
    numbers = ir.gather_numbers(op)
    collapsed = list(numbers.collapsed_slice_dims)
    leading = len(result) - (2 - len(collapsed))  # the dimensions the indices give
    return (
        ir.ints(op, "slice_sizes") == [1, shape[1]]
        and collapsed in ([0], [])
        # An index into the second dimension is clamped to 0, since a slice takes all of it.
        and list(numbers.start_index_map) in ([0], [0, 1])
        and not list(numbers.operand_batching_dims)
        and list(numbers.offset_dims) == list(range(leading, len(result)))
        and numbers.index_vector_dim >= leading
        and len(ir.shape_of(indices)) in {leading, leading + 1}
    )


def _replace_lookup(op: ir.Operation) -> None:
    table, indices = op.operands
    rows, width = ir.shape_of(table)
    result = ir.shape_of(op.results[0])
    count = _product(result) // width if width else 0
    with ir.insert_before(op), ir.located(op):
        if len(list(ir.gather_numbers(op).start_index_map)) == 2:
            sizes = ir.shape_of(indices)
            indices = ops.slice_(indices, [0] * len(sizes), [*sizes[:-1], 1])
        wanted = _clamped(ops.reshape(indices, [count]), rows)
        row = ops.iota([count, rows], ir.element_of(wanted), 1)
        hit = ops.compare(ops.broadcast_in_dim(wanted, [count, rows], [0]), row, "EQ")
        # A select, not a convert of the boolean: IREE 3.13 folds the latter into the matmul as a signed
        # extension (so that true becomes -1) at some optimisation levels.
        element = ir.element_of(table)
        one_hot = ops.select(hit, ops.full([count, rows], element, 1), ops.full([count, rows], element, 0))
        found = ops.dot_general(one_hot, table, contract=([1], [0]))
        ir.replace_uses(op.results[0], ops.reshape(found, list(result)))
    op.erase()


def _clamped(indices: ir.Value, size: int) -> ir.Value:
    """Emit indices as a gather takes them, clamped to 0 .. size - 1, as i32.

    Results of them have as many elements as the table or the logits: 64-bit integers would take twice the memory
    and time, and a type of 8 or 16 bits need not hold `size`.
    """
    narrow = ir.width_of(ir.element_of(indices)) < 32
    wide = ops.convert(indices, ir.i32()) if narrow else indices
    kept = ops.minimum(ops.maximum(wide, ops.full_like(wide, 0)), ops.full_like(wide, size - 1))
    return ops.convert(kept, ir.i32()) if size <= 1 << 31 else kept


def picks_to_selects(module: ir.Module) -> None:
    """Turn the picking of one float from each row (`take_along_axis`, as cross-entropies do it; in torch-mlir's form
    with row numbers beside the positions) into the sum of a selection.

    Why: the gradient of such a gather is a scatter with batching dimensions, of which IREE 3.13 says
    "'iree_linalg_ext.scatter' op expected indices to be equal to batch rank or batch rank + 1"; that of a
    selection is a selection. Meaning: unchanged.
    """
    for op in _find(module, "stablehlo.gather"):
        wanted = _picked(op)
        if wanted is not None:
            _replace_pick(op, wanted)


def _picked(op: ir.Operation) -> ir.Value | None:
    """Return the positions, one per row, that a gather picks from a float tensor; None if it is another gather."""
    operand, indices = op.operands
    shape, numbers = ir.shape_of(operand), ir.gather_numbers(op)
    rows = list(range(len(shape) - 1))
    if (
        len(shape) < 2
        or not ir.is_float_element(ir.element_of(operand))
        or set(ir.ints(op, "slice_sizes")) != {1}
        or _product(ir.shape_of(op.results[0])) != _product(shape[:-1])
    ):
        return None
    if list(numbers.operand_batching_dims):
        aligned = list(numbers.operand_batching_dims) == list(numbers.start_indices_batching_dims) == rows
        return indices if aligned and list(numbers.start_index_map) == [len(rows)] else None
    return _beside_row_numbers(indices) if list(numbers.start_index_map) == [0, 1] and len(shape) == 2 else None


def _beside_row_numbers(indices: ir.Value) -> ir.Value | None:
    """Return b if `indices` are pairs (row number, b), as torch-mlir and torchax write a gather along rows."""
    op, sizes = ir.defining_op(indices), ir.shape_of(indices)
    if op is None or op.name != "stablehlo.concatenate" or len(op.operands) != 2:
        return None
    first, wanted = op.operands
    numbering = ir.defining_op(_from_start(first))
    if numbering is None or numbering.name != "stablehlo.iota" or ir.integer(numbering, "iota_dimension") != 0:
        return None
    pairs = ir.integer(op, "dimension") == len(sizes) - 1 and sizes[-1] == 2
    return wanted if pairs and set(sizes[1:-1]) <= {1} else None


def _from_start(indices: ir.Value) -> ir.Value:
    """Return indices as they were before a change of shape, and before negative ones were counted from the end."""
    op = ir.defining_op(indices)
    if op is None:
        return indices
    if op.name in ("stablehlo.reshape", "stablehlo.broadcast_in_dim"):
        inner = op.operands[0]
        return _from_start(inner) if _product(ir.shape_of(inner)) == _product(ir.shape_of(indices)) else indices
    condition = ir.defining_op(op.operands[0]) if op.name == "stablehlo.select" else None
    if condition is None or condition.name != "stablehlo.compare" or ir.direction_of(condition) != "LT":
        return indices
    is_wrapped = condition.operands[0] == op.operands[2] and ops.is_zero(condition.operands[1])
    return _from_start(op.operands[2]) if is_wrapped else indices


def _replace_pick(op: ir.Operation, indices: ir.Value) -> None:
    operand = op.operands[0]
    shape = ir.shape_of(operand)
    last = len(shape) - 1
    with ir.insert_before(op), ir.located(op):
        wanted = _clamped(ops.reshape(indices, list(shape[:-1])), shape[-1])
        place = ops.iota(list(shape), ir.element_of(wanted), last)
        hit = ops.compare(ops.broadcast_in_dim(wanted, list(shape), list(range(last))), place, "EQ")
        picked = ops.reduce_sum(ops.select(hit, operand, ops.zeros_like(operand)), [last])
        ir.replace_uses(op.results[0], ops.reshape(picked, list(ir.shape_of(op.results[0]))))
    op.erase()


def negate_to_subtract(module: ir.Module) -> None:
    """Turn `-x` into `0 - x`.

    Why: IREE 3.13 folds a negation before a sum into a subtracting reduction, which the CUDA, HIP and Metal backends do
    not compile. Meaning: the negative of +0 becomes +0.
    """
    for op in _find(module, "stablehlo.negate"):
        value = op.operands[0]
        if ir.is_complex(value):
            continue
        with ir.insert_before(op), ir.located(op):
            ir.replace_uses(op.results[0], ops.subtract(ops.zeros_like(value), value))
        op.erase()


def conditions_to_selects(module: ir.Module) -> None:
    """Turn a condition that is converted to a floating type into a choice of 1 and 0.

    Why: IREE 3.13 fuses the conversion into a product of a vector and a matrix, and the verifier then refuses the
    operation for CPUs. Meaning: the same.
    """
    for op in _find(module, "stablehlo.convert"):
        condition, result = op.operands[0], op.results[0]
        if str(ir.element_of(condition)) != "i1" or not ir.is_float_element(ir.element_of(result)):
            continue
        with ir.insert_before(op), ir.located(op):
            ir.replace_uses(result, ops.select(condition, ops.full_like(result, 1.0), ops.zeros_like(result)))
        op.erase()


LONG_REDUCTION = 1 << 16
"""Sums of more terms than this are split by dimension; float32 loses about 1e-3 relative over 2^16 equal
terms.
"""
LONG_DIMENSION = 1 << 12
"""Sums over a longer dimension are taken by parts."""
MOST_LANES = 64  # are added one after the other


def split_long_reductions(module: ir.Module) -> None:
    """Sum one dimension after the other, innermost first, and a long one by parts, where a sum has very many terms.

    Why: IREE 3.13 adds float32 terms one after the other on CPUs. A sum of ones stops growing at 2^24, and one of
    probabilities over a large vocabulary loses those below half a unit of the sum's last place: the loss of
    SmolLM2-135M was off by 1.4e-4. Meaning: the terms are added in another order.
    """
    for op in _find(module, "stablehlo.reduce"):
        dimensions = sorted(ir.ints(op, "dimensions"))
        if len(op.operands) != 2 or not _adds_floats(op):
            continue
        sizes = [ir.shape_of(op.operands[0])[d] for d in dimensions]
        if max(sizes, default=0) <= LONG_DIMENSION and (len(sizes) < 2 or _product(sizes) <= LONG_REDUCTION):
            continue
        with ir.insert_before(op), ir.located(op):
            value = op.operands[0]
            for dimension in reversed(dimensions):
                value = _sum_by_parts(value, dimension)
            start = ops.broadcast_scalar(op.operands[1], ir.shape_of(value))
            ir.replace_uses(op.results[0], ops.add(value, start))
        op.erase()


def _sum_by_parts(value: ir.Value, dimension: int, most: int = LONG_DIMENSION) -> ir.Value:
    """Sum over a dimension; one of more than `most` terms first as so many sums, the lanes, of every so many terms.

    A CPU adds the lanes as vectors, about the root of the size. Their number divides the size where it can: terms that
    are cut off cost a copy of the others, which doubles the time of a loss over 50,257 words.
    """
    shape = list(ir.shape_of(value))
    size = shape[dimension]
    if size <= most:
        return ops.reduce_sum(value, [dimension])
    root = math.isqrt(size)
    divisors = [n for n in range(root // 8, min(8 * root, size // 2) + 1) if n > 1 and size % n == 0]
    lanes = min(divisors, key=lambda n: abs(math.log(n / root)), default=root)
    rows, rest = divmod(size, lanes)
    whole = ops.slice_dim(value, dimension, 0, rows * lanes) if rest else value
    split = ops.reshape(whole, [*shape[:dimension], rows, lanes, *shape[dimension + 1 :]])
    total = _sum_by_parts(ops.reduce_sum(split, [dimension]), dimension, MOST_LANES)
    if not rest:
        return total
    return ops.add(total, ops.reduce_sum(ops.slice_dim(value, dimension, rows * lanes, size), [dimension]))


def _adds_floats(op: ir.Operation) -> bool:
    body = [inner.name for inner in ir.operations(ir.region_block(op, 0))]
    return body == ["stablehlo.add", "stablehlo.return"] and ir.is_float_element(ir.element_of(op.operands[0]))


def keep_apart_broadcasts(module: ir.Module) -> None:
    """Put a barrier behind a value that is broadcast along different dimensions, as in `s[:, None] - s[None, :]`.

    Why: IREE 3.13 fuses such an expression into the matmul or sum that makes `s`, and gives both sides the same
    element of it: the difference is 0 everywhere (seen for 64 elements, not for 8). Meaning: unchanged. The
    value is written to memory once; it is smaller than the results made of it.
    """
    for function in ir.functions(module).values():
        blocks = [ir.entry_block(function)]
        while blocks:
            block = blocks.pop()
            spread: dict[ir.Value, list[ir.Operation]] = {}
            for op in ir.operations(block):
                if op.name == "stablehlo.broadcast_in_dim" and _adds_dimensions(op):
                    spread.setdefault(op.operands[0], []).append(op)
                blocks += [ir.region_block(op, index) for index in range(len(op.regions))]
            for value, users in spread.items():
                if len({tuple(ir.ints(op, "broadcast_dimensions")) for op in users}) > 1:
                    _put_barrier(value, users)


def _adds_dimensions(op: ir.Operation) -> bool:
    shape = ir.shape_of(op.operands[0])
    return 0 < len(shape) < len(ir.shape_of(op.results[0]))


def _put_barrier(value: ir.Value, users: Sequence[ir.Operation]) -> None:
    with ir.insert_before(users[0]), ir.located(users[0]):
        guarded = ir.emit("stablehlo.optimization_barrier", [value], [value.type]).results[0]
    for op in users:
        op.operands[0] = guarded


def counters_from_memory(module: ir.Module) -> None:
    """Let a sum over a selection by position (`where(i == position, x, 0).sum()`) read the positions from a vector.

    Why: IREE 3.13 fuses the counter into the sum and distributes it for Metal with memory of a type that shaders do not
    have ("failed to legalize operation 'memref.alloc'" of `index`). Meaning: unchanged.
    """
    for op in _find(module, "stablehlo.reduce"):
        chosen = ir.defining_op(op.operands[0])
        hit = None if chosen is None or chosen.name != "stablehlo.select" else ir.defining_op(chosen.operands[0])
        if hit is None or hit.name != "stablehlo.compare":
            continue
        for position, operand in enumerate(hit.operands):
            counter, shape = ir.defining_op(operand), ir.shape_of(operand)
            if counter is None or counter.name != "stablehlo.iota" or len(shape) < 2:
                continue
            dimension = ir.integer(counter, "iota_dimension")
            with ir.insert_before(hit), ir.located(counter):
                line = ops.iota([shape[dimension]], ir.element_of(operand), 0)
                kept = ir.emit("stablehlo.optimization_barrier", [line], [line.type]).results[0]
                hit.operands[position] = ops.broadcast_in_dim(kept, shape, [dimension])


def own_sorted_values(module: ir.Module) -> None:
    """Make sorted values in a loop anew in each pass: a choice that depends on the loop's counter.

    Why: IREE 3.13 sorts in place, in a loop also row numbers it has moved out of the loop: the next sort, or the next
    pass, finds them in the order of the last one. Meaning: unchanged; a copy for each sort.
    """
    for function in ir.functions(module).values():
        blocks: list[tuple[ir.Block, ir.Value | None]] = [(ir.entry_block(function), None)]
        while blocks:
            block, counter = blocks.pop()
            for op in ir.operations(block):
                if op.name == "stablehlo.sort" and counter is not None:
                    _copy_operands(op, counter)
                for index in range(len(op.regions)):
                    inner = ir.region_block(op, index)
                    counts = _counter(inner) if op.name == "stablehlo.while" else None
                    blocks.append((inner, counts or counter))


def _counter(body: ir.Block) -> ir.Value | None:
    carried = (value for value in body.arguments if not ir.shape_of(value))
    return next((value for value in carried if str(ir.element_of(value)) in {"i32", "i64"}), None)


def _copy_operands(op: ir.Operation, counter: ir.Value) -> None:
    with ir.insert_before(op), ir.located(op):
        # Always true, which the barrier hides from compilers.
        guarded = ir.emit("stablehlo.optimization_barrier", [counter], [counter.type]).results[0]
        always = ops.compare_number(guarded, -1, "GE")
        for index, value in enumerate(list(op.operands)):
            chosen = ops.broadcast_scalar(always, ir.shape_of(value))
            op.operands[index] = ops.select(chosen, value, ops.zeros_like(value))


def contractions_to_f32(module: ir.Module) -> None:
    """Let contractions with a bf16 or f16 result sum in f32, and round their result once.

    Why: IREE 3.13 adds the products in the type of the result, on CPUs in some tilings: a sum of 512 products of bf16
    is off by 1.3 % of the largest, where one rounding is 0.2 %. Meaning: fewer roundings.
    """
    for name in sorted(CONTRACTIONS):
        for op in _find(module, name):
            result = op.results[0]
            element = ir.element_of(result)
            if str(element) not in {"bf16", "f16"}:
                continue
            with ir.insert_before(op), ir.located(op):
                wide = ir.clone(op, list(op.operands))
                wide.results[0].set_type(ir.tensor(ir.shape_of(result), ir.f32()))
                ir.replace_uses(result, ops.convert(wide.results[0], element))
            op.erase()


def scale_for_each_reader(module: ir.Module) -> None:
    """Give each of two readers of a tensor times a computed scalar, as of a clipped gradient, a product of its own.

    Why: IREE 3.13 fuses the product with one of Adam's moments only, and so writes the moments beside their place and
    copies them. With two products, whose operands are swapped so that they are not merged, parameter and moments are
    written in place by one dispatch. Meaning: unchanged.
    """
    for op in _find(module, "stablehlo.multiply"):
        scalar = ir.defining_op(op.operands[1])
        if scalar is None or scalar.name != "stablehlo.broadcast_in_dim" or ir.shape_of(scalar.operands[0]):
            continue
        made, readers = ir.defining_op(scalar.operands[0]), ir.uses_of(op.results[0])
        if made is None or made.name == "stablehlo.constant" or len({reader for reader, _ in readers}) != 2:
            continue
        with ir.insert_before(op), ir.located(op):
            swapped = ir.clone(op, list(reversed(op.operands))).results[0]
        for reader, position in readers:
            if reader == readers[0][0]:
                reader.operands[position] = swapped


def mark_in_place(function: ir.Operation, replaced: Sequence[int | None]) -> None:
    """Let IREE write result `i` of `function` over the argument `replaced[i]`, if any, which has the same type.

    A single number is not written over: IREE 3.13 may read it afterwards, as it did a count that was compared with zero
    and increased.
    """
    kinds = ir.argument_types(function)
    by_argument = {argument: result for result, argument in enumerate(replaced) if argument is not None}
    entries = [
        f"{{iree.abi.output = {by_argument[i]} : index}}"
        if i in by_argument and _product(ir.shape_of_type(kind)) != 1
        else "{}"
        for i, kind in enumerate(kinds)
    ]
    function.operation.attributes["arg_attrs"] = ir.parse_attribute(f"[{', '.join(entries)}]")


def _find(module: ir.Module, name: str) -> list[ir.Operation]:
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> None:
        if op.operation.name == name:
            found.append(op.operation)

    ir.walk(module, visit)
    return found


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
