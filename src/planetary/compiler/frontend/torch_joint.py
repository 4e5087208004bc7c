"""PyTorch's joint graph: loss and gradients as autograd itself computes them, traced while it runs.

It is exact for every forward: custom `autograd.Function`s, hooks, writes where gradients are off.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

from planetary.compiler.frontend.torch_author import called, keep_hooks
from planetary.compiler.frontend.torch_graph import Graph, Kind, export_failed
from planetary.core.errors import UserError


def capture_joint(module: Any, batch: Sequence[Any], trained: Sequence[str], decompositions: Any) -> Graph:
    """Trace a module's loss and gradients for a batch of these shapes, in the mode the module is in.

    Args:
        module: a `torch.nn.Module` on the CPU; it takes the batch and returns a scalar.
        batch: tensors.
        trained: names of the parameters whose gradients are taken.
        decompositions: functions by operator; others stay as they are.

    Returns:
        A graph with one more input than forward has, of the kind `cotangent`.

    Raises:
        UserError: forward or the gradient cannot be traced; the text names the user's line.
    """
    torch: Any = importlib.import_module("torch")
    from torch.fx.experimental.proxy_tensor import make_fx  # pyright: ignore[reportMissingImports]
    from torch.fx.traceback import preserve_node_meta  # pyright: ignore[reportMissingImports]

    values: dict[tuple[Kind, str], Any] = {("parameter", n): p.detach() for n, p in module.named_parameters()}
    values |= {("buffer", n): b.detach() for n, b in module.named_buffers()}
    values |= {("input", str(i)): one for i, one in enumerate(batch)}
    values["cotangent", ""] = torch.ones(())
    buffers = [name for kind, name in values if kind == "buffer"]

    def loss_and_gradients(*flat: Any) -> list[Any]:
        given = dict(zip(values, flat, strict=True))
        state = {n: v.clone() for (kind, n), v in given.items() if kind in ("parameter", "buffer")}
        wrt = [state[name].requires_grad_() for name in trained]
        keep_hooks(module, state)
        loss = called(module, state, [v for (kind, _), v in given.items() if kind == "input"], None)
        gradients = torch.autograd.grad(loss, wrt, given["cotangent", ""].to(loss.dtype), allow_unused=True)
        dense = [
            torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
            for p, g in zip(wrt, gradients, strict=True)
        ]
        return [*(state[name] for name in buffers), loss.detach(), *dense]

    flat = list(values.values())
    math = torch.nn.attention.SDPBackend.MATH
    try:
        with warnings.catch_warnings(), torch.nn.attention.sdpa_kernel(math), _plain_kernels():
            warnings.simplefilter("ignore")
            code = make_fx(loss_and_gradients, tracing_mode="fake", record_stack_traces=True)(*flat)
            _declare_writes(code)
            with preserve_node_meta():
                functional = torch.func.functionalize(torch.fx.Interpreter(code).run)
                code = make_fx(functional, tracing_mode="fake", decomposition_table=dict(decompositions))(*flat)
    except Exception as error:  # any class: of the module's forward, or of torch's tracing
        raise UserError(export_failed(error)) from error
    code.graph.eliminate_dead_code()
    updates = _keep_changed(code, len(buffers))
    return Graph(code, tuple(values), {}, tuple(buffers[i] for i in updates), None, tuple(trained))


def _plain_kernels() -> Any:
    torch: Any = importlib.import_module("torch")

    return torch.backends.mkldnn.flags(enabled=False)  # the operators have no decomposition


def _declare_writes(code: Any) -> None:
    """Replace batch normalisation by the operator whose signature says that it writes the statistics."""
    torch: Any = importlib.import_module("torch")

    aten = torch.ops.aten
    for node in code.graph.nodes:
        if node.op == "call_function" and node.target is aten.native_batch_norm.default:
            x, weight, bias, mean, _, *rest = node.args
            if mean is None:
                node.target, node.args = aten._native_batch_norm_legit.no_stats, (x, weight, bias, *rest)
            else:
                node.target = aten._native_batch_norm_legit.default
    code.recompile()


def _keep_changed(code: Any, buffers: int) -> list[int]:
    """Drop the first results that are inputs unchanged; return the positions of the others."""
    (output,) = [node for node in code.graph.nodes if node.op == "output"]
    results = list(output.args[0])
    changed = [i for i, node in enumerate(results[:buffers]) if _origin(node).op != "placeholder"]
    output.args = ([results[i] for i in changed] + results[buffers:],)
    code.graph.eliminate_dead_code()
    code.recompile()
    return changed


def _origin(node: Any) -> Any:
    same = ("aten.alias.default", "aten.detach.default", "aten.clone.default", "aten.view.default")
    while node.op == "call_function" and str(node.target) in same:
        node = node.args[0]
    return node
