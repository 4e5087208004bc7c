"""A new run whose time is given gets its length, and a smaller model where it needs one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from planetary.core.config import Config
from planetary.data.fitting import fit_to_data, length_of
from planetary.fabric.preparation.budget import Speed, fit, smaller, why_smaller
from planetary.fabric.preparation.preparation import Prepared


async def fit_run(
    config: Config,
    prepared: Prepared,
    measure: Callable[[Config, Prepared], Awaitable[Speed | None]],
    prepare: Callable[[Config], Awaitable[Prepared | None]],
    note: Callable[[str], None],
) -> tuple[Config, Prepared] | None:
    """Return the configuration that takes about `train.target_minutes` here, and what its run is made of.

    None when `measure`, which times a step, or `prepare`, which makes another model, was stopped. `note` gets what was
    decided.
    """
    speed = await measure(config, prepared)
    if speed is None:
        return None
    spent_s = 0.0
    if (shrunk := smaller(config, speed)) is not None:
        note(why_smaller(config, speed))
        spent_s = speed.made_s
        found = await prepare(shrunk)
        if found is None:
            return None
        config, prepared = shrunk, found
        speed = await measure(config, prepared)
        if speed is None:
            return None
    chosen = fit(config, speed, spent_s=spent_s)
    config = fit_to_data(chosen.config, prepared.data)
    length = length_of(config, prepared.data.train.count)  # data.max_epochs may allow fewer rounds
    note(chosen.sentence(speed, length.expected_rounds))
    return config, prepared
