"""Element types of a step: low-precision arithmetic around float32 parameters, and demotion of f64.

Contractions, stochastic rounding and loss scaling are the low-precision part. Exporters leave 64-bit islands in models
of 16 and 32 bits: Python numbers, and statistics of a norm asked for in double precision. IREE computes them in f32
without a word (`--iree-input-demote-f64-to-f32` is the default, and most targets have no f64), so a reference in f64 is
another function. Here the demotion is part of the training step's StableHLO: reference and artifact compute the same,
and tolerances are those of f32.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planetary.compiler import ir, ops
from planetary.compiler.ir import Block, Module, Operation, Type, Value
from planetary.core.errors import CompileError
from planetary.core.tensors import TensorSpec

CONTRACTIONS = frozenset({"stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution"})


def round_contractions(block: Block, element: Type) -> int:
    """Let every float32 contraction in a block, and in loop bodies, multiply in `element`.

    Operands are rounded to nearest; products are summed, and results kept, in float32. A contraction with an explicit
    `algorithm`, or of another type, is left as it is. Returns how many were changed.
    """
    found = []

    def visit(op: ir.Operation) -> None:
        if op.name in CONTRACTIONS and ir.attribute(op, "algorithm") is None:
            found.append(op)

    for op in ir.operations(block):
        ir.walk(op, visit)
    wide = [op for op in found if all(ir.element_of(v) == ir.f32() for v in (*op.operands, op.results[0]))]
    for op in wide:
        with ir.insert_before(op), ir.located(op):
            for position, operand in enumerate(list(op.operands)):
                op.operands[position] = ops.convert(operand, element)
    return len(wide)


def coarsest_factor(stablehlo: str | bytes) -> str:
    """Return the element type with the fewest digits among the factors of a module's contractions: "bf16", "f16"
    or "f32" (which stands for all others).
    """
    kinds: set[str] = set()

    def visit(op: ir.Operation) -> None:
        if op.name in CONTRACTIONS:
            kinds.update(str(ir.element_of(factor)) for factor in op.operands)

    with ir.new_context():
        ir.walk(ir.parse_module(stablehlo).operation, visit)
    return next((kind for kind in ("bf16", "f16") if kind in kinds), "f32")


def widen_factors(module: ir.Module) -> None:
    """Let contractions with a wider result than factors multiply in the type of the result, which is equal.

    Why: XLA's CPU client (jaxlib 0.10) compiles such a contraction of bf16 or f16 factors, and then refuses to run
    it unless the contracted dimensions are in the usual places.
    """
    found = []

    def visit(op: ir.Operation) -> None:
        if op.name in CONTRACTIONS and any(ir.element_of(v) != ir.element_of(op.results[0]) for v in op.operands):
            found.append(op)

    ir.walk(module.operation, visit)
    for op in found:
        if all(str(ir.element_of(v)) in {"bf16", "f16"} for v in op.operands):
            with ir.insert_before(op), ir.located(op):
                for position, operand in enumerate(list(op.operands)):
                    op.operands[position] = ops.convert(operand, ir.element_of(op.results[0]))


def exact_products(module: ir.Module) -> int:
    """Let float32 contractions of default precision multiply in float32; return how many were changed.

    Why: XLA's default for NVIDIA GPUs rounds their factors to TF32, which has 11 bits. `train.precision` says when
    factors are rounded.
    """
    default = {"", "DEFAULT"}
    found: list[Operation] = []

    def visit(op: Operation) -> None:
        if op.name not in CONTRACTIONS or ir.attribute(op, "algorithm") is not None:
            return
        given = str(ir.attribute(op, "precision_config") or "")
        if set(re.findall(r"precision<?\s*([A-Z]+)", given)) <= default and _multiplies_f32(op):
            found.append(op)

    ir.walk(module.operation, visit)
    for op in found:
        op.attributes["precision_config"] = ir.parse_attribute(
            "[#stablehlo<precision HIGHEST>, #stablehlo<precision HIGHEST>]"
        )
    return len(found)


def _multiplies_f32(op: Operation) -> bool:
    return all(ir.element_of(value) == ir.f32() for value in op.operands)


# --- stochastic rounding ------------------------------------------------------------------------------------


def round_stochastically(value: Value, element: Type, step: Value, salt: int) -> Value:
    """Emit a float32 tensor in bf16 or f16, rounded up or down at random so that the expectation is exact.

    Each element becomes one of the two neighbours, the nearer one with the greater probability; infinities and NaN
    stay. The random bits are a function of `step` (i32 scalar), `salt` and the element's index alone, the same on every
    device.
    """
    bits = _random_bits(ir.shape_of(value), step, salt)
    raw = ir.emit("stablehlo.bitcast_convert", [value], [ir.tensor(ir.shape_of(value), ir.i32())]).results[0]
    dropped = {"bf16": 16, "f16": 13}[str(element)]
    mask = (1 << dropped) - 1
    noise = ops.and_(bits, ops.full_like(bits, mask))
    moved = ops.and_(ops.add(raw, noise), ops.full_like(raw, ~mask))
    rounded = ir.emit("stablehlo.bitcast_convert", [moved], [value.type]).results[0]
    if dropped == 13:  # below 2^-14 an f16 has a fixed spacing of 2^-24 instead of a fixed number of digits
        uniform = ops.scale(ops.convert(ops.and_(bits, ops.full_like(bits, (1 << 23) - 1)), ir.f32()), 2.0**-23)
        fixed = ops.scale(ops.floor(ops.add(ops.scale(value, 2.0**24), uniform)), 2.0**-24)
        rounded = ops.select(ops.compare_number(ops.abs_(value), 2.0**-14, "LT"), fixed, rounded)
    rounded = ops.select(ir.emit("stablehlo.is_finite", [value]).results[0], rounded, value)
    return ops.convert(rounded, element)


def _random_bits(shape: Sequence[int], step: Value, salt: int) -> Value:
    """Emit 32 random bits per element: a hash of (index, salt, step) by the finaliser of MurmurHash3."""
    count = 1
    for size in shape:
        count *= size
    key = _mixed_bits(ops.add(step, ops.full_like(step, _signed(salt * 0x9E3779B9))))
    index = ops.multiply(ops.iota([count], ir.i32(), 0), ops.full([count], ir.i32(), _signed(0x9E3779B1)))
    return ops.reshape(_mixed_bits(ops.add(index, ops.broadcast_scalar(key, [count]))), shape)


def _mixed_bits(h: Value) -> Value:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        down = ops.binary("stablehlo.shift_right_logical", h, ops.full_like(h, shift))
        h = ops.multiply(ops.binary("stablehlo.xor", h, down), ops.full_like(h, _signed(factor)))
    return h


def _signed(number: int) -> int:
    """Return the i32 with the low 32 bits of a number."""
    low = number & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


# --- loss scaling -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

    The scale is `2 ** (16 - halvings)`, so a state of zeros starts at 65536. A step whose gradients are not finite
    changes nothing but the scale, which is halved; after `patience` good steps in a row it is doubled. At a scale of 1
    nothing is left to halve: then gradients that are not finite are the model's own and go the way of all others.

    Attributes:
        halvings: i32 scalar, from -8 to 16.
        good: i32 scalar, good steps in a row.
    """

    halvings: Value
    good: Value
    patience: int = 2000

    STATE = (TensorSpec("loss_scale.halvings", "i32", ()), TensorSpec("loss_scale.good_steps", "i32", ()))
    MOST_HALVINGS = 16
    LEAST_HALVINGS = -8

    @property
    def factor(self) -> Value:
        """Emit the scale, an f32 scalar."""
        return _power_of_two(ops.subtract(ops.full_like(self.halvings, 16), self.halvings))

    @property
    def inverse(self) -> Value:
        """Emit one over the scale, exactly."""
        return _power_of_two(ops.shift(self.halvings, -16))

    def overflowed(self, grad_norm: Value) -> Value:
        """Emit whether the step must be skipped, a boolean scalar."""
        finite = ir.emit("stablehlo.is_finite", [grad_norm]).results[0]
        can_fall = ops.compare_number(self.halvings, self.MOST_HALVINGS, "LT")
        return ops.and_(ops.not_(finite), can_fall)

    def advanced(self, skipped: Value) -> list[Value]:
        """Emit the new (halvings, good steps)."""
        one, zero = ops.full_like(self.good, 1), ops.full_like(self.good, 0)
        good = ops.add(self.good, one)
        full = ops.compare_number(good, self.patience, "GE")
        raised = ops.maximum(ops.subtract(self.halvings, one), ops.full_like(one, self.LEAST_HALVINGS))
        halvings = ops.select(skipped, ops.add(self.halvings, one), ops.select(full, raised, self.halvings))
        return [halvings, ops.select(ops.or_(skipped, full), zero, good)]


def _power_of_two(exponent: Value) -> Value:
    """Emit `2 ** exponent` as f32, exactly, for an i32 scalar between -126 and 127."""
    biased = ops.shift(exponent, 127)
    bits = ops.binary("stablehlo.shift_left", biased, ops.full_like(biased, 23))
    return ir.emit("stablehlo.bitcast_convert", [bits], [ir.tensor((), ir.f32())]).results[0]


_FREE = frozenset({"func.func", "func.return", "stablehlo.return", "stablehlo.constant", "stablehlo.convert"})
_MOST_NAMES = 6  # kinds of operations in a note


def f64_operations(module: Module) -> Counter[str]:
    """Count the operations that compute in f64, by name; constants, conversions and returns do not compute."""
    found: Counter[str] = Counter()

    def visit(op: Operation) -> None:
        if op.name not in _FREE and any(_is_f64(value) for value in (*op.operands, *op.results)):
            found[op.name] += 1

    ir.walk(module.operation, visit)
    return found


def demote_f64(module: Module, model: str) -> str:
    """Demote, in place, the f64 arithmetic of a module to f32, and return a note about it; "" if there is none.

    Finite constants stay finite and others than 0 stay so: beyond f32's range they become the largest or smallest
    normal number. A loss of f64 becomes one of f32.

    Raises:
        CompileError: an argument is f64, or the bits of an f64 are taken apart.
    """
    main = ir.main_function(module)
    for position, kind in enumerate(ir.argument_types(main)):
        if "f64" in str(ir.element_of_type(kind)):
            raise CompileError(
                f"model {model}: argument {position} of main has the type {kind}; arguments are kept and sent as they "
                "are, and training computes in f32 at most: export the model in float32 (in PyTorch `model.float()`, "
                "and `.float()` for inputs)"
            )
    counts = f64_operations(module)
    if counts["stablehlo.bitcast_convert"]:
        raise CompileError(
            f"model {model} takes the bits of f64 numbers (stablehlo.bitcast_convert), which f32 does not have; "
            "export it without that operation"
        )
    found: list[Operation] = []
    ir.walk(module.operation, found.append)
    _retype(module, found, ir.f64(), ir.f32(), _narrowed)
    for op in found:
        if op.name == "stablehlo.convert" and op.operands[0].type == op.results[0].type:
            ir.replace_uses(op.results[0], op.operands[0])
            op.erase()
    return note_about(counts)


def promoted(stablehlo: str) -> str:
    """Return a module with f64 in place of all f32 arithmetic: the same operations, with less rounding.

    Raises:
        CompileError: the bits of an f32 are taken apart, which an f64 does not have.
    """
    with ir.new_context():
        module = ir.parse_module(stablehlo)
        found: list[Operation] = []
        ir.walk(module.operation, found.append)
        for op in found:
            values = [*op.operands, *op.results]
            if op.name == "stablehlo.bitcast_convert" and any(_has_elements(value, ir.f32()) for value in values):
                raise CompileError("the module takes the bits of f32 numbers (stablehlo.bitcast_convert)")
        _retype(module, found, ir.f32(), ir.f64(), lambda numbers: numbers.astype(np.float64))
        ir.verify(module)
        return ir.to_text(module)


def _retype(
    module: Module, found: list[Operation], old: Type, new: Type, converted: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Give, in place, the element type `new` to all values of the element type `old`, and convert constants."""
    for op in found:
        if op.name == "stablehlo.constant" and _has_elements(op.results[0], old):
            number = ir.constant_number(op)
            array = ir.constant_value(op) if number is None else np.float64(number)
            assert array is not None
            value, kind = converted(np.asarray(array)), ir.tensor(ir.shape_of(op.results[0]), new)
            op.attributes["value"] = (
                ir.array_attribute(value) if number is None else ir.splat_attribute(kind, float(value))
            )
        arguments = [argument for region in op.regions for block in region.blocks for argument in block.arguments]
        for value in (*arguments, *op.results):
            if _has_elements(value, old):
                value.set_type(ir.tensor(ir.shape_of(value), new))
    for function in ir.functions(module).values():
        ir.refresh_function_type(function)


def _has_elements(value: Value, kind: Type) -> bool:
    return ir.is_tensor(value) and ir.element_of(value) == kind


def _is_f64(value: Value) -> bool:
    return _has_elements(value, ir.f64())


def note_about(counts: Counter[str]) -> str:
    """Return the sentence for reports about operations that were demoted; "" for none."""
    total = sum(counts.values())
    if not total:
        return ""
    return (
        f"{total} float64 operations of the model ({_listed(counts)}) are computed in float32, as IREE has no float64 "
        "on most targets; the reference computes the same"
    )


def _listed(counts: Counter[str]) -> str:
    kinds = ", ".join(f"{n} × {name.removeprefix('stablehlo.')}" for name, n in counts.most_common(_MOST_NAMES))
    return kinds + (", …" if len(counts) > _MOST_NAMES else "")


def _narrowed(numbers: np.ndarray) -> np.ndarray:
    """Round to f32, with finite numbers kept finite and others than 0 kept so."""
    wide = np.asarray(numbers, np.float64)
    limits = np.finfo(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        narrow = wide.astype(np.float32)
    narrow = np.where(np.isfinite(wide) & ~np.isfinite(narrow), np.copysign(limits.max, wide), narrow)
    narrow = np.where((wide != 0) & (np.abs(narrow) < limits.tiny), np.copysign(limits.tiny, wide), narrow)
    return narrow.astype(np.float32)
