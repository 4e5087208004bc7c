"""Adapters in a model's graph: `main` takes A and B of each, and changes the matrix before its first use.

No family of models is known here: the graph also says which dimension of a matrix has the inputs.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from planetary.compiler import ir
from planetary.compiler.frontend.adapted_products import (
    change_matrix,
    change_product,
    contracted_dimensions,
    products_of,
)
from planetary.compiler.frontend.author import Author
from planetary.compiler.frontend.export import Model
from planetary.compiler.frontend.manifest import Argument, Init, Role
from planetary.compiler.frontend.routers import routers
from planetary.core.adapters import Adapter, layer_of, merged_values, trained_by
from planetary.core.errors import UserError, did_you_mean


def adapted(model: Model, *, rank: int, alpha: float, targets: Sequence[str], seed: int) -> Model:
    """Return a model whose only trained parameters are adapters; the others become buffers.

    Args:
        model: with the values of its parameters.
        rank: of the changes.
        alpha: rank times the factor of the changes.
        targets: patterns of names, or of ends of names such as `"q_proj"`; none: matrices of numbered blocks that are
            multiplied with a layer's inputs, but for a mixture's routers.
        seed: of the initial values.

    Raises:
        UserError: a target matches no trained matrix, or the rank is larger than a dimension.
    """
    contracted = summed_dimensions(model, "param")
    chosen = _targets(model, targets, contracted)
    adapters = tuple(
        Adapter(
            argument.name,
            layer_of(argument.name),
            argument.spec,
            rank,
            alpha / rank,
            contracted[argument.name] in ({0}, {1}),
            contracted[argument.name] == {0},
        )
        for argument in chosen
    )
    for one in adapters:
        if rank > min(one.spec.shape):
            raise UserError(
                f"adapter.rank: expected at most {min(one.spec.shape)}, the smaller dimension of {one.target!r} "
                f"{list(one.spec.shape)}, found {rank}: lower it, or leave that matrix out of adapter.targets"
            )
    stored = dict(model.stored)
    for one in adapters:
        stored |= one.initial(seed)
    arguments = [
        msgspec.structs.replace(argument, role="buffer") if argument.role == "param" else argument
        for argument in model.manifest.arguments
    ]
    arguments += [Argument(spec.name, spec.dtype, spec.shape, "param", Init("stored")) for spec in trained_by(adapters)]
    manifest = msgspec.structs.replace(model.manifest, arguments=tuple(arguments), meaning=None)
    return dataclasses.replace(
        model,
        stablehlo=_with_changes(model, model.stablehlo, adapters, ir.to_portable_artifact),
        manifest=manifest,
        stored=stored,
        located=_with_changes(model, model.located, adapters, _with_locations) if model.located else b"",
        author=None if model.author is None else _AdaptedAuthor(model.author, adapters),
        adapters=adapters,
    )


def summed_dimensions(model: Model, role: Role) -> dict[str, set[int]]:
    """Return the dimensions of each matrix of a role that products sum over; with −1 where it has another use."""
    with ir.new_context():
        module = ir.parse_module(model.stablehlo)  # a name of its own: operations do not keep the module alive
        block = ir.entry_block(ir.main_function(module))
        return {
            argument.name: contracted_dimensions(value)
            for argument, value in zip(model.manifest.arguments, block.arguments, strict=True)
            if argument.role == role and len(argument.shape) == 2
        }


@dataclass(frozen=True)
class _AdaptedAuthor:
    """The author of a model whose matrices are changed before they are handed over."""

    author: Author
    adapters: tuple[Adapter, ...]

    def loss_and_gradients(
        self, params: Mapping[str, np.ndarray], batch: Sequence[np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray | None]]:
        loss, slopes = self.author.loss_and_gradients(merged_values(self.adapters, params), batch)
        found: dict[str, np.ndarray | None] = dict(slopes)
        for one in self.adapters:
            slope = slopes.get(one.target)
            found |= {} if slope is None else one.gradients(slope, params)
        return loss, found


def matches(name: str, pattern: str) -> bool:
    """Whether a parameter is meant: by a pattern of the name, or, as with `peft`, by the end of the layer's name."""
    module = layer_of(name)
    return any(fnmatch.fnmatchcase(text, one) for text in (name, module) for one in (pattern, f"*.{pattern}"))


def _targets(model: Model, patterns: Sequence[str], contracted: Mapping[str, set[int]]) -> list[Argument]:
    """Return the matrices that are adapted, in order. Raises `UserError`."""
    arguments = model.manifest.arguments
    if not patterns:
        linear = [a for a in arguments if contracted.get(a.name) in ({0}, {1}) and is_in_block(a.name)]
        choosing = routers(model)  # a small change of one sends tokens to other experts
        if chosen := [a for a in linear if a.name not in choosing]:
            return chosen
        raise UserError(
            f"adapter.targets: the model {model.manifest.model} has no linear layer in numbered blocks; name the "
            f"matrices to adapt. It has {_listed(list(contracted))}"
        )
    found: set[str] = set()
    for pattern in patterns:
        hits = [a for a in arguments if a.role not in {"input", "target"} and matches(a.name, pattern)]
        if not hits:
            known = [name for matrix in contracted for name in (matrix, layer_of(matrix).rpartition(".")[2])]
            raise UserError(
                f"adapter.targets: {pattern!r} matches no parameter{did_you_mean(pattern, known)} The model's matrices "
                f"are {_listed(list(contracted))}"
            )
        matrices = [a.name for a in hits if a.name in contracted]
        if not matrices:
            first = hits[0]
            frozen = f", of the role {first.role}" if first.role != "param" else ""
            raise UserError(
                f"adapter.targets: {pattern!r} matches no trained matrix: {first.name!r} is "
                f"{first.dtype}{list(first.shape)}{frozen}. The model's matrices are {_listed(list(contracted))}"
            )
        found |= set(matrices)
    return [a for a in arguments if a.name in found]


def is_in_block(name: str) -> bool:
    """Whether a parameter belongs to one of numbered blocks, such as `h.0.mlp`."""
    return any(part.isdigit() for part in name.split("."))


_SHOWN = 6  # names in an error


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more or "none"


# --- the graph ------------------------------------------------------------------------------------------------


def _with_changes(
    model: Model, source: bytes, adapters: Sequence[Adapter], written: Callable[[ir.Module], bytes]
) -> bytes:
    """Return a module whose `main` takes A and B of each adapter after its other arguments."""
    position = {argument.name: i for i, argument in enumerate(model.manifest.arguments)}
    with ir.new_context():
        module = ir.parse_module(source)
        main = ir.main_function(module)
        block = ir.entry_block(main)
        for one in adapters:
            matrix = block.arguments[position[one.target]]
            element = ir.f64() if one.a.dtype == "f64" else ir.f32()
            a, b = (ir.add_argument(main, ir.tensor(spec.shape, element)) for spec in (one.a, one.b))
            products = products_of(matrix) if one.is_linear else None
            if products is None:
                change_matrix(one, matrix, a, b, ir.operations(block)[0])
            else:
                for product in products:
                    change_product(one, *product, a, b)
        ir.refresh_function_type(main)
        ir.verify(module)
        return written(module)


def _with_locations(module: ir.Module) -> bytes:
    return ir.to_text(module, locations=True).encode()
