"""Products of rows with a weight in blocks, as IREE's CPU compiler runs them fast.

`store_in_blocks` writes them in StableHLO as a batch of products with the same rows in each. IREE 3.13 copies
the rows for every block, which takes longer than the products of eight rows or of a prompt (bench/results/serving.md).
`linalg.generic` names the rows once.
"""

from __future__ import annotations

from planetary.compiler import ir, ops
from planetary.compiler.rewrites.weight_blocks import VectorUnit


def share_rows(module: ir.Module, unit: VectorUnit) -> int:
    """Let products of one matrix with each block read that matrix itself, in place; return how many.

    Products that sum in float32 are changed, where the CPU's registers hold a good number of rows. Blocks of bf16 are
    widened inside the product: IREE would widen all of a weight before this one.
    """
    found = []

    def visit(op: ir.Operation) -> None:
        if op.name == "stablehlo.dot_general" and _is_of_blocks(op, unit):
            found.append(op)

    ir.walk(module.operation, visit)
    for op in found:
        spread = ir.defining_op(op.operands[0])
        assert spread is not None
        with ir.insert_before(op), ir.located(op):
            rows, blocks = ops.convert(spread.operands[0], ir.f32()), _stored(op.operands[1])
            if ir.element_of(blocks) != ir.f32() and ir.shape_of(rows)[0] > 1 and unit.block > 2:
                # IREE would widen a block once for each row of a tile: too often for one of eight rows.
                op.attributes["compilation_info"] = _tiles(rows, blocks, unit, alone=False)
                continue
            ir.replace_uses(op.results[0], _product(rows, blocks, unit))
        op.erase()
    for function in ir.functions(module).values():
        ir.erase_dead(ir.entry_block(function))
    return len(found)


def _is_of_blocks(op: ir.Operation, unit: VectorUnit) -> bool:
    numbers, (rows, blocks) = ir.dot_numbers(op), op.operands
    made = ir.defining_op(rows)
    return (
        list(numbers.lhs_batching_dimensions) == list(numbers.rhs_batching_dimensions) == [0]
        and list(numbers.lhs_contracting_dimensions) == [2]
        and list(numbers.rhs_contracting_dimensions) == [1]
        and len(ir.shape_of(blocks)) == 3
        and ir.shape_of(blocks)[2] in unit.widths
        and made is not None
        and made.name == "stablehlo.broadcast_in_dim"
        and ir.ints(made, "broadcast_dimensions") == [1, 2]
        and ir.element_of(op.results[0]) == ir.f32()
        and all(str(ir.element_of(value)) in {"f32", "bf16"} for value in op.operands)
        and unit.rows(ir.shape_of(rows)[1], ir.shape_of(blocks)[2]) > 0
    )


def _stored(blocks: ir.Value) -> ir.Value:
    """Return the blocks before they are widened."""
    made = ir.defining_op(blocks)
    widened = made is not None and made.name == "stablehlo.convert" and str(ir.element_of(made.operands[0])) == "bf16"
    return made.operands[0] if made is not None and widened else blocks


def _product(rows: ir.Value, blocks: ir.Value, unit: VectorUnit) -> ir.Value:
    """Emit [blocks, rows, width] of rows [rows, inputs] and blocks [blocks, inputs, width]."""
    count, inputs = ir.shape_of(rows)
    number, _, width = ir.shape_of(blocks)
    # IREE keeps the sums of one row in registers: of four with the loop over rows left out, of two with it.
    alone = count == 1 and width > 2 * unit.floats
    row = "" if alone else "m, "
    kind = ir.tensor([number, width] if alone else [number, count, width], ir.f32())
    loops = f"(b, {row}n, k)"
    kinds = ", ".join(f"#linalg.iterator_type<{loop}>" for loop in ["parallel"] * (2 + (not alone)) + ["reduction"])
    attributes = {
        "indexing_maps": f"[affine_map<{loops} -> ({row}k)>, affine_map<{loops} -> (b, k, n)>, "
        f"affine_map<{loops} -> (b, {row}n)>]",
        "iterator_types": f"[{kinds}]",
        "operandSegmentSizes": "array<i32: 2, 1>",
    }

    def add(x: ir.Value, w: ir.Value, total: ir.Value) -> ir.Value:
        wide = w if w.type == ir.f32() else ir.emit("arith.extf", [w], [ir.f32()]).results[0]
        return ir.elementwise("arith.addf", total, ir.elementwise("arith.mulf", x, wide))

    product = ir.emit_foreign(
        "linalg.generic",
        [ops.reshape(rows, [inputs]) if alone else rows, blocks, ops.zeros(kind)],
        kind,
        {name: ir.foreign_attribute(text) for name, text in attributes.items()}
        | {"compilation_info": _tiles(rows, blocks, unit, alone=alone)},
        body=([ir.f32(), ir.element_of(blocks), ir.f32()], add, "linalg.yield"),
    )
    return ops.reshape(product, [number, count, width])


def _tiles(rows: ir.Value, blocks: ir.Value, unit: VectorUnit, *, alone: bool) -> ir.Attribute:
    """Return IREE's tile sizes of a product: whole rows of a block, read once in order.

    IREE 3.13 itself takes a quarter of a block's width at a time, and so reads it four times in strides: a product of
    one row then gets 10 GB/s of 25 from memory, and one of eight rows half the rate (bench/results/serving.md).
    """
    (count, inputs), width = ir.shape_of(rows), ir.shape_of(blocks)[2]
    steps = 4 if inputs % 4 == 0 else 1
    whole, part, none = ("", "", "") if alone else (f"{count}, ", f"{unit.rows(count, width)}, ", "0, ")
    tiles = (
        f"distribution = [1, {whole}{width}, 0], vector_common_parallel = [1, {part}{width}, 0], "
        f"vector_reduction = [0, {none}0, {steps}]"
    )
    return ir.foreign_attribute(
        f"#iree_codegen.compilation_info<lowering_config = #iree_cpu.lowering_config<{tiles}>, "
        "translation_info = <pipeline = #iree_cpu.pipeline<DoubleTilingExpert>>>"
    )
