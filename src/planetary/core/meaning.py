"""The result of comparing a model with the framework it was written in."""

from __future__ import annotations

from typing import Literal

import msgspec


class Meaning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How loss and gradients of a model were compared, in its manifest and in the record of a prepared step.

    Attributes:
        author: source of the expected values: the model's own framework, finite differences of the loss for a file
            without one, or "none".
        precision: "f32", "f64", or "conditioning": within the author's own change under a rounding of the parameters.
        batches: number of batches compared.
        worst: largest difference, relative to the largest element of a parameter's gradient.
        parameter: name of the parameter with that difference; "" for none.
        digest: sha256 of the portable artifact that was compared.
        why: reason of an author "none".
    """

    author: Literal["framework", "finite differences", "none"]
    precision: str
    batches: int
    worst: float
    parameter: str
    digest: str
    why: str = ""

    @property
    def summary(self) -> str:
        """A sentence for reports."""
        if self.author == "none":
            return f"loss and gradients are not compared with the model's source: {self.why}"
        source = "its own framework" if self.author == "framework" else self.author
        batches = f"{self.batches} batch" + ("es" if self.batches > 1 else "")
        return (
            f"loss and gradients equal those of {source} ({batches}, {self.precision}, at most {self.worst:.1e} apart)"
        )
