"""Adapters of a model's matrices: W + alpha / rank · B A in place of W, of which only A and B are trained.

Hu et al. 2021, arXiv:2106.09685. Names, shapes and initial values are those of the library `peft`: for a layer of
`inputs` and `outputs`, A is [rank, inputs], uniform within ±1 / sqrt(inputs) (Kaiming with a = sqrt(5)), and B is
[outputs, rank], zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from planetary.core.quantisers import BLOCK, weight_codes, weight_values
from planetary.core.tensors import TensorSpec

_SUFFIXES = (".weight", ".kernel")  # last part of a matrix's name: PyTorch's, Flax's


def layer_of(name: str) -> str:
    """Return a matrix's name without the ending of a layer's matrix."""
    return next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)


class Adapter(msgspec.Struct, frozen=True):
    """The adapter of one matrix.

    Attributes:
        target: name of the matrix.
        module: the target's name without the ending of a layer's matrix, as patterns and `peft` have it.
        spec: of the matrix.
        rank: of the change.
        scale: alpha / rank.
        is_linear: whether every use of the matrix is a product with the layer's inputs.
        inputs_first: whether the matrix is [inputs, outputs], and not [outputs, inputs].
    """

    target: str
    module: str
    spec: TensorSpec
    rank: int
    scale: float
    is_linear: bool
    inputs_first: bool

    @property
    def a(self) -> TensorSpec:
        """A: [rank, inputs]."""
        return TensorSpec(self._name("lora_A"), self._dtype, (self.rank, self.spec.shape[not self.inputs_first]))

    @property
    def b(self) -> TensorSpec:
        """B: [outputs, rank]."""
        return TensorSpec(self._name("lora_B"), self._dtype, (self.spec.shape[self.inputs_first], self.rank))

    def _name(self, part: str) -> str:
        return f"{self.module}.{part}{self.target[len(self.module) :]}"

    @property
    def _dtype(self) -> str:
        return "f64" if self.spec.dtype == "f64" else "f32"

    def stored_names(self, stored_name: Callable[[str], str]) -> dict[str, str]:
        """Return the names of A and B in a folder of `peft`; `stored_name`: name of a matrix in the base's."""
        module = layer_of(stored_name(self.target))
        return {self.a.name: f"{module}.lora_A.weight", self.b.name: f"{module}.lora_B.weight"}

    def merged(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the matrix with the change, in the type of `values`, which have matrix, A and B by name."""
        matrix = values[self.target]
        change = values[self.b.name] @ values[self.a.name]
        return (matrix + self.scale * (change.T if self.inputs_first else change)).astype(matrix.dtype)

    def gradients(self, slope: np.ndarray, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the gradients by A and B for that by the changed matrix."""
        scaled = self.scale * (slope.T if self.inputs_first else slope)
        return {
            self.a.name: values[self.b.name].T @ scaled,
            self.b.name: scaled @ values[self.a.name].T,
        }

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        """Return the initial values of A and B, drawn by the seed and A's name."""
        entropy = hashlib.sha256(f"{seed}/{self.a.name}".encode()).digest()
        rng, bound = np.random.default_rng(int.from_bytes(entropy[:16], "big")), self.a.shape[1] ** -0.5
        kind = np.float64 if self._dtype == "f64" else np.float32
        drawn = rng.uniform(-bound, bound, self.a.shape).astype(kind)
        return {self.a.name: drawn, self.b.name: np.zeros(self.b.shape, kind)}


def merged_values(adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the values of a model without adapters: the changed matrices in place of matrices, A and B."""
    own = {spec.name for spec in trained_by(adapters)}
    found = {name: value for name, value in values.items() if name not in own}
    return found | {one.target: one.merged(values) for one in adapters if one.target in values}


def trained_by(adapters: Sequence[Adapter]) -> tuple[TensorSpec, ...]:
    """Return A and B of all adapters, in order."""
    return tuple(spec for one in adapters for spec in (one.a, one.b))


class NarrowMatrix(msgspec.Struct, frozen=True):
    """A float32 matrix that is not trained, held as blocks of whole numbers along a layer's inputs, with a scale each.

    Attributes:
        spec: of the matrix.
        bits: of a number: 8 or 4.
        inputs_first: whether the matrix is [inputs, outputs]; the blocks are always [outputs, inputs].
    """

    spec: TensorSpec
    bits: int
    inputs_first: bool

    @property
    def codes(self) -> TensorSpec:
        """Whole numbers: i8 [outputs, inputs], or [outputs, inputs / 2].

        As in GGUF's q4_0, the lower four bits belong to the first half of a block, the upper ones to the second.
        """
        outputs, inputs = self._rows
        return TensorSpec(f"{self.spec.name}.codes", "i8", (outputs, inputs * self.bits // 8))

    @property
    def scales(self) -> TensorSpec:
        """f32 [outputs, inputs / BLOCK]."""
        outputs, inputs = self._rows
        return TensorSpec(f"{self.spec.name}.scales", "f32", (outputs, inputs // BLOCK))

    @property
    def _rows(self) -> tuple[int, ...]:
        return self.spec.shape[::-1] if self.inputs_first else self.spec.shape

    def narrowed(self, value: np.ndarray) -> dict[str, np.ndarray]:
        """Return codes and scales of the matrix."""
        rows = np.ascontiguousarray(value.T if self.inputs_first else value)
        codes, scales = weight_codes(rows, self.bits)
        return {self.codes.name: codes, self.scales.name: scales}

    def widened(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the matrix that codes and scales stand for."""
        wide = weight_values(values[self.codes.name], values[self.scales.name], self.bits)
        return np.ascontiguousarray(wide.T if self.inputs_first else wide)


def widened_values(narrow: Sequence[NarrowMatrix], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the values of a model without matrices in blocks: these matrices in place of codes and scales."""
    own = {name for one in narrow for name in (one.codes.name, one.scales.name)}
    found = {name: value for name, value in values.items() if name not in own}
    return found | {one.spec.name: one.widened(values) for one in narrow}
