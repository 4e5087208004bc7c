"""The model a run trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planetary.core.configuration.schema import Config, is_function
from planetary.runs.rounds.preparation.adapted_model import with_adapters
from planetary.runs.rounds.preparation.options import builder_options, given_weights

if TYPE_CHECKING:
    from planetary.compiler.frontend.export import Model


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
