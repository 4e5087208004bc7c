"""Where the optimizer of the experts runs, as one object: on their composer, or offloaded to expert workers.

`MoeTraining.expert_optimizer` is it. *Resident*: a composer's step updates own experts. *Offloaded*: it sends sketches,
expert workers update the experts from them, and the newest versions are streamed back through the gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeVar

V = TypeVar("V")


COMPOSER, EXPERT = "composer", "expert"
"""Operators' names for the roles in a mixture. Either evaluates the assembled model."""


class ExpertOptimizer:
    """The decisions; by default the experts' composer has the optimizer.

    Attributes:
        in_step: whether a composer's own step updates the experts; it then computes with the optimizer's masters.
        functions: functions of the program's part about experts that participants run.
        largest_state: the largest payload of a composer's state, in words.
        roles: of workers, and the parts of the program of which each runs functions.
    """

    in_step: ClassVar[bool] = True
    functions: ClassVar[tuple[str, ...]] = ("update",)
    largest_state: ClassVar[str] = "of a shard"
    roles: ClassVar[Mapping[str, frozenset[str]]] = {COMPOSER: frozenset({"composer", "expert", "whole"})}

    def streamed_layers(self, layers: int) -> range:
        """Return the layers of a model with `layers` whose experts reach composers in versions of their own."""
        return range(0)

    def in_shard(self, experts: Mapping[str, V]) -> Mapping[str, V]:
        """Return the part of the experts, by name, that is saved in a composer's state."""
        return experts


class Offloaded(ExpertOptimizer):
    """On expert workers."""

    in_step: ClassVar[bool] = False
    functions: ClassVar[tuple[str, ...]] = ("gradients", "proxy", "update")
    largest_state: ClassVar[str] = "of everything but the experts, or of one layer's experts"
    roles: ClassVar[Mapping[str, frozenset[str]]] = {
        COMPOSER: frozenset({"composer", "whole"}),
        EXPERT: frozenset({"expert", "whole"}),
    }

    def streamed_layers(self, layers: int) -> range:
        return range(layers)

    def in_shard(self, experts: Mapping[str, V]) -> Mapping[str, V]:
        """Each layer's experts are payloads of their own."""
        return {}


RESIDENT, OFFLOADED = ExpertOptimizer(), Offloaded()
