"""The sizes of models with experts, without the models: for a process that only runs the compiled step."""

from __future__ import annotations

from typing import Any, Literal

from planetary.core.errors import UserError
from planetary.models.decoder_config import DecoderConfig, require_heads
from planetary.models.model_options import require_counts, require_multiple

Selection = Literal["rank", "topk"]


class LatentMoeConfig(DecoderConfig, frozen=True, forbid_unknown_fields=True):
    """Sizes of the model and of one batch."""

    n_layer: int = 3  # pairs of an attention and an expert block
    n_head: int = 4
    n_kv_head: int = 4
    n_embd: int = 128
    n_expert: int = 16
    n_active: int = 4  # experts per token
    n_latent: int = 64  # width of an expert's input and output
    projected: bool = True  # projections to that width and back; false: it is the model's own
    n_hidden: int = 256  # width inside an expert
    activation: Literal["relu2", "swiglu"] = "relu2"
    ternary: bool = False  # experts compute with ternary weights
    select: Selection = "topk"
    capacity: float = 0.0  # an expert's most tokens, over an even share; 0: no limit
    share_gates: bool = True  # a token's gates have the sum 1; false: they are the softmax over all experts
    balance: float = 0.01  # weight of the load-balancing loss; 0: none
    batch_size: int = 16

    @property
    def read(self) -> int:
        """Matrices of an expert that read its input: two where a gate multiplies the other's product."""
        return 2 if self.activation == "swiglu" else 1

    def __post_init__(self) -> None:
        """Raise `UserError` where the sizes do not fit together."""
        require_mixture("latent_moe", self)
        if not self.projected and self.n_latent != self.n_embd:
            raise UserError(
                f"latent_moe: without projections experts have the model's width: n_latent={self.n_latent}, "
                f"n_embd={self.n_embd}"
            )
        if self.capacity < 0 or self.balance < 0:
            raise UserError(f"latent_moe: capacity and balance are at least 0, found {self.capacity}, {self.balance}")


class MoeModelConfig(DecoderConfig, frozen=True, forbid_unknown_fields=True):
    """Sizes of the model and of one batch.

    Attributes:
        n_active: experts per token.
        n_hidden: width of one expert.
        balance: weight of the load-balancing loss; 0: none.
        share_gates: a token's gates have the sum 1, as in Mixtral; false: they are the softmax over all experts.
    """

    n_expert: int = 8
    n_active: int = 2
    n_hidden: int = 128
    balance: float = 0.01
    share_gates: bool = True

    def __post_init__(self) -> None:
        """Raise `UserError` where the sizes do not fit together."""
        require_mixture("moe", self)

    @property
    def mixture(self) -> LatentMoeConfig:
        """The same model as one whose experts work in the model's own width."""
        sizes = {name: getattr(self, name) for name in self.__struct_fields__}
        form: dict[str, Any] = {"projected": False, "activation": "swiglu", "select": "rank"}
        return LatentMoeConfig(**sizes, n_latent=self.n_embd, **form)


def require_mixture(model: str, config: LatentMoeConfig | MoeModelConfig) -> None:
    """Raise `UserError` where the sizes of a model with experts do not fit together."""
    require_counts(model, config)
    require_multiple(model, config, "n_head", "n_kv_head")
    require_heads(model, config)
    if config.n_active > config.n_expert:
        raise UserError(
            f"{model}: n_active={config.n_active} experts per token, but n_expert={config.n_expert} in all: set "
            f"n_active to at most {config.n_expert}"
        )
