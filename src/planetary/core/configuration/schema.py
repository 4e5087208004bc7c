"""Every key of a configuration file, with type, range, default and meaning.

A key is one line here: reading a file enforces type and range, the default stands beside them, and the comment gives
its meaning and unit.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

from planetary.core.configuration.mixture_options import MixtureOptions
from planetary.core.configuration.ranges import (
    INNER_OPTIMIZER,
    MOST_NAME,
    RELAY,
    ArgumentRole,
    Count,
    Decay,
    Delivery,
    Fraction,
    FragmentCount,
    Index,
    InnerOptimizer,
    InnerState,
    LeaseOrder,
    LeaseShares,
    NotNegative,
    Port,
    Positive,
    ProperFraction,
    RateDecay,
    RingPrecision,
    ScheduleKind,
    Seed,
    ServedBatch,
    Share,
    Text,
    TrimmedFraction,
    Weighting,
    WeightPrecision,
    extension,
    show_found,
)
from planetary.core.configuration.sinks import SinkConfig
from planetary.core.configuration.step_options import ComputeOptions, UpdateOptions
from planetary.core.printable import one_line

# Runtime of the training step: a driver of IREE, or XLA through PJRT; "auto": the fastest on each machine
Backend = Literal["auto", "cpu", "cuda", "hip", "vulkan", "metal", "pjrt:cpu", "pjrt:cuda"]
BACKEND_ALIASES = {"rocm": "hip"}
"""Other names of backends: IREE's compiler and PCP say rocm, IREE's runtime hip."""
ALIASES: dict[tuple[str, str], dict[str, str]] = {("fabric", "backend"): BACKEND_ALIASES}
"""By section and key: alternative names of values in a configuration."""


class RunConfig(msgspec.Struct, frozen=True):
    """`[run]`: the name and place of the run."""

    name: str = ""  # name of the run's folder; empty: the name of the configuration file without the ending
    dir: Text = "runs"  # folder that holds the run folders, relative to the current folder
    seed: Seed = 0  # seed of all random draws: initial parameters, data order and everything else

    @property
    def objection(self) -> str:
        """Why the keys do not fit together, or with a file system; "": they do."""
        name, parts = self.name, {"/", "\\"}
        is_path = name in {".", ".."} or bool(parts & set(name))
        if is_path or one_line(name) != name or len(name.encode()) > MOST_NAME:
            return (
                f"run.name: expected the name of one folder, found {show_found(name)}; the place of the run folders is "
                "run.dir"
            )
        return ""


class ModelConfig(msgspec.Struct, frozen=True):
    """`[model]`: the model, as code or as an exported module."""

    # "module:function", "path.py:function", or the path of a .mlir or .mlirbc file, of an exported folder, or of a
    # folder with a pretrained GPT-2, Llama or Qwen as `transformers` keeps it
    source: Text = "planetary.models.nanochat:build"
    options: dict[str, Any] = msgspec.field(default_factory=dict)  # keyword arguments of the function
    # those of a smaller model, which a run with `train.target_minutes` takes where even the fewest rounds of the model
    # would take longer; the run's `config.toml` has the options it chose, and none here
    smaller: dict[str, Any] = msgspec.field(default_factory=dict)
    # argument name -> role, for a bare .mlir whose arguments are not "parameters, then two of data"
    roles: dict[str, ArgumentRole] = msgspec.field(default_factory=dict)
    # path of a safetensors file whose tensors replace the initial values of the same name, or of a pretrained model's
    # folder; empty: none
    weights: str = ""
    # name patterns that may be missing from that file, or be there without the model knowing them
    weights_optional: tuple[str, ...] = ()


class DataSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of several sources: `{ source = "notes/*.md", weight = 0.3 }`."""

    source: Text  # path or URL as in `data.source`
    weight: Positive = 1.0  # share of the training sequences, relative to the other sources' weights
    text_key: str = ""  # key as in `data.text_key`; empty: `data.text_key` itself
    format: str = ""  # format as in `data.format`; empty: `data.format` itself


class DataConfig(msgspec.Struct, frozen=True):
    """`[data]`: the training data, tokenizer and held-out part."""

    # "stdlib", or a path, folder, pattern or URL of text, .jsonl, .json, .csv, parquet, arrow, tar or tokens
    source: Text = "stdlib"
    # several sources in place of one, mixed by weight: [{ source = "stdlib", weight = 0.7 }, { source = "notes/*.md",
    # weight = 0.3 }]; a table may have its own `text_key`
    sources: tuple[DataSource, ...] = ()
    # "byte"; "char": the sorted characters of the data; "u16": the source is raw 16-bit tokens, whatever its name; or
    # the path of a `tokenizer.json`
    tokenizer: Text = "byte"
    # the field or column that holds the text of a record; "a.b" is the field b of a. In a tar: "txt" or ".caption" is
    # the members with that ending, "json.caption" a field of the .json members
    text_key: Text = "text"
    # kind of the files: "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "tar", "u8", "u16", "u32" or "npy";
    # empty: their first bytes decide
    format: str = ""
    held_out_fraction: ProperFraction = 0.05  # share of the data that is never trained on
    # "path": workers open the token file themselves (shared disk or URL); "gateway": tokens travel with the
    # task
    delivery: Delivery = "path"
    # "random": sequences drawn from everywhere; "fifo": in the order of the source, from start to end; "sequence": in
    # the order of the source within a lease, and leases from everywhere
    sampling: LeaseOrder = "random"
    shuffle_leases: bool = False  # "fifo": draw the order of leases from the second epoch on
    max_epochs: Index = (
        0  # passes over the training data; they end the run, however many workers take part. 0: no limit
    )

    @property
    def objection(self) -> str:
        """Why the keys do not fit together; "": they do."""
        if not self.sources:
            return ""
        if self.source != DataConfig().source:
            return (
                f"data.source and data.sources are both given: put {self.source} among the sources, or leave one of "
                "the two out"
            )
        if self.sampling != "random":
            return (
                f'data.sampling: expected "random" with data.sources, found "{self.sampling}": a mixture has no '
                "order of its own"
            )
        names = [one.source for one in self.sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            return f"data.sources names {twice[0]} twice: give it once, with the sum of its weights"
        if not all(math.isfinite(one.weight) for one in self.sources):
            return "data.sources: expected weights that are finite numbers > 0"
        return ""

    @property
    def parts(self) -> tuple[DataSource, ...]:
        """All sources, each with `text_key` and `format`: `sources`, else the one `source`."""
        given = self.sources or (DataSource(self.source),)
        return tuple(
            DataSource(one.source, one.weight, one.text_key or self.text_key, one.format or self.format)
            for one in given
        )


class TrainConfig(ComputeOptions, frozen=True):
    """`[train]`: how long, and in which portions."""

    rounds: Count = 12  # outer steps; with `[rl]` versions of the policy, those of the imitation included
    # above 0: `planetary train` sets rounds and warm-up so that the whole command takes about so long on this machine,
    # unless the rounds are given; the run's `config.toml` has the chosen values, and 0 here. Not for a mixture
    target_minutes: NotNegative = 0.0
    inner_steps: Count = 30  # H: inner steps of each worker in one round
    # sequences in a batch of one worker; 0, and with a compiled model the default: as that model takes them
    batch_size: Index = 8
    sequence_length: Index = 128  # target tokens in a sequence; 0 as of batch_size
    inner_state: InnerState = "persist"  # the optimizer's state at the start of a round

    @property
    def objection(self) -> str:
        """Why the keys do not fit together; "": they do."""
        if self.batch_size % self.micro_batches:
            return (
                f"train.micro_batches: expected a divisor of train.batch_size ({self.batch_size}), found "
                f"{self.micro_batches}: the parts of a batch must be equal"
            )
        return ""


class OptimizerConfig(UpdateOptions, frozen=True):
    """`[optimizer]`: the inner optimizer, which is part of the compiled step."""

    name: InnerOptimizer = INNER_OPTIMIZER  # the kind
    learning_rate: Positive = 3e-3  # peak after the warm-up; "lion" wants a third to a tenth of adamw's
    warmup_steps: Index = 20  # inner steps of linear rise from 0; a run that is shorter warms up for a fifth of it
    schedule: ScheduleKind = "cosine"  # the curve after the warm-up
    final_fraction: Fraction = 0.1  # fraction of the peak at the end of "cosine", "linear" and "wsd"
    cooldown_fraction: ProperFraction = 0.2  # last fraction of the run, in which "wsd" falls


OuterOptimizerName = Annotated[str, extension("outer optimizer")]
JudgeName = Annotated[str, extension("judge")]
MergeRuleName = Annotated[str, extension("merge rule")]


class OuterConfig(msgspec.Struct, frozen=True):
    """`[outer]`: the outer step the training controller takes.

    A configuration without `optimizer`, `learning_rate`, `momentum` and `merge` gets 1.0, 0.0 and "rda" where it has
    fewer than 1,000 rounds, in lock-step; with "adam", `learning_rate` is 0.03 where it is not given, and
    `momentum` 0.0 in so short a run. The run's `config.toml` has the chosen values.
    """

    # of the merged delta: "nesterov", or "adam" with moments corrected for bias, whose state takes one more copy of the
    # parameters. Not with sync.overlap = "eager", nor with a relayed broadcast
    optimizer: OuterOptimizerName = "nesterov"
    # of the step along the workers' merged deltas; "adam": about how far a coordinate moves in a round, at most 0.5
    learning_rate: Positive = 0.7
    momentum: Decay = 0.9  # Nesterov's; 0: plain averaging (outer SGD); "adam": of the mean of the deltas
    beta2: Decay = 0.99  # "adam": of the mean of their squares
    epsilon: Positive = 1e-2  # "adam": added to the root of that mean, in units of a delta
    # how the workers' end parameters become one set: "mean" by tokens; "rda": the mean length in the mean direction,
    # per tensor (radial-directional averaging); or a rule that a few liars cannot move far
    # "senders": the mean over those who sent a number, for sync.compression = "sparse"
    merge: MergeRuleName = "mean"
    # weight of a contribution in "mean" and "rda": "tokens", or "tokens_squared": tokens² / inner steps
    weights: Weighting = "tokens"
    trimmed: TrimmedFraction = 0.2  # "trimmed_mean": part of the values left out at each end, of every coordinate
    # which contributions count: "others": those whose delta is about as long as the others' and points their way;
    # "none": all. The ring merges among the workers, and judges nothing
    judge: JudgeName = "others"
    # part by which a held-out loss may exceed the best before the run goes back to that; 0: only if it is NaN
    loss_rise: NotNegative = 0.25


class FabricConfig(msgspec.Struct, frozen=True):
    """`[fabric]`: the machines."""

    workers: Count = 2  # workers that take part; a local run starts this many
    quorum: Count = 1  # contributions that close a round after the deadline
    latency_budget_s: Positive = 2.0  # how long a healthy peer may take to answer; all time limits derive from it
    round_deadline_s: NotNegative = 0.0  # 0: derived from the observed time per inner step
    # a run without any connected worker fails after this, one whose workers were drained or moved after 24 times as
    # long; 0: never
    abandon_after_s: NotNegative = 600.0
    host: Text = "127.0.0.1"  # address the gateway listens on for workers
    port: Port = 0  # TCP port the gateway listens on for workers; 0: any free one
    # a driver of IREE, or XLA ("pjrt:…"); "auto": the fastest on each machine; "rocm" is "hip"
    backend: Backend = "cpu"
    # the target of the compiled step: "host" (this machine's CPU; on a GPU a chip that most later ones are compatible
    # with), "baseline", "x86-64-v3", or a chip such as "sm_80" or "gfx942", for an unknown one of which the code of the
    # nearest older one is taken; PJRT compiles on the worker
    target: Text = "host"
    island: Count = 1  # devices of one worker, which run every step together; above 1 for PJRT only
    threads: Index = 0  # CPU threads per worker; 0: the workers of one machine share the cores
    compilers: Count = 1  # targets the gateway compiles for at once
    # "equal": every worker trains train.inner_steps a round; "measured": as many as the worker's speed gives, so all
    # end at once, train.inner_steps on average; at a round's deadline trained steps count
    leases: LeaseShares = "equal"

    @property
    def objection(self) -> str:
        """Why the keys do not fit together; "": they do."""
        if self.quorum > self.workers:
            return (
                f"fabric.quorum: expected at most fabric.workers ({self.workers}), found {self.quorum}: such a round "
                "could never be closed by its quorum"
            )
        return ""


OverlapName = Annotated[str, extension("overlap")]
Codec = Annotated[str, extension("codec", "none")]
Broadcast = Annotated[str, extension("codec", "none", RELAY)]
StartCodec = Annotated[str, extension("codec", "none", having="starts_runs")]


class SyncConfig(msgspec.Struct, frozen=True):
    """`[sync]`: how the workers' results of a round become the next parameters."""

    # "star": through the gateway; "ring": the workers reduce their deltas among themselves, and the gateway gets the
    # parameters for checkpoints only
    topology: Literal["star", "ring"] = "star"
    # the next round is trained while one is reduced. "eager" starts it from the newest parameters and the worker's own
    # part of the round under way (in the star with `compression`); "streaming", in the star, goes on from where the
    # worker is, and synchronises one of the `fragments` a round; "decoupled" is streaming in which `fabric.quorum`
    # workers and a grace time close a round, and other leases go on; "async" starts from parameters of one outer step
    # before, for comparison
    overlap: OverlapName = "none"
    # "streaming": parts of the parameters, balanced by bytes. A round of `train.inner_steps` ends with one of them, so
    # each is synchronised every fragments x inner_steps
    fragments: FragmentCount = 1
    delay: Index = 0  # "streaming": inner steps of the next round after which the merged fragment is taken
    mixing: Decay = 0.0  # "streaming": part of a worker's own values it keeps then
    grace_factor: NotNegative = 1.0  # "decoupled": part of the spare time of `delay` a quorum waits for others
    grace_steps: NotNegative = 1.0  # "decoupled": that it waits at most, in inner steps of the fastest worker
    # "star": codec of workers' updates. "none": end parameters, exact; else their deltas: "float32", "bf16", "int8",
    # "int4", "fp4" (E3M0), "sign" (one bit, after a rotation), or "sparse" (SparseLoCo: the largest of each chunk in
    # two bits). The error of a codec is sent later
    compression: Codec = "none"
    # "star": codec of the versions sent to workers. "none": all parameters; else the change since a worker's version,
    # for workers that send deltas; "relay": the other workers' updates as they came, from which each takes the outer
    # step itself, so nothing is lost
    broadcast_compression: Broadcast = "none"
    # "star": codec of the initial parameters, for workers that send deltas; the run begins from the decoded values
    start_compression: StartCodec = "none"
    precision: RingPrecision = "f32"  # "ring": of the deltas on their way; the star's sums are f64
    connections: Count = 2  # "ring": TCP streams to the next worker; more help where one stream is limited
    # "ring": "joined": in the order in which the workers came; "measured": by bandwidth and round trip of all links,
    # measured whenever other workers take part
    ring_order: Literal["joined", "measured"] = "joined"
    ring_compression: Literal["none", "int4", "int8", "int16"] = "none"  # "ring": of the deltas on their way
    port: Port = 0  # "ring": that the gateway leads the ring on; 0: any


class MoeConfig(MixtureOptions, frozen=True):
    """`[moe]`: a sparse mixture trained over composers, each of which owns some of the experts."""

    expert_workers: Index = 0  # workers for the experts' optimizer steps, from sketches; 0: composers take these steps
    ownership: Literal["round-robin", "hashed", "load-aware"] = "round-robin"  # assignment of experts to composers
    fit_steps: Index = 10  # Adam steps on a surrogate per refresh; 0: only the second matrix is solved again
    # steps between two merges of the routers; 1: after every step that finds the last merge done
    router_every: Count = 2
    latent_every: Count = 2  # steps between two merges of the latent projections
    backbone_every: Count = 8  # steps between two merges of everything else but the experts
    backbone_fragments: Count = 1  # parts of the backbone merged at different steps
    refresh_every: Count = 5  # steps between two fits of an owner's surrogates, and two copies of the owner's state
    outer_rate: Positive = 1.0  # learning rate of the outer Nesterov step after a merge, in place of `[outer]`
    outer_momentum: Decay = 0.0  # momentum of the outer Nesterov step
    radial: bool = True  # merge lengths and directions apart; false: plain weighted means
    sketches: Literal["owner", "all"] = "owner"  # expert workers: of the owner's tokens, or of all composers'
    window: Count = 2  # versions an expert update may lag behind
    norm_ratio: Positive = 0.1  # an update longer than this part of the expert's weights is refused
    spectral_ratio: NotNegative = 0.0  # the same of the largest singular values, per matrix; 0: not looked at
    redundant: Fraction = 0.0  # part of the updates that two expert workers make, who must agree
    audited: Fraction = 0.0  # part of the updates whose claimed gain, and effect on other tokens, is computed again
    # "free": no worker waits, merges and surrogates are taken when they are there; "lockstep": all workers wait for
    # each other, which equals a training in one process bit for bit
    pace: Literal["free", "lockstep"] = "free"
    quorum: Count = 1  # publications that suffice to merge a fragment once the grace time is over
    store: str = ""  # folder or fsspec URL of the payloads; empty: `payloads` in the run's folder


class CheckpointConfig(msgspec.Struct, frozen=True):
    """`[checkpoint]`: when the state is written, and how much of it is kept."""

    every: Count = 1  # rounds
    keep: Count = 2  # newest checkpoints


class EvalConfig(msgspec.Struct, frozen=True):
    """`[eval]`: how the held-out loss is measured."""

    every: Count = 1  # rounds
    batches: Count = 8  # fixed batches of held-out tokens


class ServeConfig(msgspec.Struct, frozen=True):
    """`[serve]`: a trained model behind an HTTP endpoint, in place of a training."""

    # run folder, checkpoint folder of one, folder of a pretrained GPT-2, Llama or Qwen or of
    # `planetary export --serving`, or a StableHLO model; empty: this is a training
    model: str = ""
    name: str = ""  # model name for clients; empty: the folder's name
    host: Text = "127.0.0.1"  # address of the endpoint; others than loopback need `keys`
    port: Port = 8000  # TCP port of the endpoint; 0: any
    # file of keys, a line "NAME KEY" each, of which a request needs one (Authorization: Bearer KEY); empty: none
    keys: str = ""
    # origins of web pages that may use the endpoint beside those of this machine, separated by commas, such as
    # "https://chat.example.org"; "*": all
    origins: str = ""
    follow: bool = False  # serve every newer checkpoint of the run as soon as it exists
    # the longest text, prompt included, in tokens; 0: as long as the model was trained for, within 8,192 and the cache
    context: Index = 0
    batch: ServedBatch = 8  # texts a worker continues at once
    queue: Count = 256  # texts that may wait for a worker; further ones are refused (429)
    cache_mb: Positive = 256.0  # memory of each worker for keys and values, in MiB; decoding copies up to as much again
    cache_precision: Literal["f32", "bf16"] = "f32"  # element type of keys and values
    # form of the parameters: in fewer bits they take less memory; they are widened where they are used
    weights: WeightPrecision = "f32"
    # which experts a mixture's run is served with: real, surrogates in place of all, or composer:N, that composer's own
    # and surrogates for the others
    experts: str = "real"
    chat_template: str = ""  # file with a Jinja template in place of the tokenizer's own; empty: that


class SiteEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of a hub's sites: `{ name = "paris", data = "own", most_share = 0.5 }`."""

    name: Text  # site name, as in the site's `federation.site`
    role: Literal["trainer", "standby"] = "trainer"  # "standby": gets every version, and contributes nothing
    # "part": the site trains an exclusive part of the hub's data; "own": data the hub does not have
    data: Literal["part", "own"] = "part"
    every_rounds: Index = 0  # rounds of this site between two contributions; 0: as `federation.every_rounds`
    most_share: Share = 1.0  # largest fraction of the weights of a merge with several sites
    trust: Literal["full", "judged"] = "full"  # "judged": a contribution counts only if the others' are similar
    # of its line to the hub: a round waits for it as much longer as the parameters take both ways; 0: not known
    mbit_per_s: NotNegative = 0.0
    # number of the site's part of the hub's data, from 1; 0: the site's place among those with a part. A site that
    # replaces another one has the same number
    part: Index = 0


class FederationConfig(msgspec.Struct, frozen=True):
    """`[federation]`: a hub and its sites, each a gateway with workers."""

    # hub only: the sites that may join: [{ name = "paris" }, { name = "tokyo" }]; empty: this is no hub
    sites: tuple[SiteEntry, ...] = ()
    every_rounds: Count = 1  # hub only: a site's rounds between two contributions
    # hub only: parts of the data, one for each site with a part; 0: as many as `sites` has. More leave room for sites
    # that are added later
    parts: Index = 0
    hub: str = ""  # site only: "HOST:PORT" of the hub; empty: the site trains alone
    site: str = ""  # site only: name at the hub; empty: the name of the run
    run: str = ""  # site only: job to take part in, where the hub has several runs; empty: the only one
    token_file: str = ""  # site only: path of the hub's invite; empty: no TLS, for loopback only
    # site only: how long it waits between two rounds for a hub that does not answer, before it goes on alone
    patience_s: NotNegative = 60.0

    @property
    def objection(self) -> str:
        """Why the keys do not fit together; "": they do."""
        if self.sites and self.hub:
            return (
                f"federation: sites makes this a hub and hub = {self.hub!r} a site of another one: leave one of the "
                "two out"
            )
        names = [site.name for site in self.sites]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            return f"federation.sites names {twice[0]} twice"
        divided = [site for site in self.sites if site.data == "part"]
        parts = max(sum(not site.part for site in divided), *(site.part for site in divided), 0)
        if 0 < self.parts < parts:
            return (
                f"federation.parts: expected at least {parts}, one for each site that trains a part of the data, found "
                f"{self.parts}"
            )
        return ""


class RlConfig(msgspec.Struct, frozen=True):
    """`[rl]`: reinforcement learning of a policy, in place of a training on data. A round makes one version of it."""

    # "reverse", "add", "sort", "countdown", or "module:name" or "file.py:name" of a reward function or of a class of
    # dialogues; empty: this is no reinforcement learning
    task: str = ""
    # file of prompts (.jsonl, .csv, parquet) with the field "prompt", maybe "answer", and the reward's fields; empty:
    # a built-in task makes them
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
    decay: RateDecay = "constant"  # decay of that learning rate, down to 0 after the last round
    imitated_rounds: Index = 0  # rounds at the start that train on groups x completions answers each
    # mean reward of held-out prompts that ends the imitation before `imitated_rounds`, looked at every
    # `imitation_every` rounds; 0: none does
    imitation_goal: Fraction = 0.0
    imitation_every: Index = 0  # rounds between two evaluations of the imitation; 0: `eval.every`
    lag: Index = 2  # largest policy lag: how many versions old the sampling weights may be
    ahead: Index = 0  # rounds whose texts are sampled before the round before them is trained; `lag` at most
    # groups whose rewards are all equal: "drop": left out of their round; "keep": trained; "replace": others are
    # sampled, up to three times as many as a round has; "objective": as it is published
    equal: Literal["objective", "drop", "keep", "replace"] = "objective"
    clip_low: NotNegative = 0.0  # ratios below 1 - this have no gradient; 0: the objective's own
    clip_high: NotNegative = 0.0  # ratios above 1 + this have none; 0: the objective's own
    mask_gap: NotNegative = 0.0  # a token whose probability moved by more than this is left out; 0: the objective's own
    drift: NotNegative = 0.0  # coefficient of the squared logarithm of the ratio; 0: the objective's own
    kl: NotNegative = 0.0  # coefficient of the KL divergence from the policy at the end of the imitation; 0: none
    teacher: str = ""  # folder as `start`, of a model with the same parameters and tokens; "distillation"
    held_out: Index = 64  # prompts that are evaluated every `eval.every` rounds and never trained on
    goal: Fraction = 0.0  # mean reward of held-out prompts that ends the run; 0: none does
    judges: Count = 2  # processes that run the environment
    judge_seconds: Positive = 5.0  # time limit of the environment for one completion
    judge_mb: Positive = 2048.0  # memory of one of these processes, in MiB
    verified: Fraction = 0.05  # part of the sampled texts the gateway computes again
    tolerance: Positive = 0.02  # largest difference of log-probabilities, nats
    cache_mb: Positive = 256.0  # memory of each worker for keys and values, in MiB; decoding copies up to as much again


class Config(msgspec.Struct, frozen=True):
    """A whole configuration."""

    run: RunConfig = RunConfig()
    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    outer: OuterConfig = OuterConfig()
    fabric: FabricConfig = FabricConfig()
    sync: SyncConfig = SyncConfig()
    moe: MoeConfig = MoeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    serve: ServeConfig = ServeConfig()
    federation: FederationConfig = FederationConfig()
    rl: RlConfig = RlConfig()
    sinks: tuple[SinkConfig, ...] = ()  # `[[sinks]]`, as many as there are places

    @property
    def tokens_per_batch(self) -> int:
        """Tokens read for one inner step: each sequence has one more token than targets, since targets are shifted."""
        return self.train.batch_size * (self.train.sequence_length + 1)

    @property
    def tokens_per_slice(self) -> int:
        """Tokens of one slice: those of one worker in one round, if all are equally fast."""
        return self.train.inner_steps * self.tokens_per_batch

    @property
    def leases_per_slice(self) -> int:
        """Leases that such a slice is divided into: one, or one for each inner step where speeds are measured."""
        return 1 if self.fabric.leases == "equal" else self.train.inner_steps

    @property
    def targets_per_slice(self) -> int:
        """Target tokens of one slice: the number a loss is averaged over and a contribution weighted by."""
        return self.train.inner_steps * self.train.batch_size * self.train.sequence_length

    @property
    def total_inner_steps(self) -> int:
        """Inner steps that one worker takes in the whole run: the length of the learning-rate schedule."""
        return self.train.rounds * self.train.inner_steps

    @property
    def timings(self) -> Timings:
        """All time limits, derived from `fabric.latency_budget_s`."""
        return Timings(self.fabric.latency_budget_s)


class Timings(msgspec.Struct, frozen=True):
    """Every time limit of the fabric, in seconds, as a multiple of the one latency budget.

    The budget is how long a healthy peer may take to answer on this network under load. Raise it on slow or
    crowded machines; nothing else needs tuning. Limits on work (an inner step, a round) are not here: they
    come from observed times.
    """

    latency_budget_s: float

    @property
    def heartbeat_s(self) -> float:
        """Each side sends at least one frame in this time: four chances to be heard within a budget."""
        return self.latency_budget_s / 4

    @property
    def silent_after_s(self) -> float:
        """A side silent for this long is lost: a full budget plus the newest heartbeat."""
        return self.latency_budget_s * 1.25

    @property
    def connect_s(self) -> float:
        """For opening a connection and finishing the handshake: two round trips and a slow accept queue."""
        return self.latency_budget_s * 4

    @property
    def grace_s(self) -> float:
        """How long a round keeps the lease of a lost worker for one that comes back: a restart, then a
        handshake.
        """
        return self.latency_budget_s * 2

    @property
    def ring_gather_s(self) -> float:
        """How long a worker waits for the others in the ring, and for the next piece from the neighbour."""
        return self.latency_budget_s * 10

    @property
    def startup_grace_s(self) -> float:
        """How long the first round waits for the other workers once one is ready: they start one after the
        other and load the step.
        """
        return self.latency_budget_s * 10

    @property
    def restart_first_s(self) -> float:
        """Pause before the first restart of a failed worker."""
        return self.latency_budget_s / 20

    @property
    def restart_limit_s(self) -> float:
        """Longest pause before a restart; pauses double until they reach it."""
        return self.latency_budget_s * 15

    @property
    def stagger_s(self) -> float:
        """Pause between the starts of two workers on one machine."""
        return self.latency_budget_s / 8

    @property
    def shutdown_s(self) -> float:
        """How long processes get to end by themselves before they are killed."""
        return self.latency_budget_s
