"""Putting given values into a model by name: pretrained weights, and buffers a bare `.mlir` lacks."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from planetary.compiler.frontend.manifest import Argument, Init
from planetary.core.errors import UserError, did_you_mean
from planetary.core.tensors import TensorSpec, to_host_dtype

if TYPE_CHECKING:
    from planetary.compiler.frontend.export import Model

_SHOWN = 4  # names in an error; a file of another model has hundreds


def with_weights(
    model: Model,
    specs: Sequence[TensorSpec],
    tensors: Mapping[str, np.ndarray],
    *,
    where: str,
    optional: Sequence[str] = (),
) -> Model:
    """Return the model with the values of `tensors` in place of the initial ones.

    Floating-point values are converted to the argument's type (rounded to nearest where it is narrower).

    Args:
        model: whose parameters and buffers get values.
        specs: name, type and shape of each tensor.
        tensors: host arrays by name (bfloat16 as bits).
        where: the tensors' origin, for errors.
        optional: name patterns, e.g. `"h.*.attn.bias"`: tensors the model need not have, and parameters and buffers
            that need not be given and then keep their initial value.

    Raises:
        UserError: names are unknown or missing, or tensors have another shape or kind; one text for all.
    """
    wanted = {a.name: a for a in model.manifest.arguments if a.role in {"param", "statistic", "buffer"}}
    given = {spec.name: spec for spec in specs}

    def required(names: Sequence[str]) -> list[str]:
        return [n for n in names if not any(fnmatch.fnmatchcase(n, pattern) for pattern in optional)]

    unknown = required([name for name in given if name not in wanted])
    missing = required([name for name in wanted if name not in given])
    fitting = {name: spec for name, spec in given.items() if name in wanted}
    wrong = [
        f"{name} is {spec.dtype}{list(spec.shape)}, not {wanted[name].dtype}{list(wanted[name].shape)}"
        for name, spec in fitting.items()
        if spec.shape != wanted[name].shape or not _converts(spec, wanted[name])
    ]
    problems = [
        f"{label}: {_some(names)}"
        for label, names in (("missing", missing), ("unknown to the model", unknown), ("of another shape", wrong))
        if names
    ]
    if problems:
        raise UserError(
            f"the weights in {where} do not fit the model {model.manifest.model}; {'; '.join(problems)}. Give a "
            "file with the model's names and sizes, or list name patterns that may differ in "
            "model.weights_optional"
        )
    stored = dict(model.stored)
    for name, spec in fitting.items():
        stored[name] = _converted(tensors[name], spec.dtype, wanted[name].dtype)
    arguments = tuple(
        Argument(a.name, a.dtype, a.shape, a.role, Init("stored")) if a.name in fitting else a
        for a in model.manifest.arguments
    )
    manifest = msgspec.structs.replace(model.manifest, arguments=arguments)
    return dataclasses.replace(model, manifest=manifest, stored=stored)


def frozen(model: Model, patterns: Sequence[str]) -> Model:
    """Return the model in which the parameters that a pattern matches are buffers.

    Raises:
        UserError: a pattern matches no parameter, or nothing is left to train.
    """
    arguments = list(model.manifest.arguments)
    for pattern in patterns:
        hits = [i for i, a in enumerate(arguments) if fnmatch.fnmatchcase(a.name, pattern)]
        if not any(arguments[i].role in ("param", "buffer") for i in hits):
            names = [a.name for a in arguments if a.role == "param"]
            known = [*names, *dict.fromkeys(part for name in names for part in name.split("."))]
            what = f"the {arguments[hits[0]].role} {arguments[hits[0]].name!r}" if hits else "nothing"
            meant = did_you_mean(pattern.strip("*."), known)
            raise UserError(
                f"model.freeze: {pattern!r} matches {what}, and no parameter{meant} The model has {_some(names)}"
            )
        for i in hits:
            if arguments[i].role == "param":
                arguments[i] = msgspec.structs.replace(arguments[i], role="buffer")
    if not any(argument.role == "param" for argument in arguments):
        raise UserError(f"model.freeze: {', '.join(patterns)} leaves no parameter of {model.manifest.model} to train")
    manifest = msgspec.structs.replace(model.manifest, arguments=tuple(arguments))
    return dataclasses.replace(model, manifest=manifest)


_FLOATS = ("f64", "f32", "f16", "bf16")


def _converts(spec: TensorSpec, argument: Argument) -> bool:
    return spec.dtype == argument.dtype or (spec.dtype in _FLOATS and argument.dtype in _FLOATS)


def _converted(array: np.ndarray, dtype: str, wanted: str) -> np.ndarray:
    if dtype == wanted:
        return array
    if dtype == "bf16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return to_host_dtype(array, wanted)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
