"""Attributes that only StableHLO has: dimension numbers, directions, kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir.dialects import stablehlo as hlo

from planetary.compiler.ir.handles import Attribute, Operation


def direction_of(op: Operation) -> str:
    """The direction of a `stablehlo.compare`: `EQ NE LT LE GT GE`."""
    return hlo.ComparisonDirectionAttr(op.operation.attributes["comparison_direction"]).value


def fft_kind_of(op: Operation) -> str:
    """`FFT IFFT RFFT IRFFT`."""
    return hlo.FftTypeAttr(op.operation.attributes["fft_type"]).value


def transpose_kind_of(op: Operation) -> str:
    """`NO_TRANSPOSE TRANSPOSE ADJOINT`."""
    return hlo.TransposeAttr(op.operation.attributes["transpose_a"]).value


def dot_dimensions(
    lhs_batch: Sequence[int],
    rhs_batch: Sequence[int],
    lhs_contract: Sequence[int],
    rhs_contract: Sequence[int],
) -> Attribute:
    return hlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=list(lhs_batch),
        rhs_batching_dimensions=list(rhs_batch),
        lhs_contracting_dimensions=list(lhs_contract),
        rhs_contracting_dimensions=list(rhs_contract),
    )


def dot_numbers(op: Operation) -> Any:
    """Has `lhs_batching_dimensions`, `rhs_batching_dimensions`, `lhs_contracting_dimensions`, `rhs_…`."""
    return hlo.DotDimensionNumbers(op.operation.attributes["dot_dimension_numbers"])


def gather_numbers(op: Operation) -> Any:
    return hlo.GatherDimensionNumbers(op.operation.attributes["dimension_numbers"])


def scatter_numbers(op: Operation) -> Any:
    return hlo.ScatterDimensionNumbers(op.operation.attributes["scatter_dimension_numbers"])


def conv_numbers(op: Operation) -> Any:
    return hlo.ConvDimensionNumbers(op.operation.attributes["dimension_numbers"])


def compare_direction(name: str) -> Attribute:
    """`EQ NE LT LE GT GE`."""
    return hlo.ComparisonDirectionAttr.get(name)


def compare_kind(name: str) -> Attribute:
    """`FLOAT TOTALORDER SIGNED UNSIGNED`."""
    return hlo.ComparisonTypeAttr.get(name)


def gather_dimensions(  # noqa: PLR0917 - the attribute's own order
    offset: Sequence[int],
    collapsed: Sequence[int],
    operand_batching: Sequence[int],
    indices_batching: Sequence[int],
    start_index_map: Sequence[int],
    index_vector_dim: int,
) -> Attribute:
    return hlo.GatherDimensionNumbers.get(
        offset_dims=list(offset),
        collapsed_slice_dims=list(collapsed),
        operand_batching_dims=list(operand_batching),
        start_indices_batching_dims=list(indices_batching),
        start_index_map=list(start_index_map),
        index_vector_dim=index_vector_dim,
    )


def scatter_dimensions(  # noqa: PLR0917 - the attribute's own order
    window: Sequence[int],
    inserted: Sequence[int],
    operand_batching: Sequence[int],
    indices_batching: Sequence[int],
    index_map: Sequence[int],
    index_vector_dim: int,
) -> Attribute:
    return hlo.ScatterDimensionNumbers.get(
        update_window_dims=list(window),
        inserted_window_dims=list(inserted),
        input_batching_dims=list(operand_batching),
        scatter_indices_batching_dims=list(indices_batching),
        scattered_dims_to_operand_dims=list(index_map),
        index_vector_dim=index_vector_dim,
    )


def conv_dimensions(
    lhs: tuple[int, int, Sequence[int]],
    kernel: tuple[int, int, Sequence[int]],
    output: tuple[int, int, Sequence[int]],
) -> Attribute:
    """Triples: (batch, feature, spatial) of lhs and output; (input, output feature, spatial) of kernel."""
    return hlo.ConvDimensionNumbers.get(
        input_batch_dimension=lhs[0],
        input_feature_dimension=lhs[1],
        input_spatial_dimensions=list(lhs[2]),
        kernel_input_feature_dimension=kernel[0],
        kernel_output_feature_dimension=kernel[1],
        kernel_spatial_dimensions=list(kernel[2]),
        output_batch_dimension=output[0],
        output_feature_dimension=output[1],
        output_spatial_dimensions=list(output[2]),
    )


def fft_kind(name: str) -> Attribute:
    """`FFT IFFT RFFT IRFFT`."""
    return hlo.FftTypeAttr.get(name)


def transpose_kind(name: str) -> Attribute:
    """`NO_TRANSPOSE TRANSPOSE ADJOINT`."""
    return hlo.TransposeAttr.get(name)
