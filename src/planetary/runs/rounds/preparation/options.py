"""The training step's options, the learning rate, the model's arguments and its given values, by the configuration."""

from __future__ import annotations

import glob
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planetary.core.config import Config, ModelConfig, is_function
from planetary.core.configuration.family import family_of
from planetary.core.configuration.step_options import ComputeOptions, StepOptions, UpdateOptions
from planetary.core.configuration.weight_file import weight_file
from planetary.core.errors import TrustError, UserError
from planetary.core.extension_points import INNER_OPTIMIZERS, SCHEDULES
from planetary.core.schedules import Schedule
from planetary.core.tensors import digest_of

if TYPE_CHECKING:
    from planetary.compiler.frontend.export import Model


def step_options(config: Config, *, marked_targets: bool = False) -> StepOptions:
    """Return the configuration's settings of the training step, but for the learning rate.

    `marked_targets`: the data has tokens that are no targets.
    """
    optimizer, train = config.optimizer, config.train
    return StepOptions(
        **{name: getattr(optimizer, name) for name in UpdateOptions.__struct_fields__},
        **{name: getattr(train, name) for name in ComputeOptions.__struct_fields__},
        optimizer=INNER_OPTIMIZERS.pin(optimizer.name),
        marked_targets=marked_targets,
    )


def schedule_of(config: Config, total_steps: int) -> Schedule:
    """Return the learning-rate schedule of a run of so many inner steps. Raises `UserError` for one that cannot be."""
    optimizer = config.optimizer
    schedule = Schedule(
        kind=SCHEDULES.pin(optimizer.schedule),
        peak=optimizer.learning_rate,
        warmup_steps=optimizer.warmup_steps,
        total_steps=total_steps,
        final_fraction=optimizer.final_fraction,
    )
    schedule.check()
    return schedule


def builder_options(config: Config, source: str) -> dict[str, object]:
    """The model function's options, completed by the configuration's other sections.

    Batch size, sequence length and seed are passed to a function that names them, or takes any keyword. With columns
    of arrays the length is passed to a function that names it only: an example may have none.
    """
    from planetary.compiler.frontend.export import find_builder

    options = dict(config.model.options)
    accepted = inspect.signature(find_builder(source)).parameters
    known = {
        "batch_size": config.train.batch_size // config.train.micro_batches,  # the step puts the parts together
        "sequence_length": config.train.sequence_length,
        "seed": config.run.seed,
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    for name, value in known.items():
        if name in accepted or (takes_any and not (name == "sequence_length" and config.data.has_columns)):
            options.setdefault(name, value)
    return options


def model_of(config: Config) -> Model:
    """Return the model a run trains: with the given weights, frozen parameters and adapters.

    Raises:
        UserError: weights or patterns do not fit the model.
        CompileError: the model cannot be lowered or parsed.
    """
    from planetary.compiler.frontend.export import export_model, load_model
    from planetary.compiler.frontend.weights import frozen

    given, source = config.model, config.model.source
    if config.data.has_pairs:
        from planetary.runs.rounds.preparation.preference import preference_model

        model = preference_model(config)
    elif is_function(source):
        model = export_model(source, builder_options(config, source), roles=given.roles)
    else:
        model = load_model(source, roles=given.roles, values_follow=bool(given.weights))
    if given.weights:
        model = given_weights(model, given)
    return with_adapters(frozen(model, given.freeze), config)


def with_adapters(model: Model, config: Config) -> Model:
    """Return the model with the adapters of a configuration, if any. Raises `UserError`."""
    from planetary.compiler.frontend.adapters import adapted
    from planetary.compiler.frontend.narrow_base import narrowed

    adapter = config.adapter
    if not adapter.rank:
        return model
    model = adapted(model, rank=adapter.rank, alpha=adapter.alpha, targets=adapter.targets, seed=config.run.seed)
    model = narrowed(model, 8 if adapter.base == "int8" else 4) if adapter.base != "f32" else model
    return _started(model, config) if adapter.start else model


def stored_names(config: Config) -> Callable[[str], str]:
    """Return the function from a tensor's name to the name in the folders of published models."""
    family = family_of(config.model.source, config.model.options)
    return family.stored_name if family is not None else str


def base_digests(model: Model, config: Config) -> dict[str, str]:
    """Return the sha256 of each untrained tensor by stored name, with the values it is trained with."""
    named = stored_names(config)
    return {named(name): digest_of(value) for name, value in model.base.items()}


def _started(model: Model, config: Config) -> Model:
    """Return the model with the adapters of the folder `adapter.start`. Raises `UserError`."""
    from planetary.artifacts.adapter_folder import check_base, read_adapter
    from planetary.compiler.frontend.weights import with_weights

    folder, named = Path(config.adapter.start), stored_names(config)
    wanted = {stored: own for one in model.adapters for own, stored in one.stored_names(named).items()}
    try:
        specs, tensors = read_adapter(folder, wanted)
        check_base(folder, base_digests(model, config))
    except OSError as error:
        raise UserError(f"cannot read adapter.start {folder}: {error.strerror or error}") from error
    except TrustError as error:
        raise UserError(f"cannot read adapter.start: {error}") from error
    others = [glob.escape(a.name) for a in model.manifest.arguments if a.name not in wanted.values()]
    return with_weights(model, specs, tensors, where=str(folder), optional=others)


def given_weights(model: Model, config: ModelConfig) -> Model:
    """Return the model with the values of the file, or of the pretrained model's folder, that `model.weights` names.

    Raises:
        UserError: it cannot be read, or does not fit.
    """
    from planetary.artifacts.pretrained_weights import read_pretrained
    from planetary.artifacts.ternary_matrices import read_weights
    from planetary.compiler.frontend.weights import with_weights

    path = Path(config.weights)
    is_model = path.is_dir() or weight_file(path) is not None
    try:
        specs, tensors, ternary = (*read_pretrained(path), ()) if is_model else read_weights(path)
    except OSError as error:
        raise UserError(f"cannot read model.weights {path}: {error.strerror or error}") from error
    except TrustError as error:
        raise UserError(f"cannot read model.weights: {error}") from error
    refuse_ternary_twice(path, ternary, config)
    return with_weights(model, specs, tensors, where=str(path), optional=config.weights_optional)


def refuse_ternary_twice(path: Path, ternary: Sequence[str], config: ModelConfig) -> None:
    """Raise `UserError` where a file's weights of these names are ternary, and the model would make them so again.

    Ternary values have another mean than their source, and would get another scale.
    """
    if ternary and config.options.get("ternary"):
        raise UserError(
            f"{path}: {ternary[0]!r} is ternary already, and model.options.ternary = true would scale it again. Set "
            "model.options.ternary = false to use these weights as they are; to go on training ternary experts, "
            "give their float weights (`planetary moe export` without --packed)"
        )
