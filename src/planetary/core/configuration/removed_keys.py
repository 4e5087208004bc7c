"""Keys of earlier versions, with the reasons why they went."""

from __future__ import annotations

from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "optimizer.nesterov": "momentum is always Nesterov's; another one is an inner optimizer of your own "
    "(docs/extending.md)",
    "optimizer.cooldown_fraction": '"wsd" falls over the last fifth of the run; another curve is a schedule of your '
    "own (docs/extending.md)",
    "outer.beta2": "Adam's is 0.99; another one is an outer optimizer of your own (docs/extending.md)",
    "outer.epsilon": "Adam's is 0.01; another one is an outer optimizer of your own (docs/extending.md)",
    "sync.grace_factor": "a quorum waits for the whole spare time, sync.grace_steps at most",
    "fabric.compilers": "the gateway compiles for one target after the other: a compilation uses all cores",
    "moe.outer_rate": "it is outer.learning_rate, with the same default in a mixture",
    "moe.outer_momentum": "it is outer.momentum, with the same default in a mixture",
    "moe.radial": 'it is outer.merge: "rda", the default in a mixture, or "mean"',
    "moe.quorum": "it is fabric.quorum",
    "rl.mask_gap": "it belongs to an objective, which is taken as it is published: rl.objective",
    "rl.drift": "it belongs to an objective, which is taken as it is published: rl.objective",
    "train.f64": "float64 arithmetic of a model is computed in float32, with a note; export the model without it",
}
"""Key -> the reason, and the replacement if there is one."""
