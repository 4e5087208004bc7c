"""Keys of reinforcement learning, and checks among the keys of `[rl]`. Needs no JAX."""

from __future__ import annotations

from planetary.core.config import Config
from planetary.core.configuration.honoured import HonouredKeys
from planetary.core.errors import UserError

_OF_NEW_POLICY = ("model.source", "model.options", "model.weights", "model.weights_optional", "data.tokenizer")
_TRAIN = ("rounds", "inner_steps", "batch_size", "sequence_length", "inner_state")
_COMPUTE = ("micro_batches", "precision", "rounding", "f64", "remat")
_FABRIC = (
    "workers",
    "latency_budget_s",
    "abandon_after_s",
    "host",
    "port",
    "backend",
    "target",
    "threads",
    "compilers",
)
_TEXTS = "its tasks are texts, which no round waits for"

STARTED = HonouredKeys(
    kind="reinforcement",
    keys=(
        *("run.*", "optimizer.*", "outer.*", "checkpoint.*", "eval.every", "rl.*", "sinks"),
        *(f"train.{key}" for key in (*_TRAIN, *_COMPUTE)),
        *(f"fabric.{key}" for key in _FABRIC),
    ),
    without={
        "sync.*": "gradients and versions of a policy go through the gateway whole, as float32",
        **dict.fromkeys(("fabric.leases", "fabric.quorum", "fabric.round_deadline_s"), _TEXTS),
        "fabric.island": "a policy computes on one device",
        **dict.fromkeys(("outer.judge", "outer.loss_rise"), "texts are judged by rewards, and verified (rl.verified)"),
        "train.target_minutes": "its length is train.rounds, or rl.goal",
        **dict.fromkeys(_OF_NEW_POLICY, "the policy, with its tokenizer, is that of rl.start"),
        "model.smaller": "its length is train.rounds, and its model has one size",
        "model.roles": "a policy is a function, whose arguments have names",
        "data.*": "its texts are prompts: rl.task, or rl.prompts",
        "eval.batches": "held-out prompts are rl.held_out",
    },
)
"""Of a policy that begins as another model."""
NEW = HonouredKeys(
    kind=STARTED.kind,
    keys=(*STARTED.keys, *_OF_NEW_POLICY),
    without={
        **{key: why for key, why in STARTED.without.items() if key not in (*_OF_NEW_POLICY, "data.*")},
        **{f"data.{key}": STARTED.without["data.*"] for key in ("source", "sources", "text_key", "format", "delivery")},
        **{
            f"data.{key}": STARTED.without["data.*"]
            for key in ("held_out_fraction", "sampling", "shuffle_leases", "max_epochs")
        },
    },
)
"""Of a policy that `[model]` describes."""


def honoured(config: Config) -> HonouredKeys:
    """Return the keys a run of this configuration honours."""
    return STARTED if config.rl.start else NEW


def check_keys(config: Config) -> None:
    """Raise `UserError` for keys that do not fit together."""
    rl = config.rl
    if rl.ahead > rl.lag:
        raise UserError(
            f"rl.ahead = {rl.ahead} samples texts that are {rl.ahead} versions old when they are trained, and rl.lag = "
            f"{rl.lag} allows {rl.lag}: raise rl.lag, or lower rl.ahead"
        )
    if rl.imitated_rounds > config.train.rounds:
        raise UserError(f"rl.imitated_rounds = {rl.imitated_rounds} is more than train.rounds = {config.train.rounds}")
    if rl.imitation_goal and not (rl.imitated_rounds and rl.held_out):
        raise UserError(
            f"rl.imitation_goal = {rl.imitation_goal:g} ends an imitation by the reward of held-out prompts: set "
            "rl.imitated_rounds and rl.held_out, too"
        )
    if rl.imitation_every and not (rl.imitated_rounds and rl.held_out):
        raise UserError(
            f"rl.imitation_every = {rl.imitation_every} evaluates an imitation by held-out prompts: set "
            "rl.imitated_rounds and rl.held_out, too"
        )
    if (rl.objective == "distillation") != bool(rl.teacher):
        raise UserError('rl.teacher and rl.objective = "distillation" belong together: set both, or neither')
    if rl.teacher and rl.kl:
        raise UserError("rl.kl compares with the imitation's end, and rl.teacher with the teacher: set one of them")
    if rl.completions < 2 and rl.objective != "distillation":
        raise UserError(f"rl.completions = {rl.completions}: advantages compare a prompt's completions; 2 at least")
    if config.train.batch_size % config.train.micro_batches:
        raise UserError(
            f"train.batch_size = {config.train.batch_size} texts cannot be divided into train.micro_batches = "
            f"{config.train.micro_batches} equal parts"
        )
