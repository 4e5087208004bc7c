"""Every key of a configuration file, with type, range, default and meaning.

A key is one line here: reading a file enforces type and range, the default stands beside them, and the comment gives
its meaning and unit.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import msgspec

from planetary.core import decoding
from planetary.core.configuration.ranges import (
    MOST_NAME,
    RELAY,
    ArgumentRole,
    BaseWeights,
    Count,
    Decay,
    Delivery,
    Fraction,
    FragmentCount,
    Index,
    InnerState,
    LeaseOrder,
    LeaseShares,
    NotNegative,
    Port,
    Positive,
    ProperFraction,
    RingPrecision,
    ScheduleName,
    Seed,
    Text,
    TrimmedFraction,
    Weighting,
    extension,
    show_found,
)
from planetary.core.configuration.section import Section, unknown_name
from planetary.core.configuration.sections import KindSection, section_names, section_struct
from planetary.core.configuration.sinks import SinkConfig, sink_tables
from planetary.core.configuration.step_options import INNER_OPTIMIZER, ComputeOptions, InnerOptimizerName, UpdateOptions
from planetary.core.printable import one_line

# Runtime of the training step: a driver of IREE, or XLA through PJRT; "auto": the fastest on each machine
Backend = Literal["auto", "cpu", "cuda", "hip", "vulkan", "metal", "pjrt:cpu", "pjrt:cuda"]
BACKEND_ALIASES = {"rocm": "hip"}
"""Other names of backends: IREE's compiler and PCP say rocm, IREE's runtime hip."""
ALIASES: dict[tuple[str, str], dict[str, str]] = {("fabric", "backend"): BACKEND_ALIASES}
"""By section and key: alternative names of values in a configuration."""
BUILT_IN_TOKENIZERS = ("byte", "char", "u16", "qwen")
"""Values of `data.tokenizer` that are no path."""
FILE_KEYS = ("model.source", "model.weights", "data.source", "data.tokenizer")
"""Keys whose files can be sent along with a configuration."""


class RunConfig(Section, frozen=True):
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


class ModelConfig(Section, frozen=True):
    """`[model]`: the model, as code or as an exported module."""

    # "module:function", "path.py:function", or the path of a .mlir or .mlirbc file, of an exported folder, or of a
    # folder with a pretrained model as `transformers` keeps it
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
    # patterns of names that the file or the model may lack
    weights_optional: tuple[str, ...] = ()
    # patterns of parameter names, such as "wte.*", that are not trained: no gradient, no optimizer state, and they go
    # to a worker once
    freeze: tuple[str, ...] = ()


def is_function(source: str) -> bool:
    """Whether a model source names a function that builds the model, and not a compiled model."""
    return ":" in source and "://" not in source


class AdapterConfig(Section, frozen=True):
    """`[adapter]`: low-rank changes of matrices (LoRA), which are trained in place of the model's parameters."""

    # rank of the change alpha / rank x B A of each adapted matrix; 0: all parameters are trained. The folder of `start`
    # says it where it is not given
    rank: Index = 0
    alpha: Positive = 16.0  # rank times the factor of the changes; not given: that of the folder of `start`
    # patterns of parameter names, or ends of layers' names such as "q_proj"; empty: the linear layers of numbered
    # blocks, or those that the folder of `start` names
    targets: tuple[str, ...] = ()
    base: BaseWeights = (
        "f32"  # form of the untrained matrices of numbered blocks in the step; "int8", "int4": in blocks
    )
    start: str = ""  # folder in the layout of `peft` with the adapters' initial values; empty: drawn, and no change

    @property
    def objection(self) -> str:
        """Why the keys do not fit together; "": they do."""
        if self.rank or self == AdapterConfig():
            return ""
        return "adapter.rank: expected at least 1 with other keys of [adapter], found 0, which adapts nothing"


FormatName = Annotated[str, extension("data format", "")]


PREFERENCE = "preference"
"""The `data.format` of pairs of answers, which another loss than the model's is for."""


class DataSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of several sources: `{ source = "notes/*.md", weight = 0.3 }`."""

    source: Text  # path or URL as in `data.source`
    weight: Positive = 1.0  # share of the training sequences, relative to the other sources' weights
    text_key: str = ""  # key as in `data.text_key`; empty: `data.text_key` itself
    format: FormatName = ""  # format as in `data.format`; empty: `data.format` itself


class DataConfig(Section, frozen=True):
    """`[data]`: the training data, tokenizer and held-out part."""

    # "stdlib", or a path, folder, pattern or URL of text, .jsonl, .json, .csv, parquet, arrow, tar, tokens or .npz, or
    # a data set in a file of yours, "my_data.py:Dataset"
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
    format: FormatName = ""  # kind of the files, such as "chat"; empty: their first bytes decide
    # names of the columns that a batch is made of, for a source with columns of arrays: .npz, .npy, parquet, arrow, or
    # a data set such as "my_data.py:Dataset"; empty: all of an .npz or a data set, and of other files none
    columns: tuple[Text, ...] = ()
    # pairs of answers (format = "preference"): how far a model may move from the first one for a pair's sake, the beta
    # of DPO; smaller is farther
    dpo_beta: Positive = 0.1
    # documents are packed whole into sequences with `segment_ids` and `positions`, for a model that takes them
    packing: bool = False
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
        if self.shuffle_leases and self.sampling != "fifo":
            return (
                f'data.shuffle_leases: only data.sampling = "fifo" has an effect of it, found "{self.sampling}", which '
                "draws the order"
            )
        if self.dpo_beta != DataConfig().dpo_beta and not self.has_pairs:
            return 'data.dpo_beta is for pairs of answers, data.format = "preference"; leave it out'
        if self.has_pairs and not all(one.format == PREFERENCE for one in self.parts):
            return 'data.sources has pairs of answers (format = "preference") and other data beside each other'
        if self.has_pairs and (self.packing or self.has_columns):
            key = "packing" if self.packing else "columns"
            return f"data.{key}: a pair of answers is an example by itself; leave it out"
        if self.columns and self.packing:
            return "data.packing is for texts, and data.columns for arrays: leave one of the two out"
        if len(set(self.columns)) < len(self.columns):
            return f"data.columns names a column twice: {', '.join(self.columns)}"
        if self.packing and self.sampling != "random":
            return (
                f'data.packing: expected data.sampling = "random", found "{self.sampling}": documents are packed in '
                "another order than that of the source"
            )
        for key in ("format", "text_key", "tokenizer"):
            if self.has_columns and (value := getattr(self, key)) != getattr(DataConfig(), key):
                return f'data.{key}: arrays are read by column, which "{value}" has no effect on; leave it out'
        if not self.sources:
            return ""
        if self.has_columns and not self.columns and not all(_gives_columns(one.source) for one in self.sources):
            return "data.sources has columns of arrays and other data beside each other: give one of the two"
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
    def has_columns(self) -> bool:
        """Whether examples are columns of arrays in the source."""
        given = [one.source for one in self.sources] or [self.source]
        return bool(self.columns) or any(map(_gives_columns, given))

    @property
    def has_examples(self) -> bool:
        """Whether the training data is examples of several arrays; tokens otherwise."""
        return self.has_columns or self.packing or self.has_pairs

    @property
    def has_pairs(self) -> bool:
        """Whether examples are pairs of answers, of which one is preferred."""
        return any(one.format == PREFERENCE for one in self.parts)

    @property
    def parts(self) -> tuple[DataSource, ...]:
        """All sources, each with `text_key` and `format`: `sources`, else the one `source`."""
        given = self.sources or (DataSource(self.source),)
        return tuple(
            DataSource(one.source, one.weight, one.text_key or self.text_key, one.format or self.format)
            for one in given
        )


def _gives_columns(source: str) -> bool:
    return source.endswith(".npz") or names_code(source)


def names_code(source: str) -> bool:
    """Whether a source is a data set in a user's file, such as "my_data.py:Dataset"."""
    return re.search(r"\.py:[A-Za-z_]\w*$", source) is not None


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

    name: InnerOptimizerName = INNER_OPTIMIZER  # the kind
    learning_rate: Positive = 3e-3  # peak after the warm-up; "lion" wants a third to a tenth of adamw's
    warmup_steps: Index = 20  # inner steps of linear rise from 0; a run that is shorter warms up for a fifth of it
    # the curve after the warm-up; "wsd": the peak, and a straight line down over the last fifth of the run
    schedule: ScheduleName = "cosine"
    final_fraction: Fraction = 0.1  # fraction of the peak at the end of "cosine", "linear" and "wsd"

    @property
    def objection(self) -> str:
        """Why the keys do not fit together; "": they do."""
        if self.no_decay and not self.weight_decay:
            return "optimizer.no_decay: nothing decays with optimizer.weight_decay = 0; leave it out"
        return ""


OuterOptimizerName = Annotated[str, extension("outer optimizer")]
JudgeName = Annotated[str, extension("judge")]
MergeRuleName = Annotated[str, extension("merge rule")]


class OuterConfig(Section, frozen=True):
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


class FabricConfig(Section, frozen=True):
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
TopologyName = Annotated[str, extension("topology")]
Codec = Annotated[str, extension("codec", "none")]
Broadcast = Annotated[str, extension("codec", "none", RELAY)]
StartCodec = Annotated[str, extension("codec", "none", having="starts_runs")]


class SyncConfig(Section, frozen=True):
    """`[sync]`: how the workers' results of a round become the next parameters."""

    # "star": through the gateway; "ring": the workers reduce their deltas among themselves, and the gateway gets the
    # parameters for checkpoints only
    topology: TopologyName = "star"
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
    # "decoupled": how long a quorum waits for others at most, in inner steps of the fastest worker; it waits for the
    # spare time of `delay`
    grace_steps: NotNegative = 1.0
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


class CheckpointConfig(Section, frozen=True):
    """`[checkpoint]`: when the state is written, and how much of it is kept."""

    every: Count = 1  # rounds
    keep: Count = 2  # newest checkpoints


class EvalConfig(Section, frozen=True):
    """`[eval]`: how the held-out loss is measured."""

    every: Count = 1  # rounds
    batches: Count = 8  # fixed batches of held-out tokens, of each set
    # named sets beside the held-out part of the data, { notes = "notes.txt" }: sources as `data.source`, read with the
    # same `data.format`, `data.text_key` and `data.tokenizer`
    sets: dict[str, Text] = msgspec.field(default_factory=dict)
    # metrics of every set beside the loss: "perplexity", "bits_per_byte", or one of your own that reads no logits
    metrics: tuple[Text, ...] = ()
    patience: Index = 0  # evaluations in a row without a gain after which the run ends; 0: it never ends early
    least_gain: NotNegative = 0.0  # smallest gain, in nats per token below the best held-out loss


SectionT = TypeVar("SectionT", bound=KindSection)


class Config(msgspec.Struct, frozen=True):
    """A whole configuration: `config.train.rounds`, `config.rl.task`.

    Sections and values cannot be changed: `msgspec.structs.replace` makes others, and `planetary.train` takes
    `overrides`. `help(config.train)` lists the keys of a section.
    """

    run: RunConfig = RunConfig()
    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    adapter: AdapterConfig = AdapterConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    outer: OuterConfig = OuterConfig()
    fabric: FabricConfig = FabricConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    sinks: tuple[SinkConfig, ...] = ()  # `[[sinks]]`, as many as there are places
    kinds: dict[str, KindSection] = {}  # sections of kinds of run by name, without those that have their defaults

    if not TYPE_CHECKING:  # a type checker takes `of`; one that knew of this would find no wrong name any more

        def __getattr__(self, name: str) -> Any:
            if name in section_names():
                return self.of(section_struct(name))
            raise unknown_name(
                "Config", name, [field for field in (*self.__struct_fields__, *section_names()) if field != "kinds"]
            )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *section_names()]

    def of(self, section: type[SectionT]) -> SectionT:
        """Return a section that belongs to a kind of run, such as `config.of(RlConfig).task`."""
        found = self.kinds.get(section.section)
        return section() if found is None else cast(SectionT, found)

    def section(self, name: str) -> msgspec.Struct:
        """Return a section by name; of a kind of run only one that is there."""
        return self.kinds[name] if name in self.kinds else getattr(self, name)

    def having(self, section: KindSection) -> Config:
        """Return the configuration with another section of a kind of run."""
        name = section.section
        others = {key: value for key, value in self.kinds.items() if key != name}
        kept = others if section == type(section)() else {**others, name: section}
        return msgspec.structs.replace(self, kinds=kept)

    def tables(self) -> dict[str, Any]:
        """Return the configuration as plain tables: section -> key -> value, as a file has them."""
        tables: dict[str, Any] = msgspec.to_builtins(self)
        own = tables.pop("kinds")
        return {**tables, "sinks": sink_tables(self.sinks), **own}

    @property
    def tokens_per_batch(self) -> int:
        """Tokens read for one inner step: each sequence has one more token than targets, since targets are shifted.

        Of examples of several arrays the number of these, as below.
        """
        return self.train.batch_size * self.block_tokens

    @property
    def block_tokens(self) -> int:
        """Tokens that are read together: those of a sequence, or one example."""
        return 1 if self.data.has_examples else self.train.sequence_length + 1

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
        return self.train.inner_steps * self.targets_per_batch

    @property
    def targets_per_batch(self) -> int:
        """Target tokens of a batch, or examples."""
        return self.train.batch_size * (1 if self.data.has_examples else self.train.sequence_length)

    @property
    def total_inner_steps(self) -> int:
        """Inner steps that one worker takes in the whole run: the length of the learning-rate schedule."""
        return self.train.rounds * self.train.inner_steps

    @property
    def timings(self) -> Timings:
        """All time limits, derived from `fabric.latency_budget_s`."""
        return Timings(self.fabric.latency_budget_s)


def config_from_json(data: bytes | msgspec.Raw) -> Config:
    """Return the configuration that `msgspec.json.encode` wrote, for a child process.

    msgspec alone would read a kind's section as the empty base of all sections.
    """
    plain: dict[str, Any] = msgspec.json.decode(data)
    kinds = {name: decoding.convert(table, section_struct(name)) for name, table in plain.pop("kinds").items()}
    return msgspec.structs.replace(decoding.convert(plain, Config), kinds=kinds)


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
