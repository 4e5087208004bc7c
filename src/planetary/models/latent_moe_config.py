"""The sizes of a LatentMoE model, without the model: for a process that only runs the compiled step."""

from __future__ import annotations

from typing import Literal

import msgspec

from planetary.core.errors import UserError
from planetary.models.model_options import require_counts, require_multiple

Selection = Literal["rank", "topk"]


class LatentMoeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the model and of one batch."""

    n_layer: int = 3  # pairs of an attention and an expert block
    n_head: int = 4
    n_kv_head: int = 4
    n_embd: int = 128
    n_expert: int = 16
    n_active: int = 4  # experts per token
    n_latent: int = 64  # width of an expert's input and output
    n_hidden: int = 256  # width inside an expert
    activation: Literal["relu2", "swiglu"] = "relu2"
    ternary: bool = False  # experts compute with ternary weights
    select: Selection = "topk"
    capacity: float = 0.0  # tokens per expert over an even share; 0: every expert for every token, none dropped
    balance: float = 0.01  # weight of the load-balancing loss; 0: none
    rope_base: float = 10_000.0
    vocab_size: int = 256
    sequence_length: int = 128
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `UserError` where the sizes do not fit together."""
        require_counts("latent_moe", self)
        require_multiple("latent_moe", self, "n_head", "n_kv_head")
        require_multiple("latent_moe", self, "n_embd", "n_head", times=2)
        if self.n_active > self.n_expert:
            raise UserError(
                f"latent_moe: n_active={self.n_active} experts per token, but n_expert={self.n_expert} in all: set "
                f"n_active to at most {self.n_expert}"
            )
        if self.capacity < 0 or self.balance < 0:
            raise UserError(f"latent_moe: capacity and balance are at least 0, found {self.capacity}, {self.balance}")
