"""PyTorch modules as functional ATen graphs: PyTorch's own export, without views, writes in place or gradient modes.

What autograd would not follow stays visible: every result of a `no_grad` region, and everything detached, passes
through `aten.detach`. Nothing here imports JAX.
"""

from __future__ import annotations

import importlib
import re
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from planetary.core.errors import UserError

Kind = str
"""Of a graph's input: `parameter`, `buffer`, `constant` or `input`."""


@dataclass(frozen=True)
class Graph:
    """A functional ATen graph of a module's forward.

    Attributes:
        code: `torch.fx.GraphModule`; it returns the new values of `updates`, then the leaves of the module's output,
            and in a joint graph the gradients.
        inputs: kind and name of each placeholder; of an `input`, the position as text.
        constants: values of the inputs of kind `constant`.
        updates: names of the buffers that forward writes, in the order of the results.
        structure: torch's tree specification of the output; None in a joint graph, whose output is the loss.
        gradients: names of the parameters whose gradients are the last results.
    """

    code: Any
    inputs: tuple[tuple[Kind, str], ...]
    constants: dict[str, Any]
    updates: tuple[str, ...]
    structure: Any
    gradients: tuple[str, ...] = ()


class HiddenWriteError(Exception):
    """A tensor is written in place where autograd does not see it."""


def capture(module: Any, batch: Sequence[Any], decompositions: Any) -> Graph:
    """Export a module's forward for a batch of these shapes, in the mode the module is in.

    Args:
        module: a `torch.nn.Module` on the CPU.
        batch: the tensors that forward takes.
        decompositions: functions by operator (`torch._ops.OpOverload`); others stay as they are.

    Raises:
        UserError: the forward cannot be exported; the text names the user's line and a remedy.
        HiddenWriteError: a write in place is hidden from autograd, which keeps the gradient of the value before it.
    """
    torch: Any = importlib.import_module("torch")

    try:
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):  # parts may be torch.compile'd
            warnings.simplefilter("ignore")  # of deprecated parts of torch's own code
            exported = torch.export.export(module, tuple(batch), strict=False)
            _detach_what_is_detached_in_place(exported.graph_module)
            _stop_where_gradients_are_off(exported.graph_module)
            _refuse_hidden_writes(exported.graph_module)
            exported = exported.run_decompositions(decompositions)
    except HiddenWriteError:
        raise
    except Exception as error:  # any class: of the module's forward, or of torch's tracing
        raise UserError(export_failed(error)) from error
    signature = exported.graph_signature
    names = _first_names(module)
    inputs: list[tuple[Kind, str]] = []
    constants: dict[str, Any] = {}
    kinds = {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant", "USER_INPUT": "input"}
    for spec in signature.input_specs:
        kind = kinds.get(spec.kind.name)
        if kind is None:
            raise UserError(
                f"cannot import a PyTorch model: forward uses {spec.target!r}, a {spec.kind.name.lower()}; only "
                "tensors can be part of a compiled step"
            )
        name = str(sum(one == "input" for one, _ in inputs)) if kind == "input" else str(spec.target)
        name = names.get(name, name)
        inputs.append((kind, name))
        if kind == "constant":
            constants[name] = cast("Any", exported.constants[name]).detach()
    updates = []
    for spec in signature.output_specs:
        if spec.kind.name == "BUFFER_MUTATION":
            updates.append(str(spec.target))
        elif spec.kind.name != "USER_OUTPUT":
            raise UserError(
                f"cannot import a PyTorch model: forward changes {spec.target!r} in place, which is an argument or a "
                "parameter; change a copy (`clone()`) of it"
            )
    return Graph(exported.graph_module, tuple(inputs), constants, tuple(updates), exported.call_spec.out_spec)


def _first_names(module: Any) -> dict[str, str]:
    """Return the name under which `named_parameters` and `named_buffers` have each tensor, by each name."""
    firsts = {id(one): name for name, one in (*module.named_parameters(), *module.named_buffers())}
    tied = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: firsts[id(one)] for name, one in tied}


def _detach_what_is_detached_in_place(code: Any) -> None:
    """Write `detach_` as `detach`, whose result takes the place of the tensor from there on."""
    torch: Any = importlib.import_module("torch")

    order = {node: position for position, node in enumerate(code.graph.nodes)}
    for node, place in order.items():
        if node.op == "call_function" and node.target is torch.ops.aten.detach_.default:
            node.target = torch.ops.aten.detach.default
            node.args[0].replace_all_uses_with(node, lambda user, place=place: order[user] > place)
    code.recompile()


def _stop_where_gradients_are_off(code: Any, off: bool = False) -> None:
    """Inline the regions that change the gradient mode; where it is off, every result is detached."""
    torch: Any = importlib.import_module("torch")

    graph = code.graph
    if off:
        for node in list(graph.nodes):
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                if _is_write(node.target) and not _is_made_here(node.args[0]):
                    raise HiddenWriteError(line_of(node))
                _detach_after(graph, node)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        enabled, inner, *arguments = node.args
        body = getattr(code, inner.target)
        _stop_where_gradients_are_off(body, not enabled)
        with graph.inserting_before(node):
            values = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), arguments, strict=True))
            for one in body.graph.nodes:
                if one.op == "get_attr":
                    name = f"{inner.target}_{one.target}"
                    setattr(code, name, getattr(body, one.target))
                    values[one] = graph.get_attr(name)
                    values[one].meta = dict(one.meta)
                elif one.op == "call_function":
                    values[one] = graph.node_copy(one, values.__getitem__)
            (results,) = next(n for n in body.graph.nodes if n.op == "output").args
        for user in list(node.users):
            user.replace_all_uses_with(values[results[user.args[1]]])
            graph.erase_node(user)
        graph.erase_node(node)
    code.recompile()


def _refuse_hidden_writes(code: Any) -> None:
    """Raise `HiddenWriteError` for a write into a tensor that shares memory with a tensor before a `detach`."""
    torch: Any = importlib.import_module("torch")

    for node in code.graph.nodes:
        if node.op == "call_function" and _is_write(node.target):
            written = node.args[0]
            while getattr(written, "op", "") == "call_function" and _is_view(written.target):
                if written.target is torch.ops.aten.detach.default:
                    raise HiddenWriteError(line_of(node))
                written = written.args[0]


def _is_made_here(node: Any) -> bool:
    """Whether a tensor's memory is made in the node's graph, not passed in."""
    while node.op == "call_function" and _is_view(node.target):
        node = node.args[0]
    return node.op == "call_function"


def _is_write(target: Any) -> bool:
    return bool(getattr(getattr(target, "_schema", None), "is_mutable", False))


def _is_view(target: Any) -> bool:
    """Whether a result of an operator shares memory with the first argument."""
    returns = getattr(getattr(target, "_schema", None), "returns", ())
    return any(one.alias_info is not None for one in returns)


def _detach_after(graph: Any, node: Any) -> None:
    torch: Any = importlib.import_module("torch")

    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return
    with graph.inserting_after(node):
        stopped = graph.call_function(torch.ops.aten.detach.default, (node,))
    stopped.meta = dict(node.meta)
    node.replace_all_uses_with(stopped, delete_user_cb=lambda user: user is not stopped)


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_LIBRARIES = re.compile(r"[/\\](torch|torchax|jax|planetary)[/\\]|^<|importlib")


def line_of(node: Any) -> str:
    """Return `file:line` of the user's code a node comes from, or the module's path in the model."""
    frames = [(file, int(line)) for file, line, _ in _FRAME.findall(node.meta.get("stack_trace") or "")]
    own = [frame for frame in frames if not _LIBRARIES.search(frame[0])] or frames
    if own:
        return f"{own[-1][0]}:{own[-1][1]}"
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    return f"the module {modules[-1][0]}" if modules else "an unknown line"


def _users_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _LIBRARIES.search(f.filename) and Path(f.filename).exists()]
    if own:
        return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}"
    inside = [f for f in frames if "/torch/nn/" in f.filename] or list(frames)
    return f"{inside[-1].filename}:{inside[-1].lineno} in {inside[-1].name}"


ONE_GRAPH = (
    "a compiled step has one graph for every batch, so no Python value, branch or shape may depend on the values of a "
    "tensor: use torch.where, a mask or a fixed number of elements instead of `if`, `.item()`, nonzero or boolean "
    "indexing"
)
_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"data-dependent|DataDependent|unbacked|\.item\(\)|_local_scalar_dense|nonzero",
        ONE_GRAPH,
    ),
    (r"fake tensor in the exported program", "use torch.no_grad() instead of torch.inference_mode()"),
    (r"leaf Variable that requires grad", "change a copy (`clone()`) of the parameter"),
    (r"pytree|output.*type|Unsupported", "let forward take and return tensors, or structures of them"),
)


def export_failed(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0].strip() if lines else ""
    everything = f"{type(error).__name__} {error}"
    remedy = next(
        (advice for pattern, advice in _REMEDIES if re.search(pattern, everything)),
        "see https://docs.pytorch.org/docs/stable/export.html; torch.export.export(module, batch, strict=False) "
        "raises the same",
    )
    return (
        f"cannot import a PyTorch model: PyTorch cannot export forward at {_users_line(error)}: "
        f"{type(error).__name__}: {text[:300]}; {remedy}"
    )


def tensors_of(batch: Sequence[Any]) -> list[Any]:
    """Return tensors of their own for the arrays of a batch. Raises `UserError` for anything but arrays of numbers."""
    torch: Any = importlib.import_module("torch")

    found = []
    for i, array in enumerate(batch):
        try:
            found.append(torch.from_numpy(np.array(array, order="C")))
        except TypeError as error:
            raise UserError(f"cannot import a PyTorch model: item {i} of the example batch: {error}") from error
    return found
