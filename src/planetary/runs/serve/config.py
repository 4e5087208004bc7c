"""`[serve]`, and the keys that a served model honours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from planetary.core.configuration.honoured import HonouredKeys
from planetary.core.configuration.ranges import (
    Count,
    Index,
    Port,
    Positive,
    ServedBatch,
    Text,
    WeightPrecision,
    extension,
)
from planetary.core.configuration.schema import Config
from planetary.core.configuration.sections import KindSection


class ServeConfig(KindSection, frozen=True):
    """`[serve]`: a trained model behind an HTTP endpoint, in place of a training."""

    section: ClassVar[str] = "serve"
    paths: ClassVar[tuple[str, ...]] = ("model", "models", "adapters", "keys", "chat_template")

    # run folder, checkpoint folder of one, folder of a pretrained model or of
    # `planetary export --serving`, or a StableHLO model; empty: this is a training
    model: str = ""
    name: str = ""  # model name for clients; empty: the folder's name
    # further models at the same endpoint by name, { small = "folder" }: each has workers of its own, and the keys here
    models: dict[str, Text] = msgspec.field(default_factory=dict)
    # changes of the model that clients choose by name, { style = "folder" }: folders of adapters as `peft` has them,
    # and run folders that trained one; they share the model's parameters
    adapters: dict[str, Text] = msgspec.field(default_factory=dict)
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
    # how the model writes calls of tools: "hermes", "llama", "mistral", "generic" (tools are described in the chat's
    # text), or a format of your own; empty: recognised by the chat template
    tool_format: Annotated[str, extension("tool format", "")] = ""
    chat_template: str = ""  # file with a Jinja template in place of the tokenizer's own; empty: that


GRAPH_FILES = (".mlir", ".mlirbc")
GRAPH_IN_FOLDER = "model.mlir"
"""As `compiler.frontend.export` names it in the folder of an exported model."""

_TRAINS = "a served model is not trained"
_OF_MODEL = "the model is that of serve.model"
_OF_GRAPH = ("model.roles", "model.weights", "model.weights_optional", "data.tokenizer")
_FABRIC = ("workers", "latency_budget_s", "host", "port", "backend", "target", "threads")

CODED = HonouredKeys(
    kind="serving",
    keys=("run.name", "run.dir", *(f"fabric.{key}" for key in _FABRIC), "serve.*", "sinks"),
    without={
        "run.seed": "a request says its seed",
        **dict.fromkeys(("model.*", "adapter.*", "data.*"), _OF_MODEL),
        **dict.fromkeys(("train.*", "optimizer.*", "outer.*", "sync.*", "checkpoint.*", "eval.*"), _TRAINS),
        **dict.fromkeys(("fabric.leases", "fabric.quorum", "fabric.round_deadline_s"), _TRAINS),
        "fabric.abandon_after_s": "an endpoint waits for workers for as long as it takes",
        "fabric.island": "a program computes on one device",
    },
)
GRAPH = HonouredKeys(
    kind="serving a graph",
    keys=(*CODED.keys, *_OF_GRAPH),
    without={
        "serve.adapters": "a compiled graph has no layers by name",
        **dict.fromkeys(("model.source", "model.options", "model.smaller", "model.freeze"), _OF_MODEL),
        **{
            f"data.{key}": _TRAINS
            for key in ("source", "sources", "text_key", "format", "held_out_fraction", "dpo_beta")
        },
        **{
            f"data.{key}": _TRAINS
            for key in ("delivery", "sampling", "shuffle_leases", "max_epochs", "columns", "packing", "dpo_beta")
        },
        **{key: why for key, why in CODED.without.items() if key not in ("model.*", "data.*")},
    },
)
"""Of a compiled graph, which comes without tokenizer and names of arguments."""


def honoured(config: Config) -> HonouredKeys:
    """Return the keys that a run of this configuration honours."""
    return GRAPH if is_graph(Path(config.of(ServeConfig).model)) else CODED


def is_graph(model: Path) -> bool:
    """Whether a path is a compiled graph, or the folder of an exported one."""
    return model.suffix in GRAPH_FILES or (model / GRAPH_IN_FOLDER).is_file()
