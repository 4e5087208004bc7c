"""Comparison of a site's model, data and step with the hub's, in words."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from planetary.core.configuration.schema import Config
from planetary.core.tensors import TensorSpec
from planetary.runs.federation.messages import Facts
from planetary.runs.rounds.preparation.preparation import Prepared


def facts_of(config: Config, prepared: Prepared) -> Facts:
    """Return the facts both sides of a federation must share."""
    model, data = msgspec.to_builtins(config.model), prepared.data
    for values in ("weights", "weights_optional", "smaller"):
        del model[values]
    if config.model.freeze or config.adapter.rank:  # what is not trained must be equal, and never travels
        model |= {"frozen": prepared.record.frozen, "adapter": msgspec.to_builtins(config.adapter) | {"start": ""}}
    model["source"] = re.split(r"[/\\]", model["source"])[-1]
    order = [config.run.seed, config.data.sampling, config.data.shuffle_leases]
    return Facts(
        model=_digest(model),
        vocabulary=data.vocab_size,
        tokenizer=data.tokenizer.digest if data.tokenizer is not None else "tokens",
        data=data.key,
        lease=config.tokens_per_slice,
        order=_digest(order),
    )


def differences(
    hub: Facts, site: Facts, of_hub: Sequence[TensorSpec], of_site: Sequence[TensorSpec], *, same_data: bool
) -> str:
    """Return the differences that keep a site from training for the hub, with sizes and digests; "" for none.

    `same_data`: whether the site trains a part of the hub's data.
    """
    if tuple(of_hub) != tuple(of_site):
        return (
            f"the hub's model has {_count(of_hub)}, this site's has {_count(of_site)}; "
            f"{_first_difference(of_hub, of_site)}"
        )
    if hub.model != site.model:
        return (
            f"the hub's model and this site's have the same parameters and compute different things: their sections "
            "[model] and [adapter], or the tensors that are not trained, have the digests "
            f"{_short(hub.model)} and {_short(site.model)}"
        )
    if (hub.vocabulary, hub.tokenizer) != (site.vocabulary, site.tokenizer):
        return (
            f"the hub's tokenizer has {hub.vocabulary} tokens (digest {_short(hub.tokenizer)}), this site's has "
            f"{site.vocabulary} ({_short(site.tokenizer)})"
        )
    if not same_data:
        return ""
    if hub.data != site.data:
        return (
            f"this site is to train a part of the hub's data, and has other data: their digests are "
            f'{_short(hub.data)} and {_short(site.data)}. Give it the same [data] section, or data = "own" in the '
            "hub's federation.sites"
        )
    if (hub.lease, hub.order) != (site.lease, site.order):
        return (
            f"the parts of the hub's data are leases of {hub.lease} tokens in the order {_short(hub.order)}, this "
            f"site's are {site.lease} in the order {_short(site.order)}: train.inner_steps, train.batch_size, "
            "train.sequence_length, run.seed and data.sampling have to be the hub's"
        )
    return ""


def _count(specs: Sequence[TensorSpec]) -> str:
    digest = _digest([[spec.name, spec.dtype, list(spec.shape)] for spec in specs])
    return f"{sum(spec.size for spec in specs):,} parameters in {len(specs)} tensors (digest {_short(digest)})"


def _first_difference(of_hub: Sequence[TensorSpec], of_site: Sequence[TensorSpec]) -> str:
    hub, site = ({spec.name: spec for spec in specs} for specs in (of_hub, of_site))
    for name in [*hub, *site]:
        if hub.get(name) != site.get(name):
            return f"tensor {name!r} is {_shown(hub.get(name))} at the hub and {_shown(site.get(name))} here"
    return "their order differs"


def _shown(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype}{list(spec.shape)}"


def _short(digest: str) -> str:
    return digest[:12]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
