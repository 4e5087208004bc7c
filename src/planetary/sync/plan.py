"""Costs of synchronisation, by arithmetic: bytes, utilisation and memory of every preset before a run.

A round of the star is H steps, then the update up and the next parameters down, one after the other. On a worker's link
that is (up + down) / bandwidth + 2 round trips. The gateway's link carries that of all workers. A ring moves 2 (M − 1)
/ M of the parameters each way over every worker's link, in 2 (M − 1) stages of a round trip each. With eager overlap a
worker waits only for the time beyond the H steps, in the star a round trip at least. A round of a streaming preset
moves one fragment, and waits for the time beyond the delay. Headers and TLS are `OVERHEAD` of the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from planetary.core.configuration.presets import PRESETS, Preset
from planetary.core.configuration.ranges import RELAY
from planetary.core.errors import UserError
from planetary.core.extension_points import OUTER_OPTIMIZERS, OVERLAPS, TOPOLOGIES
from planetary.core.tensors import TensorSpec
from planetary.sync.payload import PayloadForm

OVERHEAD = 0.01  # headers of frames, TLS records and TCP, of the bytes
WELL_USED = 0.95  # utilisation a recommendation asks for
TOLERATED = 5.0  # percent of loss measured here, above which a preset is not recommended
_DAY_S = 86_400.0
_SIDE = 4096  # assumed side of a model's matrices

GAPS: Mapping[str, tuple[str, str]] = {
    "ddp": ("0", "the reference"),
    "diloco": (
        "+0.7/+2.0/+3.9 % (35M), +0.5/+1.5/+3.1 % (90M), -0.1/+0.3/+1.1 % (2.4B) at M 2/4/8",
        "arXiv:2503.09799, C4, H 30, tuned; one run a cell",
    ),
    "rda": ("+0.56 % ± 1.3", "an open LoRA study of a 27B model, 43 outer steps"),
    "ring": ("not published", "measured here with M 2: bench/results/diloco_gap.md"),
    "eager-diloco": ("that of diloco +0.7 %", "arXiv:2502.12996, 500M, M 2, H 30; one run"),
    "streaming-diloco": ("that of diloco +0.0 %", "arXiv:2502.12996, 500M, M 2, H 30, delay 1; one run"),
    "decoupled-diloco": (
        "not given as a loss",
        "arXiv:2604.21428, from summaries: 88 % goodput at M 8, 58 % elastic DDP",
    ),
    "diloco-int4": ("that of diloco +0.09 %", "arXiv:2604.21428, from summaries; no error bar"),
    "sparseloco": ("no worse than diloco", "arXiv:2508.15706; no error bar"),
    "rda-sign": ("not published", "measured here: bench/results/sync.md"),
    "rda-relay": ("not published", "measured here: bench/results/sync.md"),
    "eager-relay": ("not published", "measured here: bench/results/sync.md"),
    "muloco": ("-1.2 % (M 1) to +2.0 % (M 16) of AdamW in parallel, 150M", "arXiv:2505.23725, H 30, tuned"),
}
"""Published loss against data-parallel training on the same tokens, and where it was measured."""


class Measured(msgspec.Struct, frozen=True):
    """A preset's loss in our own runs, of small models and short.

    Attributes:
        loss: percent above averages in float32 without overlap, with the same steps between two of them.
        source: section of bench/results/sync.md.
    """

    loss: float
    source: str


_LONG, _SHORT = "200 rounds, 3 seeds: sync.md#two-hundred-rounds", "20 rounds, 3 seeds: sync.md#one-bit-a-number"
MEASURED: Mapping[str, Measured | None] = {
    "ddp": Measured(0.0, "the reference; steps without an average are what the others lose by"),
    "diloco": Measured(4.76, "20 rounds, 6 seeds: sync.md#outer-adam; its momentum needs many rounds"),
    "rda": Measured(-0.30, "20 rounds, 6 seeds: sync.md#outer-adam"),
    "ring": Measured(0.0, "the same averages, reduced among the workers"),
    "eager-diloco": Measured(1.75, _LONG),
    "streaming-diloco": Measured(0.90, f"{_LONG}; four bits both ways, a delay of 6 steps"),
    "decoupled-diloco": None,
    "diloco-int4": Measured(4.76 + 0.09, "diloco's, and the four bits: sync.md#two-hundred-rounds"),
    "sparseloco": Measured(12.28, _LONG),
    "rda-sign": Measured(2.99, _SHORT),
    "rda-relay": Measured(-0.17, "20 rounds, 3 seeds: sync.md#relayed-updates"),
    "eager-relay": Measured(1.34 - 0.17, "20 rounds, 3 seeds: sync.md#eager-overlap-with-few-bits"),
    "muloco": None,
}
"""Loss of each preset in our own runs; None: not measured, or with another inner optimizer than the reference."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The machines and links a plan is made for.

    Attributes:
        params: of the model.
        workers: M.
        bandwidth: of each worker's link, bytes/s; where `upload` is given, down alone.
        gateway_bandwidth: of the gateway's link.
        rtt_s: round trip between a worker and the gateway, or two workers.
        step_s: an inner step.
        price_per_worker_hour: 0: not given.
        upload: bytes/s of each worker's link to the gateway; 0: `bandwidth`.
        ring_bandwidth: bytes/s of the slowest link between two neighbours of a ring; 0: the slower way to the gateway.
        ring_rtt_s: round trip between two neighbours; 0: `rtt_s`.
    """

    params: float
    workers: int
    bandwidth: float
    gateway_bandwidth: float
    rtt_s: float
    step_s: float
    price_per_worker_hour: float = 0.0
    upload: float = 0.0
    ring_bandwidth: float = 0.0
    ring_rtt_s: float = 0.0

    @property
    def up_rate(self) -> float:
        """Bytes/s of each worker's link to the gateway."""
        return self.upload or self.bandwidth

    @property
    def ring_rate(self) -> float:
        """Bytes/s of the slowest link of a ring."""
        return self.ring_bandwidth or min(self.bandwidth, self.up_rate)


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of one preset on a cluster.

    Attributes:
        inner_steps: H.
        fragments: that parameters travel in, one a round.
        bits_up, bits_down: of a sent number; of the ring in transit.
        up, down: bytes of one worker and round; of the ring the traffic of each worker.
        compute_s, wait_s: of a round.
        worker_memory: bytes on the host of a worker, without the training step.
        gateway_memory: bytes at the gateway.
        gap: published loss, and the source.
        measured: percent of loss in our own runs, as in `Measured`; None: not measured.
        measured_in: where.
    """

    preset: str
    inner_steps: int
    fragments: int
    bits_up: float
    bits_down: float
    up: float
    down: float
    compute_s: float
    wait_s: float
    worker_memory: float
    gateway_memory: float
    gap: str
    source: str
    measured: float | None
    measured_in: str

    @property
    def utilisation(self) -> float:
        """Part of the time in which workers train."""
        return self.compute_s / (self.compute_s + self.wait_s)

    def bytes_per_day(self, workers: int) -> float:
        """Return the bytes of all workers' links in a day, both ways."""
        return workers * (self.up + self.down) * _DAY_S / (self.compute_s + self.wait_s)


def check_cluster(cluster: Cluster) -> None:
    """Raise `UserError` for numbers no cluster has, naming the first."""
    limits = {
        "params": (cluster.params, 1, 1e14),
        "workers": (cluster.workers, 1, 1e6),
        "bandwidth (bytes/s)": (cluster.bandwidth, 1, 1e13),
        "gateway bandwidth (bytes/s)": (cluster.gateway_bandwidth, 1, 1e13),
        "rtt (s)": (cluster.rtt_s, 0, 60),
        "step time (s)": (cluster.step_s, 1e-6, 86_400),
        "price": (cluster.price_per_worker_hour, 0, 1e6),
        "upload (bytes/s)": (cluster.up_rate, 1, 1e13),
        "ring bandwidth (bytes/s)": (cluster.ring_rate, 1, 1e13),
        "ring rtt (s)": (cluster.ring_rtt_s, 0, 60),
    }
    for name, (value, low, high) in limits.items():
        if not (math.isfinite(value) and low <= value <= high):
            raise UserError(f"plan: {name}: expected a number from {low:g} to {high:g}, found {value:g}")
    if cluster.workers != int(cluster.workers) or cluster.params != int(cluster.params):
        raise UserError(
            f"plan: expected whole numbers of params and workers, found {cluster.params}, {cluster.workers}"
        )


def payload_bytes(codec: str, params: float) -> float:
    """Return the bytes of an update of so many parameters in a codec; "none": float32."""
    if codec == "none":
        return 4.0 * params
    tile = TensorSpec("w", "f32", (_SIDE, _SIDE))
    return PayloadForm(codec, [tile]).spec.size / tile.size * params


def broadcast_bytes(codec: str, updates: str, workers: float, params: float) -> float:
    """Return the bytes in which a worker gets a version of so many parameters.

    `codec`: of the broadcast; where it is "relay", those of the other workers' updates in the codec `updates`, or of
    whole parameters where these are fewer.
    """
    if codec != RELAY:
        return payload_bytes(codec, params)
    return min((workers - 1) * payload_bytes(updates, params), 4.0 * params)


def predict(preset: Preset, cluster: Cluster, *, inner_steps: int = 0) -> Prediction:
    """Return the costs of a preset; `inner_steps` in place of the preset's, where not 0. Raises `UserError`."""
    check_cluster(cluster)
    if inner_steps < 0:
        raise UserError(
            f"plan: inner steps: expected a number from 1 on, or 0 for each preset's own, found {inner_steps}"
        )
    settings = preset.settings
    fragments = int(settings.get("sync.fragments", 1))
    steps = inner_steps or int(settings["train.inner_steps"])
    compute, params, many = steps * cluster.step_s, cluster.params, cluster.workers
    overlap = OVERLAPS.find(str(settings["sync.overlap"]))
    outer = OUTER_OPTIMIZERS.find(str(settings.get("outer.optimizer", "nesterov"))).copies
    if TOPOLOGIES.find(str(settings["sync.topology"])).in_ring:
        moved = 2 * (many - 1) / many * 4 * params * (1 + OVERHEAD)
        transfer = moved / cluster.ring_rate + 2 * (many - 1) * (cluster.ring_rtt_s or cluster.rtt_s)
        wait = max(0.0, transfer - compute) if overlap.eager else transfer
        up = down = moved
        bits = (32.0, 32.0)
        # Two versions of parameters, the sum, the held delta and the start; the outer state.
        worker, gateway = (5 + outer) * 4 * params, (1 + outer) * 4 * params
    else:
        codecs = str(settings.get("sync.compression", "none")), str(settings.get("sync.broadcast_compression", "none"))
        moved = params / fragments
        bits = (payload_bytes(codecs[0], 8.0), broadcast_bytes(codecs[1], codecs[0], many, 8.0))
        up = payload_bytes(codecs[0], moved) * (1 + OVERHEAD)
        down = broadcast_bytes(codecs[1], codecs[0], many, moved) * (1 + OVERHEAD)
        slowest = max(up / cluster.up_rate + down / cluster.bandwidth, many * (up + down) / cluster.gateway_bandwidth)
        wait = slowest + 2 * cluster.rtt_s
        if overlap.eager:  # all but the word a lease is trained, and the next lease
            wait = max(cluster.rtt_s, wait - compute)
        elif overlap.fragmented:
            # With a delay a lease is given out before the one before it ends.
            delay = int(settings["sync.delay"])
            wait = max(0.0 if delay else cluster.rtt_s, wait - delay * cluster.step_s)
        coded = codecs[0] != "none"
        worker = (2 + 3 * coded) * 4 * params
        gateway = (2 + outer + 2 * coded + many) * 4 * params
    gap, source = GAPS[preset.name]
    measured = MEASURED[preset.name]
    return Prediction(
        preset=preset.name,
        inner_steps=steps,
        fragments=fragments,
        bits_up=bits[0],
        bits_down=bits[1],
        up=up,
        down=down,
        compute_s=compute,
        wait_s=wait,
        worker_memory=worker,
        gateway_memory=gateway,
        gap=gap,
        source=source,
        measured=measured.loss if measured is not None else None,
        measured_in=measured.source if measured is not None else "not measured",
    )


def plan(cluster: Cluster) -> tuple[list[Prediction], str]:
    """Return the predictions of all presets, and which one is recommended, and why.

    Averaging every step, where workers train `WELL_USED` of the time with it. Otherwise, of all presets that are used
    so well, the one of least loss in our own runs, then of fewest bytes. Where none is, the one that is used best. A
    preset without a measured loss, or with one above `TOLERATED`, is never recommended.
    """
    found = [predict(preset, cluster) for preset in PRESETS.values()]
    known = [(one.measured, one) for one in found if one.measured is not None and one.measured <= TOLERATED]
    ddp = next(one for one in found if one.preset == "ddp")
    if ddp.utilisation >= WELL_USED:
        return found, f"ddp: nothing is lost, and workers train {ddp.utilisation:.0%} of the time"
    well = [(loss, one.up + one.down, one.preset) for loss, one in known if one.utilisation >= WELL_USED]
    if well:
        loss, _, name = min(well)
        return found, (
            f"{name}: of the presets whose workers train {WELL_USED:.0%} of the time or more, the one of least loss "
            f"measured here ({loss:+.2f} % against averages in float32)"
        )
    best = max((one for _, one in known), key=lambda one: one.utilisation)
    steps = math.ceil(best.wait_s * WELL_USED / (1 - WELL_USED) / cluster.step_s) if best.wait_s else best.inner_steps
    return found, (
        f"{best.preset}: none with a tolerable loss is used {WELL_USED:.0%} of the time; this one is by "
        f"{best.utilisation:.0%}, and would be with train.inner_steps = {steps}, whose loss nothing published tells"
    )
