"""The arguments of a model: names, types, roles and initial values, beside the StableHLO."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from planetary.core import decoding
from planetary.core.configuration.ranges import ArgumentRole
from planetary.core.errors import CompileError, UserError
from planetary.core.meaning import Meaning
from planetary.core.tensors import TensorSpec, host_dtype, stablehlo_dtype, to_host_dtype

Role = ArgumentRole
ROLES: tuple[Role, ...] = get_args(Role)
FORMAT_VERSION = 1
LOSS, EVALUATION = "loss", "evaluation"
KEY_SHAPE = (2,)  # shape of a random key: two 32-bit words


class Init(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an argument starts.

    `stored`: the value is in `init.safetensors`. `normal`: Gaussian of mean 0 and standard deviation `value`, drawn
    from the manifest's seed and the argument's name. `constant`: every element is `value`.
    `none`: it is data.
    """

    kind: Literal["stored", "normal", "constant", "none"]
    value: float = 0.0


class Argument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One argument of `main`, in the order of the function."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    init: Init = Init("none")

    @property
    def spec(self) -> TensorSpec:
        """Name, element type and shape."""
        return TensorSpec(name=self.name, dtype=self.dtype, shape=self.shape)

    @property
    def is_float(self) -> bool:
        """Whether a gradient with respect to it exists."""
        return self.dtype in {"f16", "bf16", "f32", "f64"}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's arguments, and where the model came from."""

    model: str
    arguments: tuple[Argument, ...]
    seed: int = 0
    source: str = ""  # "module:function" that built it; empty for a bare `.mlir`
    options: dict[str, Any] = {}
    # of main: the loss; where evaluations are another graph, the loss in evaluations; new values of statistics, by name
    results: tuple[str, ...] = (LOSS,)
    notes: tuple[str, ...] = ()  # sentences about the model for reports, from the export
    meaning: Meaning | None = None  # result of the comparison with the author's framework
    version: int = FORMAT_VERSION

    def of_role(self, *roles: Role) -> tuple[TensorSpec, ...]:
        """Return the specs of all arguments with one of these roles, in argument order."""
        return tuple(argument.spec for argument in self.arguments if argument.role in roles)

    def to_json(self) -> bytes:
        """Return the manifest as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def manifest_from_json(data: bytes, where: str = "manifest.json") -> Manifest:
    """Parse and check a manifest; element types may be spelled as XLA, Rust or numpy do.

    Raises `UserError` naming the defect in `where`.
    """
    try:
        manifest = decoding.from_json(data, Manifest)
    except msgspec.DecodeError as error:
        raise UserError(f"cannot read {where}: {error}") from error
    if manifest.version != FORMAT_VERSION:
        raise UserError(
            f"cannot read {where}: expected version {FORMAT_VERSION}, found {manifest.version}; export the model again"
        )
    arguments = (msgspec.structs.replace(a, dtype=stablehlo_dtype(a.dtype)) for a in manifest.arguments)
    manifest = msgspec.structs.replace(manifest, arguments=tuple(arguments))
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Raise `UserError` unless names are unique, types are known and there is something to train and to
    train on.
    """
    names = [argument.name for argument in manifest.arguments]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"model {manifest.model}: two arguments are called {name!r}")
    for argument in manifest.arguments:
        host_dtype(argument.dtype)
        if argument.role == "param" and not argument.is_float:
            raise UserError(
                f"model {manifest.model}: argument {argument.name!r} of type {argument.dtype} cannot be "
                "trained; "
                'give it the role "buffer" (a constant of the model) or "input" (part of every batch)'
            )
    for role, dtype, shape in (("key", "ui32", KEY_SHAPE), ("step", "i32", ())):
        given = [argument for argument in manifest.arguments if argument.role == role]
        if len(given) > 1 or any((argument.dtype, argument.shape) != (dtype, shape) for argument in given):
            found = ", ".join(f"{a.name!r} of type {a.dtype}{list(a.shape)}" for a in given)
            raise UserError(
                f"model {manifest.model}: the role {role!r} is for one argument of type {dtype}{list(shape)}, "
                f"found {found}"
            )
    statistics = tuple(argument.name for argument in manifest.arguments if argument.role == "statistic")
    wanted = (LOSS, EVALUATION, *statistics)
    if manifest.results != ((LOSS,) if manifest.results == (LOSS,) and not statistics else wanted):
        raise UserError(
            f"model {manifest.model}: the results of main must be {', '.join(wanted)} (the arguments of the role "
            f'"statistic" are those that it gives new values of), found {", ".join(manifest.results) or "none"}'
        )
    for argument in manifest.arguments:
        if argument.role == "statistic" and not argument.is_float:
            raise UserError(
                f"model {manifest.model}: the statistic {argument.name!r} is of type {argument.dtype}; rounds average "
                "statistics, so expected a float type"
            )
    if not manifest.of_role("param"):
        raise UserError(f"model {manifest.model} has no parameter to train")
    if not manifest.of_role("input", "target"):
        raise UserError(f"model {manifest.model} has no input or target: there is nothing to train on")


def check_signature(manifest: Manifest, signature: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raise `CompileError` unless `signature`, the (dtype, shape) of each argument of `main`, is the
    manifest's.
    """
    found = list(signature)
    if len(found) != len(manifest.arguments):
        raise CompileError(
            f"model {manifest.model}: the manifest lists {len(manifest.arguments)} arguments, main takes {len(found)}"
        )
    for argument, (dtype, shape) in zip(manifest.arguments, found, strict=True):
        if (argument.dtype, argument.shape) != (dtype, shape):
            raise CompileError(
                f"model {manifest.model}: argument {argument.name!r} is "
                f"{argument.dtype}{list(argument.shape)} in the "
                f"manifest and {dtype}{list(shape)} in main"
            )


def bare_manifest(
    model: str,
    signature: Iterable[tuple[str, tuple[int, ...]]],
    roles: Mapping[str, Role] | None = None,
    seed: int = 0,
) -> Manifest:
    """Return the manifest of a `.mlir` that comes without one.

    Arguments are called `arg0`, `arg1`, …. The last is the target, the one before the input, the rest
    parameters. Matrices start normal with standard deviation 0.02, vectors and scalars at 1 (they usually
    scale something).

    Args:
        model: a name for people.
        signature: (dtype, shape) of each argument of `main`.
        roles: overrides, by name or by a pattern such as `"arg1*"`.
        seed: of the initial values.

    Raises:
        UserError: a pattern matches no argument, or the result fails `check_manifest`.
    """
    kinds = list(signature)
    if len(kinds) < 3 and not roles:
        raise UserError(
            f"model {model} has no parameter to train: expected parameters, then an input and a target as the "
            f"arguments of its main, found {len(kinds)} in all; model.roles can say otherwise"
        )
    data: list[Role] = ["input", "target"]
    params: list[Role] = ["param"] * (len(kinds) - 2)
    default = (params + data)[-len(kinds) :] if kinds else []
    arguments = [
        Argument(name=f"arg{i}", dtype=dtype, shape=shape, role=role)
        for i, ((dtype, shape), role) in enumerate(zip(kinds, default, strict=True))
    ]
    arguments = override_roles(arguments, roles or {})
    manifest = Manifest(
        model=model,
        arguments=tuple(msgspec.structs.replace(a, init=_bare_init(a)) for a in arguments),
        seed=seed,
    )
    check_manifest(manifest)
    return manifest


def _bare_init(argument: Argument) -> Init:
    if argument.role in {"input", "target"}:
        return Init("none")
    if argument.role == "buffer":
        return Init("stored")
    return Init("normal", 0.02) if len(argument.shape) >= 2 else Init("constant", 1.0)


def override_roles(arguments: Iterable[Argument], roles: Mapping[str, str]) -> list[Argument]:
    """Return the arguments with the roles of `roles`, a mapping from name patterns; later patterns win.

    Raises:
        UserError: an unknown role, or a pattern that matches no argument.
    """
    found = list(arguments)
    for pattern, role in roles.items():
        if role not in ROLES:
            raise UserError(f"unknown role {role!r} for {pattern!r}; known: {', '.join(ROLES)}")
        hits = [i for i, argument in enumerate(found) if fnmatch.fnmatchcase(argument.name, pattern)]
        if not hits:
            raise UserError(
                f"the role pattern {pattern!r} matches no argument; there are: {', '.join(a.name for a in found)}"
            )
        for i in hits:
            found[i] = msgspec.structs.replace(found[i], role=role)
    return found


def initial_value(argument: Argument, stored: Mapping[str, np.ndarray], seed: int) -> np.ndarray:
    """Return the host array a parameter or buffer starts with.

    A drawn value depends on `seed` and the argument's name alone, not on the other arguments.

    Raises:
        UserError: the value should be stored and is not, or has another shape or type than the argument.
    """
    spec = argument.spec
    if argument.init.kind == "stored":
        value = stored.get(argument.name)
        if value is None:
            raise UserError(
                f"argument {argument.name!r} ({argument.role}) has no stored value; give its value in a "
                "safetensors "
                "file, or export the model from JAX, which stores them all"
            )
        if value.shape != spec.shape or value.dtype != host_dtype(spec.dtype):
            raise UserError(
                f"the stored value of {argument.name!r} must be {spec.dtype}{list(spec.shape)}, "
                f"found {value.dtype}{list(value.shape)}"
            )
        return value
    if argument.init.kind == "constant":
        drawn = np.full(spec.shape, argument.init.value, np.float32)
    elif argument.init.kind == "normal":
        entropy = hashlib.sha256(f"{seed}/{argument.name}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(entropy[:16], "big"))
        drawn = rng.standard_normal(spec.shape, np.float32) * np.float32(argument.init.value)
    else:
        raise UserError(f"argument {argument.name!r} is data and has no initial value")
    return to_host_dtype(drawn, spec.dtype)
