"""The cost model's numbers for one shape and several composer counts, as rows of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from planetary.moe import cost
from planetary.moe.cost import MoeShape


class Workload(NamedTuple):
    """What costs depend on beside the shape: sequences per step of all composers, their length, owners, horizons."""

    batch: int = 1024
    length: int = 1024
    delta_rank: int = 8
    replicas: int = 1
    router_horizon: int = 1
    latent_horizon: int = 1
    backbone_horizon: int = 8


def table(shape: MoeShape, composers: Sequence[int], work: Workload) -> list[tuple[str, list[str]]]:
    """Return (label, one cell per composer count). Labels name the report's table or section that has the number."""

    def times(value: float) -> str:
        return f"{value:.2f}×"

    def row(label: str, cell: Callable[[int], str]) -> tuple[str, list[str]]:
        return label, [cell(c) for c in composers]

    def owned(composers: int) -> float:
        return composers / work.replicas

    tokens = work.batch * work.length
    rows = [
        row("surrogate forward, per call (table 3)", lambda c: times(shape.hidden / shape.rank)),
        row("expert compute, direct (table 3)", lambda c: times(1 / cost.rho_direct(shape, owned(c)))),
        row("expert compute, offload (table 3)", lambda c: times(1 / cost.rho_offload(shape, c))),
        row(
            "expert compute, offload with dX",
            lambda c: times(1 / cost.rho_offload_with_input_gradient(shape, c)),
        ),
        row(
            "expert compute, direct, dense surrogate bank",
            lambda c: times(1 / (cost.rho_direct(shape, owned(c)) + cost.dense_bank(shape, owned(c)))),
        ),
        row(
            "total compute, direct (table 3)",
            lambda c: times(cost.total_reduction(shape, cost.rho_direct(shape, owned(c)))),
        ),
        row(
            "total compute, offload (table 3)",
            lambda c: times(cost.total_reduction(shape, cost.rho_offload(shape, c))),
        ),
        row(
            "total compute, offload with dX",
            lambda c: times(cost.total_reduction(shape, cost.rho_offload_with_input_gradient(shape, c))),
        ),
        row("expert weights per composer (table 4)", lambda c: gigabytes(cost.expert_weight_bytes(shape, owned(c)))),
        row(
            "expert state per composer, direct (table 4)", lambda c: gigabytes(cost.expert_state_bytes(shape, owned(c)))
        ),
        row("state of one expert on a worker (5.2)", lambda c: megabytes(cost.worker_state_bytes(shape))),
        row(
            "all-to-all per step, removed (table 4)",
            lambda c: f"{cost.all_to_all_bytes(shape, c, work.batch, work.length) / 1e9:.0f} GB",
        ),
        row(
            f"surrogate deltas of rank {work.delta_rank}, all (table 4)",
            lambda c: megabytes(cost.surrogate_sync_bytes(shape, c, work.delta_rank)),
        ),
        row("whole surrogates, all", lambda c: megabytes(cost.surrogate_full_bytes(shape, c))),
        row(
            "4-bit sketches per composer and step",
            lambda c: gigabytes(cost.sketch_bytes(shape, tokens // c)[1]),
        ),
    ]
    if work.replicas > 1:  # expert workers and several owners do not go together
        offloading = ("offload", "worker", "sketches")
        rows = [(label, cells) for label, cells in rows if not any(word in label for word in offloading)]
        rows.append(
            row("merge of all copies at the syncer", lambda _: gigabytes(cost.copies_bytes(shape, work.replicas)))
        )
    for label, params, horizon in (
        ("router", shape.router_params, work.router_horizon),
        ("latent", shape.latent_params, work.latent_horizon),
        ("backbone", shape.backbone_params, work.backbone_horizon),
    ):
        if params:
            rows.append(
                row(
                    f"{label} tier per step at the syncer, H = {horizon}",
                    lambda c, p=params, h=horizon: megabytes(cost.tier_bytes(p, c, h)),
                )
            )
    return rows


def gigabytes(size: float) -> str:
    """As the report prints memory: one decimal, 10⁹ bytes."""
    return f"{size / 1e9:.1f} GB"


def megabytes(size: float) -> str:
    """As the report prints surrogate traffic: one decimal, 10⁶ bytes."""
    return f"{size / 1e6:.1f} MB"
