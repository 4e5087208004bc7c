"""Modules as a whole: contexts, parsing, printing, passes, checks, and StableHLO's interpreter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxlib.mlir import ir as mlir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, sdy
from jaxlib.mlir.dialects import mhlo as _mhlo
from jaxlib.mlir.dialects import stablehlo as hlo
from jaxlib.mlir.passmanager import PassManager

from planetary.compiler.ir.graph import walk
from planetary.compiler.ir.handles import Module, Operation, Type
from planetary.compiler.ir.symbols import argument_types, main_function
from planetary.core.errors import CompileError

hlo.register_stablehlo_passes()  # for `run_passes`


@contextmanager
def new_context() -> Iterator[mlir.Context]:
    """A fresh MLIR context with the func, StableHLO, CHLO and Shardy dialects, current inside the `with`."""
    context = mlir.Context()
    context.enable_multithreading(False)
    registry = mlir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)  # the only place where jaxlib offers upstream dialects such as func
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    hlo.register_dialect(context, load=True)
    chlo.register_dialect(context, load=True)
    _mhlo.register_mhlo_dialect(context, load=True)
    sdy.register_dialect(context, load=True)
    with context, mlir.Location.unknown(context):
        yield context


def parse_module(source: str | bytes) -> Module:
    """Parse StableHLO text, MLIR bytecode or a portable artifact into the current context.

    Raises:
        CompileError: the source does not parse.
    """
    context: Any = mlir.Context.current
    try:
        if isinstance(source, bytes) and source.startswith(b"ML\xefR"):
            try:
                return hlo.deserialize_portable_artifact(context, source)
            except (ValueError, mlir.MLIRError):
                return mlir.Module.parse(source, context)
        return mlir.Module.parse(source, context)
    except (ValueError, mlir.MLIRError) as error:
        raise CompileError(
            "cannot parse the model: expected StableHLO text, MLIR bytecode or a portable artifact, but the"
            f" parser says: {str(error).strip()[:800]}"
        ) from error


def empty_module() -> Module:
    """A module without functions, in the current context."""
    return mlir.Module.create()


def to_text(module: Module, locations: bool = False) -> str:
    """The module as StableHLO text; `locations` adds where each op came from."""
    return module.operation.get_asm(enable_debug_info=locations, large_elements_limit=None)


def to_local_text(op: Operation) -> str:
    """An operation of a module as text; the numbers of its values do not depend on what else is in the module."""
    return op.operation.get_asm(use_local_scope=True, large_elements_limit=None)


def to_portable_artifact(module: Module, version: str | None = None) -> bytes:
    """Versioned StableHLO bytes that other releases read.

    Args:
        module: a module of func and StableHLO ops (legalise CHLO ops first).
        version: StableHLO version to write for; default: the oldest that is forward compatible for 12 weeks.
    """
    target = version or hlo.get_version_from_compatibility_requirement(hlo.StablehloCompatibilityRequirement.WEEK_12)
    context: Any = mlir.Context.current
    said: list[str] = []

    def hear(diagnostic: Any) -> bool:
        said.append(f"{diagnostic.message} at {diagnostic.location}")
        return True  # not printed as well

    listening = context.attach_diagnostic_handler(hear)
    try:
        return hlo.serialize_portable_artifact(module, target)
    except (ValueError, mlir.MLIRError) as error:
        why = said[0][:400] if said else str(error)
        raise CompileError(f"cannot store the model as portable StableHLO {target}: {why}") from error
    finally:
        listening.detach()


def run_passes(module: Module, *names: str) -> None:
    """Run module passes by name, e.g. `"inline"`, `"cse"`, `"canonicalize"`, `"symbol-dce"`, in order."""
    PassManager.parse(f"builtin.module({','.join(names)})").run(module.operation)


def verify(module: Module) -> None:
    """Raise `CompileError` if the module breaks an operation's own rules."""
    try:
        module.operation.verify()
    except mlir.MLIRError as error:
        raise CompileError(f"the module is not valid: {error}") from error


def evaluate(module: Module, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run `main` with StableHLO's reference interpreter, in whose element types numpy has a type.

    Raises:
        CompileError: it meets an operation it does not know, or the arguments do not fit.
    """
    kinds = argument_types(main_function(module))
    dense: Any = mlir.DenseElementsAttr
    given = [dense.get(np.asarray(a, order="C"), type=kind) for a, kind in zip(arguments, kinds, strict=True)]
    try:
        return [np.array(dense(result)) for result in hlo.eval_module(module, given)]
    except (ValueError, mlir.MLIRError) as error:
        raise CompileError(f"the StableHLO interpreter cannot run the module: {error}") from error


def contains(module: Module, name: str) -> bool:
    """Whether there is an operation called `name` anywhere in a module."""
    found: list[bool] = []
    walk(module.operation, lambda op: found.append(True) if op.name == name else None)
    return bool(found)


def require_static_shapes(module: Module) -> None:
    """Raise `CompileError` naming the first op whose result has a dynamic or unranked shape."""
    found: list[Operation] = []

    def check(op: Operation) -> None:
        if any(_is_dynamic(result.type) for result in op.results):
            found.append(op)

    walk(module, check)
    if found:
        kinds = ", ".join(str(result.type) for result in found[0].results)
        raise CompileError(
            f"{found[0].name} at {found[0].location} has the dynamic type {kinds}: every shape must be"
            " a number. Export the model for fixed shapes."
        )


def _is_dynamic(kind: Type) -> bool:
    if isinstance(kind, mlir.RankedTensorType):
        return not kind.has_static_shape
    return isinstance(kind, mlir.UnrankedTensorType)


def resources(module: Module) -> dict[str, bytes]:
    """The bytes of a module's resources by name. The bindings give no access to them: they are read off the printed
    module, where each follows an alignment of four bytes.
    """
    printed = module.operation.get_asm(large_resource_limit=None)
    section = printed.partition("{-#")[2]
    found = re.findall(r'"?([^\s":]+)"?: "0x([0-9A-Fa-f]*)"', section)
    return {name: bytes.fromhex(digits)[4:] for name, digits in found}
