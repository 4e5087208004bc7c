"""The arguments of a model's function and its given values, by the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planetary.core.configuration.schema import Config, ModelConfig
from planetary.core.configuration.weight_file import weight_file
from planetary.core.errors import TrustError, UserError

if TYPE_CHECKING:
    from planetary.compiler.frontend.export import Model


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
