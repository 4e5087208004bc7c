"""How a mixture is trained: the options that `[moe]` and the training of a mixture have in common."""

from __future__ import annotations

from typing import Literal

import msgspec

from planetary.core.configuration.ranges import Count, Index, NotNegative, Share

RefreshForm = Literal["exact", "bf16", "4bit"]
FittedBy = Literal["composers", "expert-workers"]
SketchPrecision = Literal["f32", "4bit"]
UpdateForm = Literal["exact", "bf16", "4bit", "topk"]


class MixtureOptions(msgspec.Struct, frozen=True):
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
