"""Keys a served model honours."""

from __future__ import annotations

from pathlib import Path

from planetary.core.config import Config
from planetary.core.configuration.honoured import HonouredKeys

GRAPH_FILES = (".mlir", ".mlirbc")
GRAPH_IN_FOLDER = "model.mlir"
"""As `compiler.frontend.export` names it in the folder of an exported model."""

_TRAINS = "a served model is not trained"
_OF_MODEL = "the model is that of serve.model"
_OF_GRAPH = ("model.roles", "model.weights", "model.weights_optional", "data.tokenizer")
_FABRIC = ("workers", "latency_budget_s", "host", "port", "backend", "target", "threads", "compilers")

CODED = HonouredKeys(
    kind="serving",
    keys=("run.name", "run.dir", *(f"fabric.{key}" for key in _FABRIC), "serve.*", "sinks"),
    without={
        "run.seed": "a request says its seed",
        **dict.fromkeys(("model.*", "data.*"), _OF_MODEL),
        **dict.fromkeys(("train.*", "optimizer.*", "outer.*", "sync.*", "checkpoint.*", "eval.*"), _TRAINS),
        **dict.fromkeys(("fabric.leases", "fabric.quorum", "fabric.round_deadline_s"), _TRAINS),
        "fabric.abandon_after_s": "an endpoint waits for workers for as long as it takes",
        "fabric.island": "a program computes on one device",
    },
)
GRAPH = HonouredKeys(
    kind="serving",
    keys=(*CODED.keys, *_OF_GRAPH),
    without={
        **dict.fromkeys(("model.source", "model.options", "model.smaller"), _OF_MODEL),
        **{f"data.{key}": _TRAINS for key in ("source", "sources", "text_key", "format", "held_out_fraction")},
        **{f"data.{key}": _TRAINS for key in ("delivery", "sampling", "shuffle_leases", "max_epochs")},
        **{key: why for key, why in CODED.without.items() if key not in ("model.*", "data.*")},
    },
)
"""Of a compiled graph, which comes without tokenizer and names of arguments."""


def honoured(config: Config) -> HonouredKeys:
    """Return the keys a run of this configuration honours."""
    return GRAPH if is_graph(Path(config.serve.model)) else CODED


def is_graph(model: Path) -> bool:
    """Whether a path is a compiled graph, or the folder of an exported one."""
    return model.suffix in GRAPH_FILES or (model / GRAPH_IN_FOLDER).is_file()
