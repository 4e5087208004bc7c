"""Defects of a mixture's configuration, and warnings about choices that are perhaps not meant, before a run."""

from __future__ import annotations

from planetary.core.configuration.schema import Config
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.config import MoeConfig
from planetary.runs.mixture.methods.pace import PACES
from planetary.runs.mixture.methods.surrogate import are_copies
from planetary.runs.mixture.plan import OF_EXPERT_WORKERS, model_of, training_of, warnings_of
from planetary.runs.rounds.preparation.training_options import schedule_of, step_options


def check_mixture(config: Config) -> list[str]:
    """Return warnings about choices that are allowed and perhaps not meant.

    Raises:
        UserError: the configuration makes no mixture; the keys at fault are named.
    """
    model = model_of(config)
    training_of(config, model, step_options(config), schedule_of(config, config.total_inner_steps))
    return [*warnings_of(config, model), *keys_without_effect(config.of(MoeConfig), model)]


def keys_without_effect(moe: MoeConfig, model: LatentMoeConfig) -> list[str]:
    """Return a sentence for every choice that leaves keys without effect which are not at their defaults.

    They are no error: a run without expert workers is often one with them and a single key changed.
    """
    choices: list[tuple[bool, str, tuple[str, ...]]] = [
        (not moe.expert_workers, "moe.expert_workers = 0", OF_EXPERT_WORKERS),
        (
            moe.expert_workers > 0 and moe.update_form != "topk",
            f'moe.update_form = "{moe.update_form}"',
            ("update_keep",),
        ),
        (not moe.rank, "moe.rank = 0", ("detach", "delta_rank", "refresh_form", "fit_steps")),
        (moe.rank > 0 and are_copies(moe.rank, model), f"moe.rank = {moe.rank}, copies of experts", ("fit_steps",)),
        (not model.projected, "a model without latent projections", ("latent_every",)),
        (True, f'moe.pace = "{moe.pace}"', PACES[moe.pace].unused_keys),
    ]
    default, found = MoeConfig(), []
    for made, choice, keys in choices:
        unused = [f"moe.{key}" for key in keys if getattr(moe, key) != getattr(default, key)]
        if made and unused:
            found.append(f"{choice} leaves these keys without effect: {', '.join(unused)}")
    return found
