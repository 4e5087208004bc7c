"""The interfaces of the extension points, for files and packages of users; see `docs/extending.md`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planetary.lazy_names import lazy_names

if TYPE_CHECKING:
    from planetary.compiler.frontend.framework import BuiltModel, Framework, ModuleBuilder
    from planetary.compiler.step.inner_optimizer import InnerOptimizer
    from planetary.compiler.step.optimizers import Transform, per_parameter
    from planetary.core.configuration.family import Family
    from planetary.core.configuration.needs import Need
    from planetary.core.configuration.weight_file import WeightFile
    from planetary.core.errors import ProtocolError, UserError
    from planetary.core.schedules import Curve
    from planetary.core.tensors import TensorSpec
    from planetary.data.document import Document
    from planetary.data.files import SourceFile
    from planetary.data.formats.data_format import DataFormat
    from planetary.data.metrics import Metric, ScoredRows
    from planetary.monitor.sinks.sink import Sink
    from planetary.runs.rl.environments.tasks import Problem, Task
    from planetary.runs.rounds.controller.overlap import LeaseStart, Overlap
    from planetary.runs.rounds.controller.star import Star
    from planetary.runs.rounds.controller.topology import Topology
    from planetary.runs.rounds.sessions import Trainer
    from planetary.runs.serve.http.tools.tool_format import Call, ToolFormat, call_of, value_end
    from planetary.sync.codecs.tensor_codec import Codec, check_finite
    from planetary.sync.deltas import Table
    from planetary.sync.judgement import Claim, Judge
    from planetary.sync.merge import MergeRule
    from planetary.sync.outer_optimizers import OuterOptimizer, OuterState, flat_state

_HOMES = {
    "BuiltModel": "planetary.compiler.frontend.framework",
    "Call": "planetary.runs.serve.http.tools.tool_format",
    "Codec": "planetary.sync.codecs.tensor_codec",
    "Claim": "planetary.sync.judgement",
    "Curve": "planetary.core.schedules",
    "DataFormat": "planetary.data.formats.data_format",
    "Document": "planetary.data.document",
    "Family": "planetary.core.configuration.family",
    "Framework": "planetary.compiler.frontend.framework",
    "InnerOptimizer": "planetary.compiler.step.inner_optimizer",
    "Judge": "planetary.sync.judgement",
    "ScoredRows": "planetary.data.metrics",
    "SourceFile": "planetary.data.files",
    "Star": "planetary.runs.rounds.controller.star",
    "Topology": "planetary.runs.rounds.controller.topology",
    "Trainer": "planetary.runs.rounds.sessions",
    "Sink": "planetary.monitor.sinks.sink",
    "Table": "planetary.sync.deltas",
    "LeaseStart": "planetary.runs.rounds.controller.overlap",
    "MergeRule": "planetary.sync.merge",
    "Metric": "planetary.data.metrics",
    "ModuleBuilder": "planetary.compiler.frontend.framework",
    "Need": "planetary.core.configuration.needs",
    "OuterOptimizer": "planetary.sync.outer_optimizers",
    "Problem": "planetary.runs.rl.environments.tasks",
    "OuterState": "planetary.sync.outer_optimizers",
    "Overlap": "planetary.runs.rounds.controller.overlap",
    "ProtocolError": "planetary.core.errors",
    "Task": "planetary.runs.rl.environments.tasks",
    "TensorSpec": "planetary.core.tensors",
    "ToolFormat": "planetary.runs.serve.http.tools.tool_format",
    "Transform": "planetary.compiler.step.optimizers",
    "per_parameter": "planetary.compiler.step.optimizers",
    "UserError": "planetary.core.errors",
    "WeightFile": "planetary.core.configuration.weight_file",
    "call_of": "planetary.runs.serve.http.tools.tool_format",
    "check_finite": "planetary.sync.codecs.tensor_codec",
    "flat_state": "planetary.sync.outer_optimizers",
    "value_end": "planetary.runs.serve.http.tools.tool_format",
}

__all__ = [
    "BuiltModel",
    "Call",
    "Claim",
    "Codec",
    "Curve",
    "DataFormat",
    "Document",
    "Family",
    "Framework",
    "InnerOptimizer",
    "Judge",
    "LeaseStart",
    "MergeRule",
    "Metric",
    "ModuleBuilder",
    "Need",
    "OuterOptimizer",
    "OuterState",
    "Overlap",
    "Problem",
    "ProtocolError",
    "ScoredRows",
    "Sink",
    "SourceFile",
    "Star",
    "Table",
    "Task",
    "TensorSpec",
    "ToolFormat",
    "Topology",
    "Trainer",
    "Transform",
    "UserError",
    "WeightFile",
    "call_of",
    "check_finite",
    "flat_state",
    "per_parameter",
    "value_end",
]

__getattr__ = lazy_names(globals(), _HOMES)
