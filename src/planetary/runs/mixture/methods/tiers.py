"""Which parameters synchronise together, in which fragments, and when (PARALLAX, 4.4 and 4.9)."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec


class Tier(StrEnum):
    """A group of parameters with a separate cadence; routed experts have owners instead."""

    ROUTER = "router"
    LATENT = "latent"
    BACKBONE = "backbone"
    EXPERTS = "experts"


_PATTERNS = ((Tier.ROUTER, "*router*"), (Tier.LATENT, "*latent*"), (Tier.EXPERTS, "*experts*"))


def tier_of(name: str) -> Tier:
    """Return the tier of a parameter of `planetary.models.latent_moe`, by name."""
    return next((tier for tier, pattern in _PATTERNS if fnmatch.fnmatchcase(name, pattern)), Tier.BACKBONE)


def names_of(specs: Sequence[TensorSpec], tier: Tier) -> tuple[str, ...]:
    """Return the names of a tier's parameters, in order."""
    return tuple(spec.name for spec in specs if tier_of(spec.name) is tier)


def fragments_by_bytes(specs: Sequence[TensorSpec], count: int) -> tuple[tuple[str, ...], ...]:
    """Return `count` groups of names of about the same number of bytes, none empty.

    Largest first into the smallest group; names keep their order within a group. With fewer tensors than fragments
    there are as many fragments as tensors.
    """
    if count < 1:
        raise UserError(f"a tier has at least 1 fragment, found {count}")
    count = max(1, min(count, len(specs)))
    sizes = [0] * count
    place: dict[str, int] = {}
    for spec in sorted(specs, key=lambda s: (-s.nbytes, s.name)):
        # The second key fills empty groups first where tensors are empty themselves.
        smallest = min(range(count), key=lambda i: (sizes[i], sum(v == i for v in place.values())))
        place[spec.name] = smallest
        sizes[smallest] += spec.nbytes
    return tuple(tuple(spec.name for spec in specs if place[spec.name] == i) for i in range(count))


class Cadence(msgspec.Struct, frozen=True):
    """After how many steps each tier synchronises: H_R ≤ H_L ≤ H_B; and how often surrogates are refreshed.

    The defaults are the report's recipe where it has one (router every step, surrogates every 5) and this project's
    choice where it does not (the backbone's 8).

    Attributes:
        router: H_R, in steps.
        latent: H_L.
        backbone: H_B.
        refresh: steps between two refreshes of the surrogates.
        backbone_fragments: parts of the backbone that synchronise apart from each other.
        warm_start: steps at the beginning, a multiple of H_B, in which everything synchronises and is refreshed after
            every step: weights move fastest then, and disagreement of composers never heals entirely.
    """

    router: int = 1
    latent: int = 1
    backbone: int = 8
    refresh: int = 5
    backbone_fragments: int = 1
    warm_start: int = 0

    def __post_init__(self) -> None:
        """Raise `UserError` unless the horizons are in order."""
        if not 1 <= self.router <= self.latent <= self.backbone:
            latent = max(1, self.router, self.latent)
            least = (("router", self.router, 1), ("latent", self.latent, latent), ("backbone", self.backbone, latent))
            wanted = " and ".join(f"moe.{name}_every to at least {n}" for name, found, n in least if found < n)
            raise UserError(
                "routers are merged at least as often as latent projections, and these at least as often as the "
                f"backbone, so that 1 ≤ moe.router_every ≤ moe.latent_every ≤ moe.backbone_every; found {self.router}, "
                f"{self.latent}, {self.backbone}: set {wanted}"
            )
        if self.refresh < 1 or not 1 <= self.backbone_fragments <= self.backbone:
            raise UserError(
                f"moe.refresh_every must be at least 1 and moe.backbone_fragments between 1 and moe.backbone_every = "
                f"{self.backbone}, found {self.refresh} and {self.backbone_fragments}"
            )
        if self.warm_start < 0 or self.warm_start % self.backbone:
            raise UserError(
                f"warm_start must be a multiple of the backbone's horizon {self.backbone}, found {self.warm_start}"
            )

    def of_step(self, number: int) -> Cadence:
        """Return the cadence of step `number` (1 is the first); during a warm start all horizons are 1."""
        if number <= self.warm_start:
            return Cadence(router=1, latent=1, backbone=1, refresh=1)
        return msgspec.structs.replace(self, warm_start=0)

    def horizon(self, tier: Tier) -> int:
        """Steps between two synchronisations of a tier's tensor, after the warm start."""
        return {Tier.ROUTER: self.router, Tier.LATENT: self.latent, Tier.BACKBONE: self.backbone}[tier]

    def due(self, steps_done: int) -> tuple[tuple[Tier, int], ...]:
        """Return the (tier, fragment) pairs to synchronise once `steps_done` steps are done; 1 is the first.

        Backbone fragment j of F is due j · H_B / F steps after fragment 0 would be, so transfers are spread out.
        During a warm start nothing is due: with a horizon of 1 gradients are averaged instead.
        """
        if steps_done <= self.warm_start:
            return ()
        found = [(tier, 0) for tier in (Tier.ROUTER, Tier.LATENT) if steps_done % self.horizon(tier) == 0]
        for fragment in range(self.backbone_fragments):
            shift = fragment * self.backbone // self.backbone_fragments
            if (steps_done - shift) % self.backbone == 0 and steps_done - self.warm_start > shift:
                found.append((Tier.BACKBONE, fragment))
        return tuple(found)

    def refresh_due(self, steps_done: int) -> bool:
        """Whether owners refresh their surrogates now."""
        return steps_done <= self.warm_start or steps_done % self.refresh == 0


def tier_fragments(specs: Sequence[TensorSpec], cadence: Cadence) -> dict[tuple[Tier, int], tuple[str, ...]]:
    """Return the names of every fragment of every tier, for the parameters that are no routed experts."""
    found = {(tier, 0): names for tier in (Tier.ROUTER, Tier.LATENT) if (names := names_of(specs, tier))}
    backbone = [spec for spec in specs if tier_of(spec.name) is Tier.BACKBONE]
    for i, names in enumerate(fragments_by_bytes(backbone, cadence.backbone_fragments)):
        found[Tier.BACKBONE, i] = names
    return found
