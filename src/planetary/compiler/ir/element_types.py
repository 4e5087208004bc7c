"""Tensor types and their element types."""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir import ir as mlir

from planetary.compiler.ir.handles import Type, Value


def f32() -> Type:
    return mlir.F32Type.get()


def f64() -> Type:
    return mlir.F64Type.get()


def bf16() -> Type:
    return mlir.BF16Type.get()


def f16() -> Type:
    return mlir.F16Type.get()


def i8() -> Type:
    return mlir.IntegerType.get_signless(8)


def i32() -> Type:
    return mlir.IntegerType.get_signless(32)


def i64() -> Type:
    return mlir.IntegerType.get_signless(64)


def boolean() -> Type:
    return mlir.IntegerType.get_signless(1)


def complex_of(element: Type) -> Type:
    return mlir.ComplexType.get(element)


def tensor(shape: Sequence[int], element: Type) -> Type:
    return mlir.RankedTensorType.get(list(shape), element)


def is_tensor(value: Value) -> bool:
    return isinstance(value.type, mlir.RankedTensorType)


def shape_of(value: Value) -> tuple[int, ...]:
    return tuple(mlir.RankedTensorType(value.type).shape)


def shape_of_type(kind: Type) -> tuple[int, ...]:
    return tuple(mlir.RankedTensorType(kind).shape)


def element_of(value: Value) -> Type:
    return mlir.RankedTensorType(value.type).element_type


def element_of_type(kind: Type) -> Type:
    return mlir.RankedTensorType(kind).element_type


def is_float_element(element: Type) -> bool:
    return isinstance(element, mlir.FloatType)


def is_complex_element(element: Type) -> bool:
    return isinstance(element, mlir.ComplexType)


def is_integer_element(element: Type) -> bool:
    return isinstance(element, mlir.IntegerType)


def is_unsigned(element: Type) -> bool:
    return isinstance(element, mlir.IntegerType) and element.is_unsigned


def is_boolean_element(element: Type) -> bool:
    return isinstance(element, mlir.IntegerType) and element.width == 1


def is_complex(value: Value) -> bool:
    return is_complex_element(element_of(value))


def is_differentiable_type(kind: Type) -> bool:
    """Whether values of this type carry gradients: tensors of floats or complex numbers."""
    if not isinstance(kind, mlir.RankedTensorType):
        return False
    return is_float_element(kind.element_type) or is_complex_element(kind.element_type)


def real_element(element: Type) -> Type:
    """The component type of a complex element type; a real one is returned as it is."""
    return mlir.ComplexType(element).element_type if is_complex_element(element) else element


def rounding_unit(element: Type) -> float:
    """The spacing of the numbers of a float type just above 1."""
    return 2.0 ** -{"f16": 10, "bf16": 7, "f32": 23, "f64": 52}[str(element)]


def width_of(element: Type) -> int:
    """Bits of an integer or float element type."""
    return element.width
