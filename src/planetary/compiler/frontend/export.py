"""From a JAX function or a `.mlir` file to a `Model`: StableHLO, manifest and initial values."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax._src.debugging import DebugEffect
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from planetary.compiler import ir, ops
from planetary.compiler.frontend import chlo
from planetary.compiler.frontend.author import Author, JaxAuthor, author_of
from planetary.compiler.frontend.constant_randomness import constant_draws
from planetary.compiler.frontend.framework import framework_of, missing_package
from planetary.compiler.frontend.loss_interface import LossInterface, dotted, flat_batch, loss_interface
from planetary.compiler.frontend.lowering import lower_with_rules
from planetary.compiler.frontend.manifest import (
    EVALUATION,
    LOSS,
    Argument,
    Init,
    Manifest,
    Role,
    bare_manifest,
    check_manifest,
    check_signature,
    initial_value,
    manifest_from_json,
    override_roles,
)
from planetary.compiler.frontend.rotary import BASE, RotaryPair, find_rotary_pairs, rotary_table
from planetary.compiler.ir import Module, Operation
from planetary.core.adapters import Adapter, NarrowMatrix, widened_values
from planetary.core.errors import CompileError, PlanetaryError, UserError, did_you_mean
from planetary.core.example_layout import BATCH_PREFIX
from planetary.core.tensors import host_dtype, to_host_dtype
from planetary.core.user_code import load_module

MODEL_FILE, MANIFEST_FILE, INIT_FILE = "model.mlir", "manifest.json", "init.safetensors"

Signature = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Model:
    """A loss function as StableHLO, with a manifest of arguments and values to store."""

    stablehlo: bytes  # portable artifact
    manifest: Manifest
    stored: Mapping[str, np.ndarray]
    notes: tuple[str, ...] = ()  # sentences on properties inferred from the model rather than given, for reports
    located: bytes = field(default=b"", repr=False, compare=False)  # StableHLO text with the author's lines, for errors
    author: Author | None = field(default=None, repr=False, compare=False)  # author in the exporting process
    example: tuple[np.ndarray, ...] = field(default=(), repr=False, compare=False)  # the batch it was exported with
    constants: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    """The author's untrained parameters in the graph, by name; only in the exporting process."""
    adapters: tuple[Adapter, ...] = field(default=(), repr=False, compare=False)  # made by `adapters.adapted`
    narrow: tuple[NarrowMatrix, ...] = field(default=(), repr=False, compare=False)  # made by `narrow_base.narrowed`

    def __repr__(self) -> str:
        tensors = len(self.manifest.of_role("param"))
        return f"Model: {self.param_count:,} parameters in {tensors} tensors, sha256 {self.digest[:12]}"

    @property
    def digest(self) -> str:
        """sha256 of the portable artifact."""
        return hashlib.sha256(self.stablehlo).hexdigest()

    @property
    def text(self) -> str:
        """The StableHLO as text, for people."""
        with ir.new_context():
            module = ir.parse_module(self.stablehlo)
            chlo.from_composites(module)
            ir.run_passes(module, "symbol-dce")
            return ir.to_text(module)

    @property
    def param_count(self) -> int:
        """Number of trained scalars."""
        return sum(spec.size for spec in self.manifest.of_role("param"))

    @property
    def weight_count(self) -> int:
        """Number of scalars the loss has beside the batch: trained ones, statistics and buffers."""
        return sum(spec.size for spec in self.manifest.of_role("param", "statistic", "buffer"))

    def initial(self, role: Role) -> dict[str, np.ndarray]:
        """Return the initial host arrays of all arguments of `role` (`"param"`, `"statistic"` or `"buffer"`), in
        argument order.
        """
        return {
            a.name: initial_value(a, self.stored, self.manifest.seed) for a in self.manifest.arguments if a.role == role
        }

    @property
    def base(self) -> dict[str, np.ndarray]:
        """The host arrays of all buffers by the author's names: those held in fewer bits are widened."""
        return widened_values(self.narrow, self.initial("buffer"))

    @property
    def start(self) -> dict[str, np.ndarray]:
        """The initial host arrays of all that training changes: parameters, then statistics."""
        return self.initial("param") | self.initial("statistic")

    @property
    def evaluation(self) -> Model:
        """The loss as evaluations compute it: without a random key and a step, with one result."""
        dropped = [i for i, argument in enumerate(self.manifest.arguments) if argument.role in ("key", "step")]
        if not dropped and self.manifest.results == (LOSS,):
            return self
        with ir.new_context():
            module = ir.parse_module(self.stablehlo)
            main = ir.main_function(module)
            results = self.manifest.results
            ir.keep_results(main, [results.index(EVALUATION if EVALUATION in results else LOSS)])
            block = ir.entry_block(main)
            for argument in (block.arguments[i] for i in dropped):
                with ir.insert_before(ir.operations(block)[0]):
                    ir.replace_uses(argument, ops.zeros(argument.type))
            ir.drop_arguments(main, dropped)
            portable = ir.to_portable_artifact(module)
        kept = tuple(a for i, a in enumerate(self.manifest.arguments) if i not in dropped)
        manifest = msgspec.structs.replace(self.manifest, arguments=kept, results=(LOSS,))
        return Model(portable, manifest, self.stored, self.notes)

    def save(self, folder: Path | str) -> None:
        """Write `model.mlir` (a portable artifact), `manifest.json` and `init.safetensors` into `folder`."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MODEL_FILE).write_bytes(self.stablehlo)
            (folder / INIT_FILE).write_bytes(save({k: np.asarray(v, order="C") for k, v in self.stored.items()}))
            (folder / MANIFEST_FILE).write_bytes(self.manifest.to_json())  # last: a folder without it is no model
        except OSError as error:
            raise UserError(f"cannot save the model in {folder}: {error.strerror or error}") from error


def load_model(
    path: Path | str,
    *,
    roles: Mapping[str, Role] | None = None,
    init: Path | None = None,
    values_follow: bool = False,
) -> Model:
    """Load a model folder, or a bare `.mlir` file (see `bare_manifest`).

    Args:
        path: folder of `Model.save`, or a file with StableHLO text, MLIR bytecode or a portable artifact.
        roles: role overrides by argument name or pattern.
        init: a safetensors file with initial values by argument name; they replace the default ones.
        values_follow: do not ask for every buffer's value yet, as `with_weights` will give them.

    Raises:
        UserError: a file is missing or unreadable, or the manifest, roles or initial values are wrong.
        CompileError: the StableHLO does not parse, has dynamic shapes, or main does not return one float scalar.
    """
    path = Path(path)
    folder = path if path.is_dir() else None
    source = _read(path if folder is None else folder / MODEL_FILE)
    stored: dict[str, np.ndarray]
    notes: tuple[str, ...] = ()
    if folder is None:
        portable, signature, rotary = _inspect(source, str(path))
        manifest, stored, notes = _bare_model(path.stem, signature, roles or {}, rotary)
    else:
        manifest = manifest_from_json(_read(folder / MANIFEST_FILE), str(folder / MANIFEST_FILE))
        portable, signature, _ = _inspect(source, str(path), manifest.results)
        stored, notes = _load_tensors(folder / INIT_FILE), manifest.notes
        if roles:
            manifest = _replace_arguments(manifest, override_roles(manifest.arguments, roles))
    if init is not None:
        given = _load_tensors(init)
        names = [a.name for a in manifest.arguments]
        if unknown := [name for name in given if name not in names]:
            raise UserError(
                f"the initial values in {init} name {unknown[0]!r}, which {path} does not have; it has: "
                f"{', '.join(names)}"
            )
        stored = {**stored, **given}
        arguments = [
            Argument(a.name, a.dtype, a.shape, a.role, Init("stored")) if a.name in given else a
            for a in manifest.arguments
        ]
        manifest = _replace_arguments(manifest, arguments)
    check_signature(manifest, signature)
    model = Model(portable, manifest, stored, notes)
    if values_follow:
        return model
    model.initial("buffer")  # a missing or misshapen value must be found now, not on a worker
    for argument in manifest.arguments:
        if argument.role == "param" and argument.init.kind == "stored":
            initial_value(argument, stored, manifest.seed)
    return model


def _bare_model(
    name: str, signature: Signature, roles: Mapping[str, Role], rotary: list[RotaryPair]
) -> tuple[Manifest, dict[str, np.ndarray], tuple[str, ...]]:
    """Return the manifest of a model that comes without one, stored values, and notes.

    Rotary tables that were recognised are buffers with their usual values, unless `roles` says otherwise.
    """
    tables: dict[str, Role] = {f"arg{i}": "buffer" for pair in rotary for i in (pair.cos, pair.sin)}
    manifest = bare_manifest(name, signature, {**tables, **roles})
    stored: dict[str, np.ndarray] = {}
    notes: list[str] = []
    for pair in rotary:
        cos, sin = manifest.arguments[pair.cos], manifest.arguments[pair.sin]
        if cos.role != "buffer" or sin.role != "buffer":
            continue
        for argument, of in ((cos, "cos"), (sin, "sin")):
            stored[argument.name] = to_host_dtype(rotary_table(argument.shape, of, pair.halves), argument.dtype)
        notes.append(
            f"{cos.name} and {sin.name} are used as the tables of rotary positions: they are buffers, not trained, "
            f"with the cosines and sines of the usual base {BASE:.0f}; model.roles and model.weights can say otherwise"
        )
    return manifest, stored, tuple(notes)


def export_model(
    source: str, options: Mapping[str, Any] | None = None, *, roles: Mapping[str, Role] | None = None
) -> Model:
    """Build a model from a JAX function and lower it to StableHLO.

    Args:
        source: `"module:function"` or `"path/to/file.py:function"`. The function is called with `options` and
            returns `(loss_fn, params, example_batch)`: `loss_fn(params, *example_batch)` is a float scalar,
            `params` any pytree of arrays, `example_batch` a sequence of arrays, or of trees of arrays, of the
            batch's shapes and types; with a mapping in place of the sequence it is `loss_fn(params, example_batch)`. A
            framework's module (such as `torch.nn.Module`, a class or an object) may stand for the function; see
            `compiler.frontend.framework`.
        options: keyword arguments of the function.
        roles: role overrides by flattened name. By default floating-point leaves of `params` are trained,
            other leaves are buffers, the last array of the batch is the target and the others are inputs.

    Raises:
        UserError: the function cannot be found or called, or returns something else.
        CompileError: JAX cannot trace the loss, or the loss is not one float scalar.
    """
    options = dict(options or {})
    built = checked_build(call_builder(source, _find(source), options), source)
    return export_loss(*built, name=source.rpartition(":")[0], source=source, options=options, roles=roles)


def checked_build(built: Any, source: str) -> tuple[Callable[..., Any], Any, Any]:
    """Return the checked result of a model's function. Raises `UserError` naming the required form."""
    if isinstance(built, tuple) and len(built) == 3:
        loss_fn, _, batch = built
        if not callable(loss_fn):
            raise UserError(f"{source}: loss_fn must be a function, found {type(loss_fn).__name__} (docs/models.md)")
        if hasattr(batch, "shape") or not isinstance(batch, Iterable):
            raise UserError(
                f"{source}: example_batch must be a tuple of arrays, such as (tokens, targets), or a mapping, found "
                f"{type(batch).__name__} (docs/models.md)"
            )
        return built
    hint = ""
    if framework_of(built) is not None:
        hint = (
            ". A framework's module is named itself: its class, as in net.py:Net, with model.options for the "
            "arguments, or a module that the file makes, as in net.py:net"
        )
    raise UserError(
        f"{source} must return (loss_fn, params, example_batch), found {type(built).__name__}{hint} (docs/models.md)"
    )


def export_loss(
    loss_fn: Callable[..., Any],
    params: Any,
    example_batch: Any,
    *,
    name: str = "model",
    source: str = "",
    options: Mapping[str, Any] | None = None,
    roles: Mapping[str, Role] | None = None,
) -> Model:
    """Lower a loss function to a `Model`. See `export_model` for the arguments and errors."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    loss_fn, batch, batch_names = flat_batch(loss_fn, example_batch)
    for path, leaf in leaves:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise UserError(
                f"{name}: parameter {dotted(path)!r} is {type(leaf).__name__}, expected an array; keep "
                "options out "
                "of the pytree, e.g. with functools.partial or equinox.partition"
            )
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise UserError(
                f"{name}: parameter {dotted(path)!r} is a random key, which would be the same in every step; keep keys "
                "out of the parameters, and let the loss take a `key` (docs/models.md)"
            )
    try:
        loss = loss_interface(loss_fn, params, batch, name)
        lowered = lower_with_rules(loss.main, loss.params, *batch, *loss.types)
        notes = (*getattr(loss_fn, "planetary_notes", ()), *loss.notes, *_notes_of_tracing(loss, batch))
    except PlanetaryError:
        raise
    except Exception as error:  # whatever the user's function raises
        raise CompileError(f"{name}: tracing the loss failed: {type(error).__name__}: {error}") from error
    located = lowered.as_text(debug_info=True).encode()
    try:
        portable, signature, _ = _inspect(lowered.as_text().encode(), name, loss.results)
    except CompileError as error:
        _refuse_host_routines(located, name)
        raise error from None
    names = [dotted(path) for path, _ in leaves]
    names += [f"{BATCH_PREFIX}{one}" if one in names else one for one in batch_names]
    data = len(names)
    names += [role if role not in names else f"loss.{role}" for role in loss.extra]
    if len(names) != len(signature):
        raise CompileError(f"{name}: expected an array for each of {', '.join(names)}; main takes {len(signature)}")
    arguments, stored = [], {}
    for i, (argument, (dtype, shape)) in enumerate(zip(names, signature, strict=True)):
        if i >= data:
            arguments.append(Argument(argument, dtype, shape, loss.extra[i - data]))
        elif i >= len(leaves):
            role: Role = "target" if i == data - 1 else "input"
            arguments.append(Argument(argument, dtype, shape, role))
        else:
            role = "param" if dtype in {"f16", "bf16", "f32", "f64"} else "buffer"
            role = "statistic" if argument in loss.results else role
            arguments.append(Argument(argument, dtype, shape, role, Init("stored")))
            stored[argument] = _to_host(leaves[i][1], dtype)
    manifest = Manifest(
        model=name,
        arguments=tuple(override_roles(arguments, {**_own_roles(loss_fn), **(roles or {})})),
        source=source,
        options=dict(options or {}),
        results=loss.results,
        notes=notes,
    )
    check_manifest(manifest)
    check_signature(manifest, signature)
    author = author_of(loss_fn) or JaxAuthor(loss.train, loss.params, names[: len(leaves)])
    example = tuple(np.asarray(part) for part in batch if not isinstance(part, jax.ShapeDtypeStruct))
    constants = getattr(loss_fn, "planetary_constants", {})
    return Model(portable, manifest, stored, notes, located, author, example, constants)


def _notes_of_tracing(loss: LossInterface, batch: list[Any]) -> tuple[str, ...]:
    """Return notes on random numbers that are the same in every step, and on prints that no worker does."""
    traced = jax.make_jaxpr(loss.train)(loss.params, *batch, *loss.types)
    leaves = jax.tree_util.tree_leaves(loss.params)
    trained = [jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) for leaf in leaves]
    lines = constant_draws(traced, trained + [True] * (len(traced.in_avals) - len(trained)))
    silent = (
        ("jax.debug.print and jax.debug.callback of the loss do nothing in a run: workers have no Python",)
        if any(isinstance(effect, DebugEffect) for effect in traced.effects)
        else ()
    )
    if not lines:
        return silent
    return (
        *silent,
        f"the loss draws random numbers that are the same in every step of the run ({', '.join(lines)}): their key "
        "depends on no argument. If this is dropout or noise, let the loss take a `key`, loss_fn(params, *batch, *, "
        "key=None), and draw from it: it is another key in each step (docs/models.md)",
    )


def _refuse_host_routines(located: bytes, name: str) -> None:
    """Raise `CompileError` for the first call of a routine that exists in JAX's own process only."""
    with ir.new_context():
        module = ir.parse_module(located)
        functions = ir.functions(module)
        calls = {
            ir.text(op, "callee"): (op, where) for where in functions for op in _within(functions[where], "func.call")
        }
        for symbol, function in functions.items():
            for op in _within(function, "stablehlo.custom_call"):
                target, where = ir.text(op, "call_target_name"), symbol
                if target in _PORTABLE_CALLS:
                    continue
                while not ir.has_source_line(op) and where in calls:  # JAX gives a line to the call of a function only
                    call, where = calls.pop(where)
                    ir.add_call_site(op, call)
                if "callback" in target:
                    raise CompileError(
                        f"{name}: {ir.location_text(op)}: this calls a Python function in every step "
                        "(jax.pure_callback, io_callback), and workers have no Python. Write it with array operations, "
                        "or compute it before the loss and pass it in the batch or as a buffer (docs/meaning.md)"
                    )
                raise CompileError(
                    f"{name}: {ir.location_text(op)}: JAX computes this by {target}, a routine of its own process that "
                    "no other machine has. Cholesky, LU (inv, solve, det), QR and expm of real matrices work; write "
                    "others with array operations, or compute their result before the loss and pass it as a buffer "
                    "(docs/meaning.md)"
                )


_PORTABLE_CALLS = {"Sharding", "annotate_device_placement", "SPMDFullToShardShape", "SPMDShardToFullShape"}


def _own_roles(loss_fn: Callable[..., Any]) -> dict[str, Role]:
    """Roles the loss gives the parameters: frozen ones of another framework are buffers."""
    return {glob.escape(name): role for name, role in getattr(loss_fn, "planetary_roles", {}).items()}


def find_builder(source: str) -> Callable[..., Any]:
    """Return the function that `"module:function"` or `"path/to/file.py:function"` names, or raise
    `UserError`.
    """
    return _find(source)


def _find(source: str) -> Callable[..., Any]:
    place, separator, name = source.rpartition(":")
    if not separator or not place or not name:
        raise UserError(f"expected a model as module:function or path/to/file.py:function, found {source!r}")
    module = _load(place, source)
    function = getattr(module, name, None)
    if not callable(function):
        own = {n: f for n, f in vars(module).items() if callable(f) and not n.startswith("_")}
        known = [n for n, f in own.items() if getattr(f, "__module__", "") == module.__name__] or list(own)
        meant = did_you_mean(name, known, "{!r}")
        raise UserError(f"{place} has no function {name!r}{meant} It has: {', '.join(known) or 'none'}")
    if (framework := framework_of(function)) is not None:
        loss = getattr(module, "loss", None)
        return framework.builder(function, loss if callable(loss) else None, source)
    return function


def _load(place: str, source: str) -> Any:
    try:
        return load_module(place)
    except UserError as error:
        lacks = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        raise UserError(f"cannot load the model {source!r}: {error}{missing_package(lacks)}") from error


def call_builder(source: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return the result of a model's function. Raises `UserError` for unknown options, or the loss's failure."""
    try:
        with contextlib.suppress(ValueError):  # a builtin class has no signature
            inspect.signature(function).bind(**options)
    except TypeError as error:
        raise UserError(f"{source} does not take the options {sorted(options)}: {error}") from error
    try:
        return function(**options)
    except PlanetaryError:
        raise
    except Exception as error:  # whatever the user's function raises
        raise UserError(f"{source} failed: {type(error).__name__}: {error}") from error


def _to_host(leaf: Any, dtype: str) -> np.ndarray:
    """The leaf as JAX passes it to `main`, in the host's representation."""
    array = np.asarray(jax.numpy.asarray(leaf))
    return array.view(np.uint16) if dtype == "bf16" else array.astype(host_dtype(dtype))


def _inspect(source: bytes, where: str, expected: Sequence[str] = (LOSS,)) -> tuple[bytes, Signature, list[RotaryPair]]:
    """Return the portable artifact, the argument types and the rotary tables of a module; raise unless it is a loss
    function.
    """
    with ir.new_context():
        try:
            module = ir.parse_module(without_globals(source))
            to_stablehlo(module)
            ir.require_static_shapes(module)
            main = ir.main_function(module)
        except CompileError as error:
            raise CompileError(f"{where}: {error}") from error
        results = ir.result_types(main)
        for kind in (*ir.argument_types(main), *results):
            if "?" in str(kind):
                raise CompileError(f"{where}: main has the dynamic type {kind}; give every dimension a number")
        kinds = ", ".join(str(kind) for kind in results)
        losses = results[: 2 if EVALUATION in expected else 1]
        scalar = all(ir.is_differentiable_type(kind) and ir.shape_of_type(kind) == () for kind in losses)
        if len(results) != len(expected) or not scalar:
            wanted = "one floating-point scalar, the loss"
            if len(expected) > 1:
                wanted = f"{', '.join(expected)}, of which the first two are floating-point scalars"
            raise CompileError(f"{where}: main must return {wanted}; it returns {kinds or 'nothing'}")
        if any(ir.is_complex_element(ir.element_of_type(kind)) for kind in losses):
            raise CompileError(f"{where}: main must return a real loss; it returns {kinds}")
        signature = [(str(ir.element_of_type(t)), ir.shape_of_type(t)) for t in ir.argument_types(main)]
        dtype, shape = signature[-1] if signature else ("", ())
        # Of tokens, the last dimension is the length of a sequence.
        rotary = find_rotary_pairs(main, shape[-1]) if dtype in {"i32", "i64", "ui16", "ui32"} and shape else []
        chlo.to_composites(module)
        return ir.to_portable_artifact(module), signature, rotary


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the model file {path}: {error.strerror or error}") from error


def _load_tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read the initial values in {path}: {error}") from error


def _replace_arguments(manifest: Manifest, arguments: list[Argument]) -> Manifest:
    replaced = msgspec.structs.replace(manifest, arguments=tuple(arguments))
    check_manifest(replaced)
    return replaced


_KNOWN_DIALECTS = ("builtin", "func", "stablehlo", "chlo", "sdy", "mhlo")
_GLOBAL = re.compile(rb"^[ \t]*ml_program\.global\b.*$", re.MULTILINE)
_BYTECODE = b"ML\xefR"


def without_globals(source: bytes) -> bytes:
    """Return MLIR text without the `ml_program.global` lines, which no parser here knows. A global the code reads is
    still found: by the parser, at the use.
    """
    return source if source.startswith(_BYTECODE) else _GLOBAL.sub(b"", source)


def to_stablehlo(module: Module) -> None:
    """Rewrite a module of another exporter than JAX, in place, so it has StableHLO operations only.

    torch-mlir writes constants with the `arith` dialect, single numbers through `tensor.from_elements`, large tensors
    as resources beside the code, and a global seed that nothing reads.

    Raises:
        CompileError: an operation of another dialect is more than a constant; the text names it.
    """
    resources: dict[str, bytes] | None = None
    for op in _operations(module, "arith.constant", "stablehlo.constant"):
        result = op.results[0]
        if not ir.is_tensor(result):
            continue  # a single number: the user is asked below
        if ir.is_complex(result):
            continue  # the bindings have no attribute for complex numbers, and they are never resources
        value = op.attributes["value"]
        resource = ir.resource_name(value)
        if resource is not None:
            if resources is None:
                resources = ir.resources(module)
            value = ir.raw_attribute(resources[resource], result.type)
        if resource is not None or op.name == "arith.constant":
            _replace(op, value)
    for op in _operations(module, "tensor.from_elements"):
        numbers = [ir.defining_op(operand) for operand in op.operands]
        if all(number is not None and number.name == "arith.constant" for number in numbers):
            _replace(op, ir.elements_attribute([n.attributes["value"] for n in numbers if n], op.results[0].type))
    for op in reversed(_operations(module, "arith.constant", "tensor.from_elements")):
        if not any(ir.has_uses(result) for result in op.results):
            op.erase()
    for op in _operations(module):
        dialect = op.name.partition(".")[0]
        if dialect not in _KNOWN_DIALECTS:
            raise CompileError(
                f"cannot use {op.name} at {ir.location_text(op)}: of the dialects beside StableHLO only constants "
                "are understood; export the model with every operation as StableHLO"
            )


def _operations(module: Module, *names: str) -> list[Operation]:
    """All operations with one of these names, or without names all there are, in order."""
    return _within(module, *names)


def _within(root: Any, *names: str) -> list[Operation]:
    found: list[Operation] = []

    def visit(op: Operation) -> None:
        if not names or op.name in names:
            found.append(op)

    ir.walk(root, visit)
    return found


def _replace(op: Operation, value: ir.Attribute) -> None:
    with ir.insert_before(op), ir.located(op):
        made = ir.emit("stablehlo.constant", [], [op.results[0].type], {"value": value})
    ir.replace_uses(op.results[0], made.results[0])
    op.erase()
