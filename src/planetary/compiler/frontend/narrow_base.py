"""Matrices that are not trained, in fewer bits: `main` takes codes and scales, and widens them where they are used.

Dettmers et al. 2023, arXiv:2305.14314 (QLoRA), with the blocks of GGUF's q8_0 and q4_0 for those of NF4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from planetary.compiler import ir, ops
from planetary.compiler.frontend.adapters import is_in_block, summed_dimensions
from planetary.compiler.frontend.author import Author
from planetary.compiler.frontend.export import Model
from planetary.compiler.frontend.manifest import Argument, Init
from planetary.compiler.frontend.routers import routers
from planetary.compiler.ir import Value
from planetary.core.adapters import NarrowMatrix, widened_values
from planetary.core.errors import UserError
from planetary.core.quantisers import BLOCK


def narrowed(model: Model, bits: int) -> Model:
    """Return a model whose untrained matrices of numbered blocks are held in 8 or 4 bits.

    These are the float32 matrices whose every use is a product with a layer's inputs, which are a multiple of `BLOCK`.
    Other buffers, such as embeddings, heads and a mixture's routers, stay as they are.

    Raises:
        UserError: there is no such matrix.
    """
    buffers, summed, choosing = model.initial("buffer"), summed_dimensions(model, "buffer"), routers(model)
    chosen = [
        NarrowMatrix(argument.spec, bits, summed[argument.name] == {0})
        for argument in model.manifest.arguments
        if summed.get(argument.name) in ({0}, {1})
        and is_in_block(argument.name)
        and argument.name not in choosing
        and argument.dtype == "f32"
    ]
    chosen = [one for one in chosen if one.spec.shape[not one.inputs_first] % BLOCK == 0]
    if not chosen:
        raise UserError(
            f"adapter.base: the model {model.manifest.model} has no float32 matrix in numbered blocks with a "
            f'multiple of {BLOCK} inputs to hold in int{bits}: leave it "f32"'
        )
    stored = {name: value for name, value in model.stored.items() if name not in {one.spec.name for one in chosen}}
    for one in chosen:
        stored |= one.narrowed(buffers[one.spec.name])
    dropped = {one.spec.name for one in chosen}
    arguments = [argument for argument in model.manifest.arguments if argument.name not in dropped]
    arguments += [
        Argument(spec.name, spec.dtype, spec.shape, "buffer", Init("stored"))
        for one in chosen
        for spec in (one.codes, one.scales)
    ]
    manifest = msgspec.structs.replace(model.manifest, arguments=tuple(arguments), meaning=None)
    return dataclasses.replace(
        model,
        stablehlo=_with_blocks(model, model.stablehlo, chosen),
        manifest=manifest,
        stored=stored,
        located=_with_blocks(model, model.located, chosen, located=True) if model.located else b"",
        author=None if model.author is None else _WideAuthor(model.author, tuple(chosen)),
        narrow=tuple(chosen),
    )


@dataclass(frozen=True)
class _WideAuthor:
    """The author of a model whose matrices are widened before they are handed over."""

    author: Author
    narrow: tuple[NarrowMatrix, ...]

    def loss_and_gradients(
        self, params: Mapping[str, np.ndarray], batch: Sequence[np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray | None]]:
        return self.author.loss_and_gradients(widened_values(self.narrow, params), batch)


def _with_blocks(model: Model, source: bytes, narrow: Sequence[NarrowMatrix], *, located: bool = False) -> bytes:
    """Return a module whose `main` takes codes and scales, after its other arguments, in place of matrices."""
    position = {argument.name: i for i, argument in enumerate(model.manifest.arguments)}
    with ir.new_context():
        module = ir.parse_module(source)
        main = ir.main_function(module)
        block = ir.entry_block(main)
        for one in narrow:
            matrix = block.arguments[position[one.spec.name]]
            codes = ir.add_argument(main, ir.tensor(one.codes.shape, ir.i8()))
            scales = ir.add_argument(main, ir.tensor(one.scales.shape, ir.f32()))
            with ir.insert_before(ir.operations(block)[0]):
                ir.replace_uses(matrix, _wide(one, codes, scales))
        ir.drop_arguments(main, [position[one.spec.name] for one in narrow])
        ir.verify(module)
        return ir.to_text(module, locations=True).encode() if located else ir.to_portable_artifact(module)


def _wide(one: NarrowMatrix, codes: Value, scales: Value) -> Value:
    """Return the matrix, f32, of codes and scales."""
    outputs, inputs = one.codes.shape[0], one.codes.shape[1] * 8 // one.bits
    blocks = ops.reshape(codes, [outputs, inputs // BLOCK, BLOCK * one.bits // 8])
    if one.bits == 4:
        # One loop over all numbers: a concatenation of two halves takes IREE eight times as long.
        four = ops.full_like(blocks, 4)
        low = ops.binary("stablehlo.shift_right_arithmetic", ops.binary("stablehlo.shift_left", blocks, four), four)
        high = ops.binary("stablehlo.shift_right_arithmetic", blocks, four)
        halves = [outputs, inputs // BLOCK, 2, BLOCK // 2]
        is_low = ops.compare_number(ops.iota(halves, ir.i32(), 2), 0, "EQ")
        low, high = (ops.broadcast_in_dim(part, halves, [0, 1, 3]) for part in (low, high))
        blocks = ops.reshape(ops.select(is_low, low, high), [outputs, inputs // BLOCK, BLOCK])
    blocks = ops.convert(blocks, ir.f32())
    factors = ops.broadcast_in_dim(scales, [outputs, inputs // BLOCK, BLOCK], [0, 1])
    wide = ops.reshape(ops.multiply(blocks, factors), [outputs, inputs])
    return ops.transpose(wide, [1, 0]) if one.inputs_first else wide
