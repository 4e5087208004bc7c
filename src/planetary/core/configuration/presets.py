"""Presets of synchronisation: published methods as settings of a configuration, with their sources.

A preset is a row of `PRESETS`; the docs print the table (`python docs/make_presets.py`). It fixes the keys it names.
Keys given with `--set` are on top of it, the rest stays as in the file.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from planetary.core.configuration.toml import toml_value
from planetary.core.errors import UserError, did_you_mean

_STAR = {"sync.topology": "star", "sync.overlap": "none"}


def _coded(up: str, down: str, start: str = "none") -> dict[str, str]:
    return {"sync.compression": up, "sync.broadcast_compression": down, "sync.start_compression": start}


_WHOLE = _coded("none", "none")


class Preset(msgspec.Struct, frozen=True):
    """One way to synchronise.

    Attributes:
        name: as `--preset` takes it.
        summary: effect, in one line.
        source: origin of the numbers.
        settings: keys and values.
        alone: keys that differ for one worker.
    """

    name: str
    summary: str
    source: str
    settings: Mapping[str, str | int | float]
    alone: Mapping[str, str | int | float] = {}

    def overrides(self, workers: int) -> list[str]:
        """Return the settings for a run of so many workers, as `--set` takes them."""
        chosen = {**self.settings, **(self.alone if workers == 1 else {})}
        return [f"{key}={toml_value(value)}" for key, value in chosen.items()]


def _outer(rate: float, momentum: float, merge: str = "mean") -> dict[str, str | float]:
    return {"outer.learning_rate": rate, "outer.momentum": momentum, "outer.merge": merge}


PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "ddp",
            "parameters are averaged after every step, each worker with its own optimizer state",
            "H 1 and plain averaging; the reference that all others are compared with",
            {**_STAR, **_WHOLE, "train.inner_steps": 1, **_outer(1.0, 0.0)},
        ),
        Preset(
            "diloco",
            "Nesterov's outer step on the mean delta",
            "Douillard et al. 2023, arXiv:2311.08105, section 3 (0.7, 0.9); H 30 as in arXiv:2503.09799",
            {**_STAR, **_WHOLE, "train.inner_steps": 30, **_outer(0.7, 0.9)},
        ),
        Preset(
            "rda",
            "mean length in the mean direction, no outer momentum: for fewer than about 1,000 rounds",
            "Decoupled DiLoCo, arXiv:2604.21428 (the average); a LoRA study of 43 outer steps (rate 1, no momentum)",
            {**_STAR, **_WHOLE, "train.inner_steps": 30, **_outer(1.0, 0.0, "rda")},
        ),
        Preset(
            "ring",
            "workers reduce their deltas among themselves, in float32, and the gateway sends nothing but leases",
            "the ring all-reduce of PCCL (arXiv:2505.14065); H 10 for runs of fewer than about 200 rounds of 30",
            {**_WHOLE, "sync.topology": "ring", "sync.overlap": "none", "train.inner_steps": 10, **_outer(1.0, 0.0)},
        ),
        Preset(
            "eager-diloco",
            "the next round is trained while the contributions to one travel, from the worker's own part of it",
            "Kale et al. 2025, arXiv:2502.12996 (the update, H 30); rate 1, no momentum: the update has no state then",
            {
                **_STAR,
                "sync.overlap": "eager",
                **_coded("float32", "none"),
                "train.inner_steps": 30,
                **_outer(1.0, 0.0),
            },
        ),
        Preset(
            "streaming-diloco",
            "a third of the parameters is synchronised every 10 steps and mixed in one step later; 4 bits up",
            "Douillard et al. 2025, arXiv:2501.18512 (fragments, delay, α 0.5, FP4 E3M0 up); 3 fragments of H 30 here",
            {
                **_STAR,
                "sync.overlap": "streaming",
                "sync.fragments": 3,
                "sync.delay": 1,
                "sync.mixing": 0.5,
                **_coded("fp4", "none"),
                "train.inner_steps": 10,
                **_outer(0.7, 0.9),
            },
        ),
        Preset(
            "decoupled-diloco",
            "as streaming, but one worker and a short grace time close a round, and the leases of the others go on",
            "Decoupled DiLoCo, arXiv:2604.21428 (H 24, τ 2, K 1, γ 1, cap 1, α 0); 12 fragments in place of 24, "
            "since a round lasts for τ steps here",
            {
                **_STAR,
                "sync.overlap": "decoupled",
                "sync.fragments": 12,
                "sync.delay": 2,
                "sync.mixing": 0.0,
                "sync.grace_steps": 1.0,
                "fabric.quorum": 1,
                **_coded("float32", "none"),
                "train.inner_steps": 2,
                **_outer(0.7, 0.9),
            },
        ),
        Preset(
            "diloco-int4",
            "as diloco, with updates of 4 bits both ways and error feedback",
            "Douillard et al. 2025, arXiv:2501.18512, section 4.3 (4 bits up); down as well here",
            {
                **_STAR,
                "train.inner_steps": 30,
                **_outer(0.7, 0.9),
                **_coded("int4", "int4"),
            },
        ),
        Preset(
            "sparseloco",
            "1.56 % of the numbers in 2 bits both ways, mean over the senders of a number",
            "Sarfi et al. 2025, arXiv:2508.15706 (K 64 of 4096, β 0.95, H 30, outer SGD at rate 1)",
            {
                **_STAR,
                "train.inner_steps": 30,
                **_outer(1.0, 0.0, "senders"),
                **_coded("sparse", "sparse"),
            },
        ),
        Preset(
            "rda-sign",
            "as rda, with updates of one bit a number both ways and error feedback: 1/114 of float32's bytes at H 10",
            "Vargaftik et al. 2021, arXiv:2105.08339 (one bit after a rotation); the rest: bench/results/sync.md",
            {
                **_STAR,
                "train.inner_steps": 36,
                **_outer(1.0, 0.0, "rda"),
                **_coded("sign", "sign"),
            },
        ),
        Preset(
            "rda-relay",
            "as rda-sign, but workers get each other's updates of one bit and take the outer step themselves, which "
            "loses nothing; as many bytes down as up for two workers, and M - 1 times as many for M",
            "Vargaftik et al. 2021, arXiv:2105.08339 (one bit after a rotation); the rest: bench/results/sync.md",
            {
                **_STAR,
                "train.inner_steps": 36,
                **_outer(1.0, 0.0, "rda"),
                **_coded("sign", "relay", "int8"),
            },
        ),
        Preset(
            "eager-relay",
            "as eager-diloco, with updates of one bit a number both ways: workers get each other's and take the outer "
            "step themselves; for links on which eager-diloco waits",
            "Kale et al. 2025, arXiv:2502.12996 (eager, H 30); Decoupled DiLoCo, arXiv:2604.21428 (radial average); "
            "Vargaftik et al. 2021, arXiv:2105.08339 (one bit); the rest: bench/results/sync.md",
            {
                **_STAR,
                "sync.overlap": "eager",
                "train.inner_steps": 30,
                **_outer(1.0, 0.0, "rda"),
                **_coded("sign", "relay", "int8"),
            },
        ),
        Preset(
            "muloco",
            "Muon on matrices as the inner optimizer, Nesterov's outer step; the learning rate is the file's, as "
            "updates of Muon have the size of AdamW's here",
            "Thérien et al. 2025, arXiv:2505.23725 (H 30, outer 0.9 / 0.9; 0.7 / 0.6 for one worker)",
            {
                **_STAR,
                **_WHOLE,
                "train.inner_steps": 30,
                "optimizer.name": "muon",
                "optimizer.momentum": 0.9,
                "optimizer.beta2": 0.99,
                **_outer(0.9, 0.9),
            },
            _outer(0.7, 0.6),
        ),
    )
}
"""By their names."""


def preset_of(name: str) -> Preset:
    """Return a preset. Raises `UserError` naming the known ones."""
    if name not in PRESETS:
        raise UserError(
            f"unknown preset {name!r}{did_you_mean(str(name), list(PRESETS))} Presets: {', '.join(PRESETS)}"
        )
    return PRESETS[name]
