"""The costs of a mixture in floating-point operations, bytes of memory and bytes of traffic (PARALLAX, 5 and 13).

All functions are pure; bytes are bytes (GB in the report are 10⁹), a multiply-add is two operations. Where the report's
formula leaves something out, a second function beside it counts that too, as the docstring says.
"""

from __future__ import annotations

import msgspec

from planetary.core.errors import UserError
from planetary.runs.mixture.config import MixtureOptions
from planetary.runs.mixture.methods.codec import block_width
from planetary.runs.mixture.methods.sketch import Precision

_KEYS = MixtureOptions()
ADAM_BYTES = 16  # per parameter: bf16 value and gradient, float32 master and two moments
HALF = 2  # bytes of a bf16 number


class MoeShape(msgspec.Struct, frozen=True):
    """A model's sizes, as the cost model takes them.

    Attributes:
        layers: that have experts.
        experts: routed ones per layer (N).
        active: chosen per token (k).
        latent: width of an expert's input and output (d_e).
        hidden: width inside an expert (h).
        rank: width inside a surrogate (r); 0: there are none.
        active_params: parameters a token touches, all kinds together.
        expert_params: parameters of all routed experts; 0: computed from the shape.
        router_params, latent_params, backbone_params: of the tiers, for their traffic; all 0: unknown.
        matrices: of an expert, and of a surrogate: 2 of relu², 3 of SwiGLU.
        detach: whether the gradient stops at the surrogates' input.
        ternary: whether experts compute with ternary weights.
    """

    name: str
    layers: int
    experts: int
    active: int
    latent: int
    hidden: int
    rank: int
    active_params: float
    expert_params: float = 0.0
    router_params: float = 0.0
    latent_params: float = 0.0
    backbone_params: float = 0.0
    matrices: int = 2
    detach: bool = True
    ternary: bool = False

    def __post_init__(self) -> None:
        """Raise `UserError` where the shape is no mixture."""
        counts = (self.layers, self.experts, self.active, self.latent, self.hidden, self.matrices)
        if min(counts) < 1 or self.rank < 0:
            raise UserError(f"{self.name}: every size of a mixture is at least 1, found {counts}, rank {self.rank}")
        if self.active > self.experts:
            raise UserError(f"{self.name}: {self.active} active experts per token, but {self.experts} in all")
        if self.active_params < active_expert_params(self):
            raise UserError(
                f"{self.name}: {self.active_params:.4g} active parameters are fewer than those of the active "
                f"experts alone, {active_expert_params(self):.4g}"
            )


def one_expert_params(shape: MoeShape) -> int:
    """Parameters of one expert: 2 d_e h, with SwiGLU 3 d_e h."""
    return shape.matrices * shape.latent * shape.hidden


def all_expert_params(shape: MoeShape) -> float:
    """Parameters of all routed experts: as given, or L N 2 d_e h (13.2), with SwiGLU L N 3 d_e h."""
    return shape.expert_params or shape.layers * shape.experts * one_expert_params(shape)


def active_expert_params(shape: MoeShape) -> int:
    """Parameters of the experts a token touches: L k 2 d_e h (13.2), with SwiGLU L k 3 d_e h."""
    return shape.layers * shape.active * one_expert_params(shape)


def expert_forward_flops(shape: MoeShape) -> int:
    """One token through one expert: 4 d_e h (13.1), with SwiGLU 6 d_e h. Training it costs three times that."""
    return 2 * one_expert_params(shape)


def surrogate_forward_flops(shape: MoeShape) -> int:
    """One token through one surrogate: 4 d_e r (section 5), with SwiGLU 6 d_e r. A detached one needs no backward."""
    return 2 * shape.matrices * shape.latent * shape.rank


def surrogate_share(shape: MoeShape) -> float:
    """Return a composer's operations on a surrogate over those of training the expert: r/(3h) (section 5).

    Without the detach the gradient passes through to the input, which costs another forward pass: 2r/(3h).
    """
    passes = 1 if shape.detach else 2
    return passes * surrogate_forward_flops(shape) / (3 * expert_forward_flops(shape))


def rho_direct(shape: MoeShape, composers: float) -> float:
    """A composer's routed-expert arithmetic over that of ordinary training, owned experts trained (section 5).

    With R owners of every expert a composer owns R/C of them, as if there were C/R composers. So it is for memory.
    """
    return 1 / composers + (1 - 1 / composers) * surrogate_share(shape)


def rho_offload(shape: MoeShape, composers: int) -> float:
    """The same as the report counts it when experts are trained elsewhere: only the owned experts' forward pass."""
    return 1 / (3 * composers) + (1 - 1 / composers) * surrogate_share(shape)


def rho_offload_with_input_gradient(shape: MoeShape, composers: int) -> float:
    """`rho_offload` with the gradient of the owned experts' inputs: 2/(3C) + (1 − 1/C) r/(3h).

    The latent projection below the experts is trained on the composer and needs that gradient, which costs another
    forward pass; only the gradient of the experts' weights goes away.
    """
    return 2 / (3 * composers) + (1 - 1 / composers) * surrogate_share(shape)


def dense_bank(shape: MoeShape, composers: float) -> float:
    """Return the addition of a surrogate bank without dispatch to any of these ratios: all N surrogates per token.

    The report counts the k that are chosen. Two plain matrix products over all N cost N/k as much, and often run
    faster than k gathered ones: r/(3h) becomes N r/(3 k h).
    """
    bank = shape.experts / shape.active - (1 - 1 / composers)
    return bank * surrogate_share(shape)


def train_flops(shape: MoeShape, rho: float = 1.0) -> float:
    """Training one token: six operations per active parameter (13.1, 13.2), experts' times `rho`; 1 is end-to-end.

    That is the arithmetic behind the report's total reductions. Like them it counts the embedding as a matrix product,
    and neither attention between tokens, which grows with the length, nor the optimizer, which no token adds to.
    """
    others = shape.active_params - active_expert_params(shape)
    return 6 * others + 3 * shape.layers * shape.active * expert_forward_flops(shape) * rho


def surrogate_flops(shape: MoeShape, composers: float) -> float:
    """The surrogates' part of a token's training on a composer: of the chosen experts (1 − 1/C) have one."""
    training = 3 * shape.layers * shape.active * expert_forward_flops(shape)
    return training * (1 - 1 / composers) * surrogate_share(shape)


def expert_share(shape: MoeShape) -> float:
    """The routed experts' part of the active parameters, and so of the active arithmetic."""
    return active_expert_params(shape) / shape.active_params


def total_reduction(shape: MoeShape, rho: float) -> float:
    """How many times less active arithmetic in all, when the experts' falls to `rho` and the rest stays."""
    return 1 / (1 - expert_share(shape) * (1 - rho))


def expert_weight_bytes(shape: MoeShape, composers: float) -> float:
    """Experts and surrogates on one composer in bf16: the total times 1/C + (1 − 1/C) r/h (section 5)."""
    held = 1 / composers + (1 - 1 / composers) * shape.rank / shape.hidden
    return HALF * all_expert_params(shape) * held


def expert_state_bytes(shape: MoeShape, composers: float) -> float:
    """Training state of the owned experts on one composer, `ADAM_BYTES` a parameter. None under offload."""
    return ADAM_BYTES * all_expert_params(shape) / composers


def dense_params(shape: MoeShape) -> float:
    """Parameters of everything but the routed experts; 0: unknown."""
    return shape.router_params + shape.latent_params + shape.backbone_params


def dense_state_bytes(shape: MoeShape) -> float:
    """Training state of everything but the routed experts, which every composer has, `ADAM_BYTES` a parameter."""
    return ADAM_BYTES * dense_params(shape)


def all_to_all_bytes(shape: MoeShape, composers: int, batch: int, length: int) -> float:
    """Return the synchronous bytes of ordinary expert parallelism per step: 2 L B S k (1 − 1/C) d_e in bf16 (5.1)."""
    chosen = shape.layers * batch * length * shape.active
    return 2 * chosen * (1 - 1 / composers) * shape.latent * HALF


def surrogate_sync_bytes(shape: MoeShape, composers: int, delta_rank: int) -> float:
    """One wave of rank-q deltas of all surrogates, to C − 1 peers each: L N (C−1)/C · 2 q (d_e + r) in bf16 (13.4).

    Of SwiGLU A is twice as wide: q (2 d_e + 3 r).
    """
    scalars = delta_rank * (2 * shape.latent + shape.matrices * shape.rank)
    return shape.layers * shape.experts * (1 - 1 / composers) * scalars * HALF


def surrogate_full_bytes(shape: MoeShape, composers: int) -> float:
    """The same with whole surrogates, 2 d_e r scalars each, with SwiGLU 3 d_e r. A delta of rank q ≥ d_e r / (d_e + r)
    is no smaller.
    """
    return shape.layers * shape.experts * (1 - 1 / composers) * shape.matrices * shape.latent * shape.rank * HALF


def surrogate_four_bit_bytes(shape: MoeShape, composers: int) -> float:
    """The same with changes of surrogates in four bits, and the scales of their rows (`methods/delta.py`)."""

    def matrix(rows: int, width: int) -> int:
        return rows * (block_width(width)[0] // 2 + 4)

    size = matrix(shape.latent, (shape.matrices - 1) * shape.rank) + matrix(shape.rank, shape.latent)
    return shape.layers * shape.experts * (1 - 1 / composers) * size


def worker_state_bytes(shape: MoeShape) -> int:
    """Training state of one expert on an expert worker: 16 · 2 d_e h (5.2), with SwiGLU 16 · 3 d_e h."""
    return ADAM_BYTES * one_expert_params(shape)


def worker_traffic_bytes(shape: MoeShape) -> float:
    """Return the bytes of every expert's update, there and back: weights and AdamW's two moments in float32.

    A lossy `update_form` makes a third of the way back smaller: moments travel exactly.
    """
    return 2 * 3 * 4 * all_expert_params(shape)


def updated_weights_bytes(shape: MoeShape) -> float:
    """Return the bytes that composers then get: float32 weights, or ternary ones in two bits and a scale a matrix."""
    params = all_expert_params(shape)
    matrices = params / (shape.latent * shape.hidden)
    return params / 4 + 4 * matrices if shape.ternary else 4 * params


def sketch_bytes(shape: MoeShape, tokens: int, *, precision: Precision = _KEYS.precision) -> tuple[int, int]:
    """Activation sketches of one composer and step, at token level; the report does not tabulate them (4.10).

    Args:
        shape: of the model.
        tokens: of the composer in that step, in sketches.
        precision: of the expert inputs and output gradients.

    Returns:
        bytes of the rows' numbers alone; and with the arrays that `sketch.py` stores beside them: expert ids and gates,
        which are float16 beside four-bit rows, and each of these rows' scale.
    """
    rows = shape.layers * tokens
    packed = block_width(shape.latent)[0] // 2
    row_bytes, scale_bytes, gate_bytes = (packed, 4, 2) if precision == "4bit" else (4 * shape.latent, 0, 4)
    numbers = rows * 2 * row_bytes
    id_bytes = 1 if shape.experts <= 256 else 2
    return numbers, numbers + rows * (2 * scale_bytes + shape.active * (id_bytes + gate_bytes))


def tier_bytes(params: float, composers: int, horizon: int, *, width: int = 4) -> float:
    """Up and down traffic of one tier per step at the syncer: every composer publishes and pulls once in `horizon`."""
    if horizon < 1:
        raise UserError(f"a synchronisation horizon is at least 1 step, found {horizon}")
    return 2 * composers * params * width / horizon


def copies_bytes(shape: MoeShape, replicas: int, *, width: int = 4) -> float:
    """Up and down traffic of one merge of all experts' copies at the syncer: each of R owners publishes and pulls."""
    return 2 * replicas * all_expert_params(shape) * width


# The report prints 1.95B and 8.65B active parameters; the tables follow from 1.955e9 and 8.645e9, and from expert
# totals rounded to 19.3e9 and 171.9e9 (the shapes give 19.33e9 and 171.80e9). The test of every cell needs these. Their
# tiers' sizes, which the report does not print, are in `cost_table.py`.
REPORT_20B = MoeShape("20B", 16, 256, 16, 768, 3072, 64, 1.955e9, 19.3e9, ternary=True)
REPORT_176B = MoeShape("176B", 32, 640, 16, 1024, 4096, 48, 8.645e9, 171.9e9, ternary=True)
SHAPES = {"20b": REPORT_20B, "176b": REPORT_176B}
