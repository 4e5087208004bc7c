"""The extension points: one registry for each kind of object a configuration names. See `docs/extending.md`.

A kind's interface and classes are in the package that uses them; here they are named only, and imported by the first
look-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planetary.core.registry import Registry

INNER_OPTIMIZERS: Registry[Any] = Registry(
    "inner optimizer",
    "planetary.inner_optimizers",
    "planetary.compiler.step.inner_optimizer:InnerOptimizer",
    ["planetary.compiler.step.inner_optimizers"],
)
SCHEDULES: Registry[Any] = Registry(
    "schedule", "planetary.schedules", "planetary.core.schedules:Curve", ["planetary.core.schedules"]
)
CODECS: Registry[Any] = Registry(
    "codec",
    "planetary.codecs",
    "planetary.sync.codecs.tensor_codec:Codec",
    ["planetary.sync.codecs.*"],
    but=["kernels"],
)

MERGE_RULES: Registry[Any] = Registry(
    "merge rule", "planetary.merge_rules", "planetary.sync.merge:MergeRule", ["planetary.sync.merge"]
)
OUTER_OPTIMIZERS: Registry[Any] = Registry(
    "outer optimizer",
    "planetary.outer_optimizers",
    "planetary.sync.outer_optimizers:OuterOptimizer",
    ["planetary.sync.outer_optimizers"],
)
OVERLAPS: Registry[Any] = Registry(
    "overlap",
    "planetary.overlaps",
    "planetary.runs.rounds.controller.overlap:Overlap",
    ["planetary.runs.rounds.controller.overlap"],
)
TOPOLOGIES: Registry[Any] = Registry(
    "topology",
    "planetary.topologies",
    "planetary.runs.rounds.controller.topology:Topology",
    ["planetary.runs.rounds.controller.star", "planetary.runs.rounds.controller.ring"],
)

JUDGES: Registry[Any] = Registry(
    "judge", "planetary.judges", "planetary.sync.judgement:Judge", ["planetary.sync.judgement"]
)

TASKS: Registry[Any] = Registry(
    "task",
    "planetary.tasks",
    "planetary.runs.rl.environments.tasks:Task",
    ["planetary.runs.rl.environments.tasks"],
    apart=True,
    families={"verifiers": "planetary.runs.rl.environments.verifiers_task:environment_task"},
)

METRICS: Registry[Any] = Registry(
    "metric", "planetary.metrics", "planetary.data.metrics:Metric", ["planetary.data.metrics"]
)

FORMATS: Registry[Any] = Registry(
    "data format",
    "planetary.data_formats",
    "planetary.data.formats.data_format:DataFormat",
    [f"planetary.data.formats.{name}" for name in ("notations", "tables", "archives", "tokens", "chats")],
)

TOOL_FORMATS: Registry[Any] = Registry(
    "tool format",
    "planetary.tool_formats",
    "planetary.runs.serve.http.tools.tool_format:ToolFormat",
    ["planetary.runs.serve.http.tools.families"],
)

FAMILIES: Registry[Any] = Registry(
    "family of published models",
    "planetary.families",
    "planetary.core.configuration.family:Family",
    ["planetary.models.families"],
)
"""By the `model_type` of a `config.json`."""

FRAMEWORKS: Registry[Any] = Registry(
    "framework",
    "planetary.frameworks",
    "planetary.compiler.frontend.framework:Framework",
    ["planetary.compiler.frontend.torch_modules"],
)
"""By the modules that a model's file has."""

WEIGHT_FILES: Registry[Any] = Registry(
    "weight file",
    "planetary.weight_files",
    "planetary.core.configuration.weight_file:WeightFile",
    ["planetary.artifacts.gguf.weight_file"],
)
"""By the ending of a file, so that a user's own is an entry point of a package."""

SINKS: Registry[Any] = Registry(
    "sink", "planetary.sinks", "planetary.monitor.sinks.sink:Sink", ["planetary.monitor.sinks.*"], but=["sink_kinds"]
)
"""By the `kind` of a table of `[[sinks]]`, which has the keys of the class's `options`."""

EXTENSION_POINTS: Mapping[str, Registry[Any]] = {
    registry.kind: registry
    for registry in (
        *(INNER_OPTIMIZERS, SCHEDULES, CODECS, MERGE_RULES, OUTER_OPTIMIZERS, OVERLAPS, TOPOLOGIES, JUDGES),
        *(TASKS, FORMATS, METRICS, TOOL_FORMATS),
    )
}
"""By the kind that a key of the configuration declares."""
