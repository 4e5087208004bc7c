"""`planetary.export`, `planetary.compile` and `planetary.vjp`: models from Python, without a run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import msgspec

from planetary.core import decoding
from planetary.core.configuration.ranges import check_instance, check_path, show_found
from planetary.core.errors import UserError
from planetary.core.user_code import find_modules_here

if TYPE_CHECKING:
    from planetary.compiler.frontend.export import Model
    from planetary.compiler.frontend.manifest import Role
    from planetary.compiler.step.train_step import TrainStep
    from planetary.core.configuration.step_options import StepOptions
    from planetary.fleet.preparation.compiling import PublishedArtifact

MANIFEST = "manifest.json"


def export(
    source: str | Callable[..., Any],
    folder: str | os.PathLike[str] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    roles: Mapping[str, Role] | None = None,
    force: bool = False,
) -> Model:
    """Lower a JAX model to StableHLO and return it; with `folder` also write it there.

    Args:
        source: a function, or a name: `"module:function"` or `"path/to/file.py:function"`. It is called with `options`
            and returns `(loss_fn, params, example_batch)`: `loss_fn(params, *example_batch)` is a float scalar,
            `params` any pytree of arrays. The name of a model of the zoo stands for its function, and so does a PyTorch
            module on tokens.
        folder: gets `model.mlir` (a portable artifact), `manifest.json` and `init.safetensors`, from which a run
            (`model.source`) and `planetary.compile` read it.
        options: keyword arguments of the function.
        roles: "param", "buffer", "input", "target", "key" or "step" by flattened name or pattern, where the default is
            wrong.
        force: replace a model that is in `folder`.

    Returns:
        The model: `stablehlo`, `text`, `manifest`, `param_count`, `initial("param")`.

    Raises:
        UserError: the function cannot be found or called, or returns something else; `folder` holds a model.
        CompileError: JAX cannot trace the loss, or the loss is not one float scalar.

    Example:
        >>> def build(width=4):
        ...     import jax.numpy as jnp
        ...     def loss(params, x, y):
        ...         return jnp.mean((x @ params["w"] - y) ** 2)
        ...     return loss, {"w": jnp.zeros((width, 1))}, (jnp.ones((8, width)), jnp.ones((8, 1)))
        >>> model = planetary.export(build, options={"width": 3})
        >>> model.param_count, [argument.role for argument in model.manifest.arguments]
        (3, ['param', 'input', 'target'])
    """
    from planetary.compiler.check.meaning import with_checked_meaning
    from planetary.compiler.frontend.export import call_builder, checked_build, export_loss, export_model
    from planetary.compiler.frontend.framework import framework_of
    from planetary.models.zoo import ZOO

    check_path("folder", folder)
    _check_tables(options, roles)
    if not isinstance(source, str) and not callable(source):
        raise UserError(
            f"source: expected a function, its name (module:function), a model of the zoo ({', '.join(ZOO)}) or a "
            f"PyTorch module, found {show_found(source)}"
        )
    if folder is not None and (Path(folder) / MANIFEST).exists() and not force:
        raise UserError(
            f"cannot export to {folder}: it already holds a model; use another, or replace it (--force, force=True)"
        )
    if isinstance(source, str):
        find_modules_here()
        model = export_model(ZOO[source].source if source in ZOO else source, options, roles=roles)
    else:
        name = getattr(source, "__qualname__", type(source).__name__)
        framework = framework_of(source)
        build = source if framework is None else framework.builder(source, None, name)
        built = checked_build(call_builder(name, build, options or {}), name)
        model = export_loss(*built, name=name.rpartition(".")[2], options=options, roles=roles)
    model = with_checked_meaning(model)
    if folder is not None:
        model.save(Path(folder))
    return model


def load(
    source: str | os.PathLike[str],
    *,
    options: Mapping[str, Any] | None = None,
    roles: Mapping[str, Role] | None = None,
    preset: str | None = None,
) -> Model:
    """Return the model that `source` names.

    That is one of the zoo, "module:function", a StableHLO file, an exported folder, or a pretrained model's folder.

    Raises:
        UserError: there is no such model; options are given to a file, or a preset to a model that is not in the zoo.
        CompileError: it cannot be lowered or parsed.
    """
    from planetary.compiler.frontend.export import export_model, load_model
    from planetary.core.configuration.pretrained import is_pretrained
    from planetary.core.configuration.weight_file import pretrained_folder
    from planetary.models.zoo import ZOO

    wanted = f"a planetary.export of a function, one of the zoo ({', '.join(ZOO)}), module:function, or a path"
    check_instance("model", source, (str, os.PathLike), wanted)
    _check_tables(options, roles)
    name = str(source)
    if name in ZOO:
        entry = ZOO[name]
        return export_model(entry.source, entry.options(preset or "default") | dict(options or {}), roles=roles)
    if preset is not None:
        raise UserError(
            f"presets are for models of the zoo ({', '.join(ZOO)}), found {name!r}; else use --set and options"
        )
    if ":" in name and "://" not in name:
        find_modules_here()
        return export_model(name, options, roles=roles)
    if not name or not Path(name).exists():
        raise UserError(
            f"there is no model {name!r}: expected one of the zoo ({', '.join(ZOO)}), module:function, or the "
            "path of a .mlir file, an exported folder or a pretrained model's folder"
        )
    if is_pretrained(pretrained_folder(Path(name))):
        return _pretrained(Path(name), options or {}, roles)
    if options:
        raise UserError(f"options (--set) belong to a model function; {name} is a file")
    return load_model(Path(name), roles=roles)


class CompiledStep(msgspec.Struct, frozen=True, kw_only=True):
    """A training step, compiled for a target and verified.

    Attributes:
        path: of the artifact in the cache, or where it was asked for.
        target: it was compiled for, e.g. "cpu:host".
        step: the step itself: `step.stablehlo`, and `step.spec` with parameters, optimizer state and batch.
        published: `digest`, `nbytes`, `verified` (the comparison, in words), `compile_s`, `verify_s`, `cached`.
        differentiate_s: that differentiating and assembling the step took.
    """

    path: Path
    target: str
    step: TrainStep
    published: PublishedArtifact
    differentiate_s: float


def compile(
    model: Model | str | os.PathLike[str],
    target: str = "cpu:host",
    *,
    step: StepOptions | Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    roles: Mapping[str, Role] | None = None,
    preset: str | None = None,
    output: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> CompiledStep:
    """Differentiate a model, put the optimizer around it, compile it for a target and verify it.

    One training and one evaluation step on random numbers must equal XLA's. The compiler runs in a separate process.

    Args:
        model: a `Model`, one of the zoo by name, "module:function", a StableHLO file, or an exported folder.
        target: as of `planetary compile`: "cpu:host", "cuda:sm_80", "vulkan", "pjrt:cpu".
        step: options of the step, such as `{"optimizer": "lion", "clip_norm": 1.0}`.
        options: keyword arguments of a model function.
        roles: role overrides by argument name or pattern.
        preset: of a model of the zoo: a size, such as "tiny".
        output: file that gets the artifact too.
        cache: folder of compiled steps; by default `$PLANETARY_CACHE`, else `~/.cache/planetary`.

    Raises:
        UserError: the model, the target or an option is wrong.
        CompileError: an operation has no derivative, the compiler refuses the step, or it computes other numbers.

    Example:
        >>> compiled = planetary.compile("nanochat", preset="tiny", step={"optimizer": "lion"}, output="step.vmfb")
        >>> compiled.path.name, compiled.published.nbytes > 0
        ('step.vmfb', True)
    """
    from planetary.artifacts.store import BlobStore, write_atomically
    from planetary.compiler.backends.targets import parse_target
    from planetary.compiler.check.meaning import check_meaning
    from planetary.compiler.frontend.export import Model
    from planetary.compiler.step.train_step import build_train_step
    from planetary.core.places import cache_folder
    from planetary.fleet.preparation.compiling import CompileTarget, ModelToCompile, compile_apart
    from planetary.runtime.host import host_features

    check_instance("target", target, str, 'a target such as "cpu:host", "cuda:sm_80" or "vulkan"')
    check_path("output", output)
    place = cache_folder(cache)
    wanted = parse_target(target, host_features())  # a wrong one is found before the model is built
    loaded = model if isinstance(model, Model) else load(model, options=options, roles=roles, preset=preset)
    check_meaning(loaded)
    began = time.monotonic()
    train_step = build_train_step(loaded, step_options(step or {}))
    differentiated = time.monotonic() - began
    what = ModelToCompile(train_step, loaded.start, loaded.initial("buffer"))
    made = CompileTarget(wanted.backend, wanted.name, wanted.features)
    # On a separate thread: an event loop may be running on this one.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        published = pool.submit(asyncio.run, compile_apart(what, made, place)).result()
    store = BlobStore(place / "blobs")
    path = store.path(published.digest)
    if output is not None:
        path = Path(output)
        write_atomically(path, store.get(published.digest))
    return CompiledStep(path=path, target=target, step=train_step, published=published, differentiate_s=differentiated)


def step_options(given: StepOptions | Mapping[str, Any]) -> StepOptions:
    """Return the options of a training step. Raises `UserError` naming those there are."""
    from planetary.core.configuration.step_options import StepOptions
    from planetary.core.schedules import Schedule

    if isinstance(given, StepOptions):
        return given
    check_instance("step", given, Mapping, 'a dictionary such as {"optimizer": "lion", "clip_norm": 1.0}')
    rates = {"learning_rate", "schedule", *Schedule.__struct_fields__}
    if of_schedule := [key for key in given if key in rates]:
        raise UserError(
            f"step option {of_schedule[0]}: the learning rate and its schedule are no part of a compiled step, which "
            "takes the rate of every step as an argument: one artifact serves them all. Leave it out"
        )
    try:
        return decoding.convert(dict(given), StepOptions)
    except msgspec.ValidationError as error:
        raise UserError(f"step options: {error}; they are {', '.join(StepOptions.__struct_fields__)}") from None


def vjp(module: str | bytes | os.PathLike[str] | Model, wrt: Sequence[int] = (0,)) -> str:
    """Return the vector-Jacobian product of a StableHLO module as StableHLO text: reverse-mode differentiation.

    Args:
        module: StableHLO text, MLIR bytecode, a portable artifact, the path of a file with one, or a `Model`, with a
            function `main`.
        wrt: positions of the arguments to differentiate by; each a float or complex tensor.

    Returns:
        Text whose `@main` takes the original arguments, then one cotangent per result, and returns one gradient per
        `wrt` argument, of the argument's shape and type. Complex conventions are those of `jax.vjp`.

    Raises:
        UnsupportedOpError: an operation without a rule lies between a `wrt` argument and a result.
        CompileError: the module does not parse or has no `main`.
        UserError: a `wrt` position is out of range or not differentiable, or the file cannot be read.

    Example:
        >>> square = '''func.func @main(%x: tensor<f32>) -> tensor<f32> {
        ...   %y = stablehlo.multiply %x, %x : tensor<f32>
        ...   return %y : tensor<f32>
        ... }'''
        >>> "(%arg0: tensor<f32>, %arg1: tensor<f32>) -> tensor<f32>" in planetary.vjp(square)
        True
    """
    from planetary.compiler.autodiff.differentiate import differentiate
    from planetary.compiler.frontend.export import Model

    positions = _positions(wrt)
    if isinstance(module, Model):
        return differentiate(module.stablehlo, positions)
    wanted = "StableHLO text, bytes of a module, the path of a file, or a planetary.export of a function"
    check_instance("module", module, (str, bytes, os.PathLike), wanted)
    if isinstance(module, os.PathLike) or (isinstance(module, str) and module.endswith(_MODULE_FILES)):
        try:
            return differentiate(Path(module).read_bytes(), positions)
        except OSError as error:
            raise UserError(f"cannot read the module {module}: {error.strerror or error}") from None
    return differentiate(module, positions)


_MODULE_FILES = (".mlir", ".mlirbc")


def _positions(wrt: Any) -> tuple[int, ...]:
    """Return positions of arguments as numbers. Raises `UserError` for anything else."""
    try:
        return () if isinstance(wrt, str | bytes) else tuple(operator.index(position) for position in wrt)
    except TypeError:
        raise UserError(
            f"wrt: expected positions of the module's arguments, such as (0,) or (0, 2), found {show_found(wrt)}"
        ) from None


def _check_tables(options: object, roles: object) -> None:
    """Check arguments of a model. Raises `UserError`."""
    wanted = 'a dictionary of the function\'s keyword arguments, such as {"width": 3}'
    check_instance("options", options, (Mapping, NoneType), wanted)
    check_instance("roles", roles, (Mapping, NoneType), 'a dictionary such as {"rope.*": "buffer"}')


def _pretrained(folder: Path, options: Mapping[str, Any], roles: Mapping[str, Role] | None) -> Model:
    from planetary.compiler.frontend.export import export_model
    from planetary.core.config import config_from_tables
    from planetary.runs.rounds.preparation.options import given_weights

    model = {"source": str(folder), "options": dict(options)}
    tokenizer = {"tokenizer": "byte"}  # none is needed here, so none is asked for
    config = config_from_tables({"model": model, "data": tokenizer}).model
    return given_weights(export_model(config.source, config.options, roles=roles), config)
