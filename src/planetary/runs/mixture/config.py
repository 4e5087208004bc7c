"""`[moe]`, and the keys that a mixture honours."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from planetary.core.configuration.honoured import HonouredKeys
from planetary.core.configuration.ranges import Count, Fraction, Index, NotNegative, Positive, Share
from planetary.core.configuration.sections import KindSection

RefreshForm = Literal["exact", "bf16", "4bit"]
FittedBy = Literal["composers", "expert-workers"]
SketchPrecision = Literal["f32", "4bit"]
UpdateForm = Literal["exact", "bf16", "4bit", "topk"]


class MixtureOptions(KindSection, frozen=True):
    """Keys of `[moe]` that `runs.mixture.training.settings.MoeTraining` has unchanged."""

    composers: Index = 0  # C; 0: an ordinary run. `train.batch_size` is then one composer's
    replicas: Count = 1  # owners of every expert; more survive the loss of one, and cost as much more of everything
    rank: Index = 16  # rank of the surrogates; 0: experts of other owners contribute nothing
    delta_rank: Index = 0  # rank of a refresh's change of each surrogate matrix; 0: matrices are sent whole
    # how a refresh travels: surrogates whole, or their changes in fewer bits
    refresh_form: RefreshForm = "exact"
    fitted_by: FittedBy = "composers"  # fitter of surrogates
    detach: bool = True  # stop the gradient at the surrogates' input
    precision: SketchPrecision = "4bit"  # precision of sketches
    sketch_fraction: Share = 1.0  # part of the tokens a sketch keeps
    inner_steps: Count = 1  # steps of an expert worker on one sketch
    trust: NotNegative = 0.0  # λ of the term λ/2 ‖Δ‖² that keeps these steps short
    # how expert updates travel: the error of a lossy form is kept and added to the next one
    update_form: UpdateForm = "exact"
    update_keep: Share = 0.1  # fraction of an update's elements, the largest, that "topk" sends


class MoeConfig(MixtureOptions, frozen=True):
    """`[moe]`: a sparse mixture trained over composers, each of which owns some of the experts."""

    section: ClassVar[str] = "moe"

    expert_workers: Index = 0  # workers for the experts' optimizer steps, from sketches; 0: composers take these steps
    ownership: Literal["round-robin", "hashed", "load-aware"] = "round-robin"  # assignment of experts to composers
    fit_steps: Index = 10  # Adam steps on a surrogate per refresh; 0: only the second matrix is solved again
    # steps between two merges of the routers; 1: after every step that finds the last merge done
    router_every: Count = 2
    latent_every: Count = 2  # steps between two merges of the latent projections
    backbone_every: Count = 8  # steps between two merges of everything else but the experts
    backbone_fragments: Count = 1  # parts of the backbone merged at different steps
    refresh_every: Count = 5  # steps between two fits of an owner's surrogates, and two copies of the owner's state
    sketches: Literal["owner", "all"] = "owner"  # expert workers: of the owner's tokens, or of all composers'
    window: Count = 2  # versions an expert update may lag behind
    norm_ratio: Positive = 0.1  # an update longer than this part of the expert's weights is refused
    spectral_ratio: NotNegative = 0.0  # the same of the largest singular values, per matrix; 0: not looked at
    redundant: Fraction = 0.0  # part of the updates that two expert workers make, who must agree
    audited: Fraction = 0.0  # part of the updates whose claimed gain, and effect on other tokens, is computed again
    # "free": no worker waits, merges and surrogates are taken when they are there; "lockstep": all workers wait for
    # each other, which equals a training in one process bit for bit
    pace: Literal["free", "lockstep"] = "free"
    store: str = ""  # folder or fsspec URL of the payloads; empty: `payloads` in the run's folder

    @property
    def steps_itself(self) -> bool:
        return self.composers > 0

    def mathematics(self) -> dict[str, Any]:
        if not self.composers:
            return {}
        found = {
            key: value for key, value in msgspec.to_builtins(self).items() if key not in {"store", "expert_workers"}
        }
        found["offload"] = self.expert_workers > 0
        if self.replicas == 1:
            del found["replicas"]
        return found


_FABRIC = (
    "workers",
    "quorum",
    "latency_budget_s",
    "abandon_after_s",
    "host",
    "port",
    "backend",
    "target",
    "threads",
)

_EXAMPLES = ("data.columns", "data.packing", "data.dpo_beta")

HONOURED = HonouredKeys(
    kind="mixture",
    keys=(
        *(
            "run.*",
            "model.*",
            "data.*",
            "train.*",
            "optimizer.*",
            "outer.*",
            "moe.*",
            "checkpoint.*",
            "eval.every",
            "eval.batches",
            "sinks",
        ),
        *(f"fabric.{key}" for key in _FABRIC),
    ),
    without={
        "sync.*": "the syncer merges fragments, which are sent as float32",
        **dict.fromkeys(("outer.judge", "outer.loss_rise"), "updates of experts are judged by [moe], and no loss is"),
        "outer.weights": "a fragment is merged by tokens",
        "outer.trimmed": "fragments are merged by directions or means, which cut off no values",
        **dict.fromkeys(("eval.sets", "eval.metrics"), "composers evaluate the held-out part of their data alone"),
        **dict.fromkeys(("eval.patience", "eval.least_gain"), "its length is train.rounds: composers end together"),
        "model.smaller": "its length is train.rounds, and its model has one size",
        "model.roles": "its model is a function, whose arguments have names",
        **dict.fromkeys(_EXAMPLES, "a composer trains on tokens, and on every one of them"),
        **dict.fromkeys(("model.freeze", "adapter.*"), "composers and owners train all parameters"),
        "train.inner_state": "a composer keeps the optimizer's state",
        "train.target_minutes": "its length is train.rounds",
        "train.rounding": "random rounding needs a step number, which composers do not share",
        "fabric.leases": "every composer trains the same number of steps",
        "fabric.round_deadline_s": "the deadlines of a mixture follow from its steps",
        "fabric.island": "a composer computes on one device",
    },
)
