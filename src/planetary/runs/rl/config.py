"""`[rl]`, the keys of reinforcement learning, and checks among them. Needs no JAX."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from planetary.core.configuration.honoured import HonouredKeys
from planetary.core.configuration.ranges import Count, Fraction, Index, NotNegative, Positive, ScheduleName, extension
from planetary.core.configuration.schema import Config
from planetary.core.configuration.sections import KindSection
from planetary.core.errors import UserError


class RlConfig(KindSection, frozen=True):
    """`[rl]`: reinforcement learning of a policy, in place of a training on data. A round makes one version of it."""

    section: ClassVar[str] = "rl"
    paths: ClassVar[tuple[str, ...]] = ("prompts", "start", "teacher")

    # the rewarded task: six letters "reverse"d, two numbers "add"ed, six digits "sort"ed, a number to be made
    # ("countdown"), "verifiers:ENV" with the package of an environment of the library verifiers, or a task of your own;
    # empty: this is no reinforcement learning
    task: Annotated[str, extension("task", "")] = ""
    # file of prompts (.jsonl, .csv, parquet) with the field "prompt" or chats with "messages", maybe "answer", and the
    # reward's fields; empty: the task makes them
    prompts: str = ""
    # run folder, checkpoint folder of one, or folder of a pretrained model the policy starts as; empty: as `[model]`
    # says
    start: str = ""
    # "importance": rewards minus the group's mean, importance-weighted, without tokens that have moved far already;
    # "grpo", "dr-grpo", "dapo": as published; "topr": as "dapo", for texts that are several versions old;
    # "distillation": tokens that `teacher` finds likelier than the policy
    objective: Literal["importance", "grpo", "dr-grpo", "dapo", "topr", "distillation"] = "importance"
    groups: Count = 16  # prompts of a round
    completions: Count = 8  # completions per prompt
    max_tokens: Count = 32  # length limit of a completion
    learning_rate: Positive = 3e-4  # learning rate after the imitation; `[optimizer]` has the imitation's
    decay: ScheduleName = "constant"  # decay of that learning rate, down to 0 after the last round
    imitated_rounds: Index = 0  # rounds at the start that train on groups x completions answers each
    # mean reward of held-out prompts' likeliest answers that ends the imitation before `imitated_rounds`, looked at
    # every `imitation_every` rounds; 0: none does
    imitation_goal: Fraction = 0.0
    imitation_every: Index = 0  # rounds between two evaluations of the imitation; 0: `eval.every`
    lag: Index = 2  # largest policy lag: how many versions old the sampling weights may be
    ahead: Index = 0  # rounds whose texts are sampled before the round before them is trained; `lag` at most
    # groups whose rewards are all equal: "drop": left out of their round; "keep": trained; "replace": others are
    # sampled, up to three times as many as a round has; "objective": as it is published
    equal: Literal["objective", "drop", "keep", "replace"] = "objective"
    clip_low: NotNegative = 0.0  # ratios below 1 - this have no gradient; 0: the objective's own
    clip_high: NotNegative = 0.0  # ratios above 1 + this have none; 0: the objective's own
    kl: NotNegative = 0.0  # coefficient of the KL divergence from the policy at the end of the imitation; 0: none
    teacher: str = ""  # folder as `start`, of a model with the same parameters and tokens; "distillation"
    held_out: Index = 64  # prompts that are evaluated every `eval.every` rounds and never trained on
    goal: Fraction = 0.0  # mean reward of held-out prompts' sampled answers that ends the run; 0: none does
    judges: Count = 2  # processes that run the environment
    judge_seconds: Positive = 5.0  # time limit of the environment for one completion
    judge_mb: Positive = 2048.0  # memory of one of these processes, in MiB
    verified: Fraction = 0.05  # part of the sampled texts the gateway computes again
    tolerance: Positive = 0.02  # largest difference of log-probabilities, nats
    cache_mb: Positive = 256.0  # memory of each worker for keys and values, in MiB; decoding copies up to as much again

    def mathematics(self) -> dict[str, Any]:
        if not self.task:
            return {}
        found = {key: value for key, value in msgspec.to_builtins(self).items() if key not in _LEFT_OUT}
        return found | {key: re.split(r"[/\\]", found[key])[-1] for key in ("task", "prompts", "start", "teacher")}


_LEFT_OUT = {"goal", "judges", "judge_seconds", "judge_mb", "verified", "tolerance", "cache_mb", "held_out"}
"""Keys that do not change the mathematics of a run."""

_OF_NEW_POLICY = ("model.source", "model.options", "model.weights", "model.weights_optional", "data.tokenizer")
_TRAIN = ("rounds", "inner_steps", "batch_size", "sequence_length", "inner_state")
_COMPUTE = ("micro_batches", "precision", "rounding", "remat")
_FABRIC = (
    "workers",
    "latency_budget_s",
    "abandon_after_s",
    "host",
    "port",
    "backend",
    "target",
    "threads",
)
_TEXTS = "its tasks are texts, which no round waits for"

STARTED = HonouredKeys(
    kind="reinforcement from rl.start",
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
        "model.freeze": "a policy's functions take all parameters as they are trained",
        "adapter.*": "adapters are of the model that model.source names: name the folder there, and not in rl.start",
        "data.*": "its texts are prompts: rl.task, or rl.prompts",
        "eval.batches": "held-out prompts are rl.held_out",
        **dict.fromkeys(("eval.sets", "eval.metrics"), "its evaluation is the reward of held-out prompts"),
        **dict.fromkeys(("eval.patience", "eval.least_gain"), "rewards of few prompts are noise; rl.goal ends a run"),
    },
)
"""Of a policy that begins as another model."""
NEW = HonouredKeys(
    kind="reinforcement",
    keys=(*STARTED.keys, *_OF_NEW_POLICY, *(f"adapter.{key}" for key in ("rank", "alpha", "targets", "start"))),
    without={
        "adapter.base": "workers sample with the whole matrices, in float32",
        **{key: why for key, why in STARTED.without.items() if key not in (*_OF_NEW_POLICY, "adapter.*", "data.*")},
        **{f"data.{key}": STARTED.without["data.*"] for key in ("source", "sources", "text_key", "format", "delivery")},
        **{
            f"data.{key}": STARTED.without["data.*"]
            for key in ("held_out_fraction", "sampling", "shuffle_leases", "max_epochs", "columns", "packing")
        },
        "data.dpo_beta": STARTED.without["data.*"],
    },
)
"""Of a policy that `[model]` describes."""


def honoured(config: Config) -> HonouredKeys:
    """Return the keys that a run of this configuration honours."""
    return STARTED if config.of(RlConfig).start else NEW


def check_keys(config: Config) -> None:
    """Raise `UserError` for keys that do not fit together."""
    rl = config.of(RlConfig)
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
    if rl.teacher and config.adapter.rank:
        raise UserError("rl.teacher is a model without adapters, as the policy has to be: leave out [adapter]")
    if rl.teacher and rl.kl:
        raise UserError("rl.kl compares with the imitation's end, and rl.teacher with the teacher: set one of them")
    if rl.completions < 2 and rl.objective != "distillation":
        raise UserError(f"rl.completions = {rl.completions}: advantages compare a prompt's completions; 2 at least")
    if config.train.batch_size % config.train.micro_batches:
        raise UserError(
            f"train.batch_size = {config.train.batch_size} texts cannot be divided into train.micro_batches = "
            f"{config.train.micro_batches} equal parts"
        )
