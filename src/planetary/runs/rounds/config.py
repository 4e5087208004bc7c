"""Keys a run in rounds honours, in a star and in a ring."""

from __future__ import annotations

from planetary.core.configuration.honoured import HonouredKeys

SECTIONS = (
    *("run.*", "model.*", "adapter.*", "data.*", "train.*", "optimizer.*", "outer.*", "fabric.*"),
    *("checkpoint.*", "eval.*"),
)
"""Sections a run in rounds honours wherever the workers are."""

_OF_RING = 'only workers of a ring have an effect of it: set sync.topology = "ring"'
_OF_STAR = 'only the star has an effect of it: set sync.topology = "star"'
_UNSEEN = "the gateway of a ring sees no contribution"

STAR = HonouredKeys(
    kind="rounds",
    keys=(*SECTIONS, "sync.*", "sinks"),
    without=dict.fromkeys(
        ("sync.precision", "sync.connections", "sync.ring_order", "sync.ring_compression", "sync.port"), _OF_RING
    ),
)
RING = HonouredKeys(
    kind="rounds in a ring",
    keys=(*SECTIONS, "sync.*", "sinks"),
    without={
        "outer.judge": f"{_UNSEEN}, and judges none",
        "outer.trimmed": f"{_UNSEEN}, and cuts off no values",
        "outer.weights": "a ring weighs contributions by their tokens",
        **dict.fromkeys(
            ("sync.compression", "sync.broadcast_compression", "sync.start_compression"),
            f"{_OF_STAR}, or sync.ring_compression",
        ),
        **dict.fromkeys(("sync.fragments", "sync.delay", "sync.mixing", "sync.grace_steps"), _OF_STAR),
    },
)
