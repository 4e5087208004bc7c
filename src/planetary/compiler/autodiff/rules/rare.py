"""Operations that JAX seldom or never emits: rules where they follow from others, and remedies for
the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from planetary.compiler import ir, ops
from planetary.compiler.autodiff.reverse import pull_back_through
from planetary.compiler.autodiff.rule_table import Contribution, ReverseSite, inactive, rule, rule_many, unsupported
from planetary.compiler.autodiff.rules import bodies
from planetary.compiler.ir import Value


@rule_many("stablehlo.map", note="the body must be elementwise")
def _map(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    count = len(site.op.operands)
    return pull_back_through(site, cts, lambda: bodies.vectorized(ir.region_block(site.op, 0), site.inputs[:count]))


def _normalized(x: Value, mean: Value, variance: Value, epsilon: float, feature: int) -> Value:
    """The definition of batch normalisation; `epsilon` is the operation's own attribute."""
    shape = ir.shape_of(x)
    centred = ops.subtract(x, ops.broadcast_in_dim(mean, shape, [feature]))
    spread = ops.rsqrt(ops.add(variance, ops.full_like(variance, epsilon)))
    return ops.multiply(centred, ops.broadcast_in_dim(spread, shape, [feature]))


def _scaled(x: Value, scale: Value, offset: Value, feature: int) -> Value:
    shape = ir.shape_of(x)
    wide = ops.multiply(x, ops.broadcast_in_dim(scale, shape, [feature]))
    return ops.add(wide, ops.broadcast_in_dim(offset, shape, [feature]))


@rule_many("stablehlo.batch_norm_inference")
def _batch_norm_inference(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    x, scale, offset, mean, variance = site.inputs
    feature, epsilon = ir.integer(site.op, "feature_index"), ir.number(site.op, "epsilon")
    return pull_back_through(
        site, cts, lambda: [_scaled(_normalized(x, mean, variance, epsilon, feature), scale, offset, feature)]
    )


@rule_many("stablehlo.batch_norm_training")
def _batch_norm_training(site: ReverseSite, cts: list[Value | None]) -> Sequence[Contribution]:
    x, scale, offset = site.inputs
    feature, epsilon = ir.integer(site.op, "feature_index"), ir.number(site.op, "epsilon")
    shape = ir.shape_of(x)
    others = [d for d in range(len(shape)) if d != feature]
    count = 1
    for d in others:
        count *= shape[d]

    def average(value: Value) -> Value:
        total = ops.reduce_sum(value, others)
        return ops.divide(total, ops.full_like(total, count))

    def build() -> list[Value]:
        mean = average(x)
        centred = ops.subtract(x, ops.broadcast_in_dim(mean, shape, [feature]))
        variance = average(ops.square(centred))
        y = _scaled(_normalized(x, mean, variance, epsilon, feature), scale, offset, feature)
        return [y, mean, variance]

    return pull_back_through(site, cts, build)


@rule(
    "sdy.sharding_constraint",
    "stablehlo.custom_call @Sharding",
    "stablehlo.custom_call @LayoutConstraint",
    "stablehlo.custom_call @annotate_device_placement",
    note="the identity with a hint; the cotangent gets no hint",
)
def _hint(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [ct]


@rule("stablehlo.cross-replica-sum", note="summed over the same replicas")
def _cross_replica_sum(site: ReverseSite, ct: Value) -> Sequence[Contribution]:
    return [ir.clone(site.op, [ct]).results[0]]


inactive("carries only an order of effects", "stablehlo.after_all")

_ONE_DEVICE = (
    "a training step runs on one device or is partitioned by the compiler; export the model without explicit"
    " collectives (no shard_map or pmap)"
)
unsupported(
    _ONE_DEVICE,
    "stablehlo.all_gather",
    "stablehlo.all_reduce",
    "stablehlo.all_to_all",
    "stablehlo.collective_broadcast",
    "stablehlo.collective_permute",
    "stablehlo.reduce_scatter",
    "sdy.manual_computation",
)
unsupported(
    "it exchanges data with the host or another program while running; pass that data as an argument",
    "stablehlo.async_done",
    "stablehlo.async_start",
    "stablehlo.infeed",
    "stablehlo.outfeed",
    "stablehlo.recv",
    "stablehlo.send",
    "stablehlo.custom_call @xla_ffi_python_cpu_callback",
    "stablehlo.custom_call @xla_ffi_partitioned_python_cpu_callback",
    "stablehlo.custom_call @xla_python_cpu_callback",
)
unsupported(
    "its shape is computed while running; export the model for fixed shapes",
    "stablehlo.dynamic_conv",
    "stablehlo.dynamic_pad",
    "stablehlo.real_dynamic_slice",
    "stablehlo.set_dimension_size",
)
unsupported(
    "a quantised number has no gradient; train in floating point and quantise afterwards",
    "stablehlo.uniform_dequantize",
    "stablehlo.uniform_quantize",
)
unsupported(
    "it draws random numbers with differentiable bounds; draw from [0, 1) with jax.random and scale",
    "stablehlo.rng",
)
unsupported(
    "tuples are not used by current exporters; export the model again with a current JAX",
    "stablehlo.get_tuple_element",
    "stablehlo.tuple",
)
unsupported(
    "second derivatives of this deprecated operation are not offered; export batch normalisation as plain arithmetic",
    "stablehlo.batch_norm_grad",
)
unsupported(
    "this operation is deprecated in StableHLO; export the model again, which gives dot_general and reduce",
    "stablehlo.einsum",
    "stablehlo.unary_einsum",
)
unsupported(
    "implicit broadcasting must be made explicit first (run the CHLO legalisation of your exporter)",
    *(
        f"chlo.broadcast_{name}"
        for name in [
            "add",
            "and",
            "atan2",
            "compare",
            "complex",
            "divide",
            "maximum",
            "minimum",
            "multiply",
            "next_after",
            "or",
            "polygamma",
            "power",
            "remainder",
            "select",
            "shift_left",
            "shift_right_arithmetic",
            "shift_right_logical",
            "subtract",
            "xor",
            "zeta",
        ]
    ),
)
unsupported(
    "no exporter emits it for the host; export the model for the platform `cpu`",
    "chlo._asin_acos_kernel",
    "chlo.ragged_dot",
    "chlo.scan",
)
