"""Keys of a hub and its sites."""

from __future__ import annotations

from planetary.core.configuration.honoured import HonouredKeys
from planetary.runs.rounds.config import SECTIONS

_FEDERATED = {
    **dict.fromkeys(
        ("sync.compression", "sync.broadcast_compression", "sync.start_compression"),
        "a hub and its sites send whole parameters; --preset rda does so",
    ),
    "sync.overlap": "a site hands over whole rounds",
    "sync.topology": "a ring has its parameters on its workers",
    "sync.*": "a federation is synchronised in stars, without codec and overlap",
    "checkpoint.every": "a contribution has to outlive its gateway, which writes a checkpoint after every round",
    "data.max_epochs": "the hub's train.rounds end a federation",
    "train.target_minutes": "the hub's train.rounds end a federation",
    "model.smaller": "a federation trains one model, whose size no machine chooses",
    "fabric.leases": "the data of a federation is divided in advance",
}
_OF_SITES = "it is a key of the sites"

HUB = HonouredKeys(
    kind="hub",
    keys=(*SECTIONS, "federation.*", "sinks"),
    without={**_FEDERATED, **dict.fromkeys(("federation.hub", "federation.site", "federation.run"), _OF_SITES)}
    | {"federation.token_file": _OF_SITES},
    passed_on=(
        *(f"optimizer.{key}" for key in ("learning_rate", "warmup_steps", "schedule")),
        *("optimizer.final_fraction", "optimizer.cooldown_fraction", "train.inner_state", "data.delivery"),
        *("fabric.backend", "fabric.target", "fabric.island", "fabric.threads", "federation.patience_s"),
    ),
)
SITE = HonouredKeys(
    kind="site",
    keys=(*SECTIONS, "federation.*", "sinks"),
    without=_FEDERATED
    | dict.fromkeys(("federation.sites", "federation.every_rounds", "federation.parts"), "it is a key of the hub"),
)
