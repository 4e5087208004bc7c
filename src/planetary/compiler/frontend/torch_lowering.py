"""A functional ATen graph as a function of JAX arrays: operators of `torch_operators`, then of torchax's table."""

from __future__ import annotations

import importlib
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from planetary.compiler.frontend.torch_graph import ONE_GRAPH, Graph, line_of
from planetary.compiler.frontend.torch_operators import DRAWS, OPERATORS
from planetary.core.errors import CompileError, PlanetaryError, UserError

_NOTHING = ("aten._assert_tensor_metadata", "aten._assert_scalar", "aten._assert_async", "aten.sym_constrain_range")


def kept_operators() -> list[Any]:
    """Return the operators (`OpOverload`) that are lowered as they are, not through PyTorch's decomposition."""
    torch: Any = importlib.import_module("torch")

    found = []
    for name in (*OPERATORS, *DRAWS):
        packet, _, overload = name.removeprefix("aten.").rpartition(".")
        one = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if one is not None:
            found.append(one)
    return found


def decompositions() -> Any:
    """Return PyTorch's decomposition of each operator not lowered as it is."""
    torch: Any = importlib.import_module("torch")
    from torch._decomp import decomposition_table  # pyright: ignore[reportMissingImports]
    from torchax.ops import ops_registry  # pyright: ignore[reportMissingImports]

    table: Any = torch.export.default_decompositions()
    known = ops_registry.all_aten_ops
    for one, function in decomposition_table.items():
        packet = getattr(one, "overloadpacket", None)
        if (
            packet is not None
            and one.namespace == "aten"
            and one not in table
            and one not in known
            and packet not in known
        ):
            table[one] = function
    for one in (torch.ops.aten.detach.default, *kept_operators()):
        table.pop(one, None)
    return table


def check_operators(graph: Graph) -> None:
    """Raise `UserError` for the first operator of a graph without a lowering; the text names the line."""
    for node in graph.code.graph.nodes:
        if node.op == "call_function":
            if _depends_on_values(node):
                what = f"{_name(node).replace('aten.', 'aten::', 1)} at {line_of(node)}"
                raise UserError(f"cannot import a PyTorch model: {what} depends on the values of a tensor; {ONE_GRAPH}")
            _implementation(node)


def _depends_on_values(node: Any) -> bool:
    """Whether a node's shape, or a Python number, depends on the values of tensors."""
    torch: Any = importlib.import_module("torch")

    value = node.meta.get("val")
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    if isinstance(value, symbols) or str(node.target) in ("aten._local_scalar_dense.default", "aten.nonzero.default"):
        return True
    if str(node.target) == "aten.index.Tensor":
        chosen = [one.meta.get("val") for one in node.args[1] if one is not None]
        return any(getattr(one, "dtype", None) in (torch.bool, torch.uint8) for one in chosen)
    return isinstance(value, torch.Tensor) and any(isinstance(n, symbols) for n in value.shape)


def run(
    graph: Graph, values: Mapping[tuple[str, str], Any], key: Any = None, *, results: Sequence[int] | None = None
) -> list[Any]:
    """Compute a graph on JAX arrays.

    Args:
        graph: of `capture`.
        values: by kind and name of the graph's inputs; constants may be left out.
        key: a JAX random key, if the graph draws random numbers.
        results: positions of the results to return; None: all. Nothing else is computed.

    Raises:
        CompileError: an operator cannot be computed in JAX; the text names operator and line.
    """
    nodes = list(graph.code.graph.nodes)
    (outputs,) = nodes[-1].args
    chosen = list(outputs) if results is None else [outputs[i] for i in results]
    needed = set()
    pending = [node for node in chosen if hasattr(node, "op")]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    found: dict[Any, Any] = {}
    inputs = iter(graph.inputs)
    drawn = 0
    with warnings.catch_warnings():
        # PyTorch wants 64-bit indices; JAX keeps them in 32 bits and says so each time.
        warnings.filterwarnings("ignore", message=".*requested dtype.*int64")
        warnings.filterwarnings("ignore", message=".*requested dtype.*float64")
        for node in nodes[:-1]:
            if node.op == "placeholder":
                kind, name = next(inputs)
                if node in needed:
                    value = values.get((kind, name))
                    found[node] = array_of(graph.constants[name]) if value is None else jnp.asarray(value)
            elif node.op == "get_attr":
                found[node] = _attribute(graph.code, node.target)
            elif node in needed:
                function, draws = _implementation(node)
                if draws:
                    if key is None:
                        raise UserError(_without_key(node))
                    function = _with_key(function, jax.random.fold_in(key, drawn))
                    drawn += 1
                found[node] = _call(node, function, found)
            elif node.op == "call_function" and _draws(node):
                drawn += 1  # the numbers of a draw do not depend on which results are asked for
    return [found[one] if hasattr(one, "op") else one for one in chosen]


def array_of(tensor: Any) -> np.ndarray:
    """Return a torch tensor's values as a host array; bfloat16 as `ml_dtypes` has it."""
    import ml_dtypes

    torch: Any = importlib.import_module("torch")

    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:
        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy().copy()


def _attribute(code: Any, path: str) -> Any:
    value = operator.attrgetter(path)(code)
    return array_of(value) if hasattr(value, "detach") else value


def _with_key(function: Callable[..., Any], key: Any) -> Callable[..., Any]:
    return lambda *args, **options: function(key, *args, **options)


def _name(node: Any) -> str:
    return str(node.target)


def _implementation(node: Any) -> tuple[Callable[..., Any], bool]:
    """Return the function of a node and whether it takes a random key first. Raises `UserError` naming the line."""
    torch: Any = importlib.import_module("torch")
    from torchax.ops import ops_registry  # pyright: ignore[reportMissingImports]

    target, name = node.target, _name(node)
    if not isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        if callable(target) and getattr(target, "__module__", "") in ("_operator", "math", "builtins"):
            return target, False
        raise UserError(_unsupported(node, f"the higher-order operator {name}"))
    if name.rpartition(".")[0] in _NOTHING:
        return lambda *_, **__: None, False
    if _draws(node):
        return DRAWS[name], True
    if name in OPERATORS:
        return OPERATORS[name], False
    entry = ops_registry.all_aten_ops.get(target) or ops_registry.all_aten_ops.get(target.overloadpacket)
    if entry is None or not entry.is_jax_function or entry.needs_env:
        raise UserError(_unsupported(node, f"the operator {name.replace('aten.', 'aten::', 1)}"))
    return entry.func, False


def _draws(node: Any) -> bool:
    """Whether a node draws random numbers that matter: a dropout of probability 0, or in evaluation, does not."""
    name = _name(node)
    if name == "aten.scaled_dot_product_attention.default":
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0))
    if name == "aten.native_dropout.default":
        return node.args[1] != 0 and (len(node.args) < 3 or bool(node.args[2]))
    if name == "aten.rrelu_with_noise_functional.default":
        return len(node.args) > 4 and bool(node.args[4])
    return name in DRAWS


def draws_of(graph: Graph) -> list[Any]:
    """Return the nodes of a graph that draw random numbers."""
    return [node for node in graph.code.graph.nodes if node.op == "call_function" and _draws(node)]


def _unsupported(node: Any, what: str) -> str:
    return (
        f"cannot import a PyTorch model: {what} at {line_of(node)} has no form in JAX; write that line with other "
        "operators (docs/models.md)"
    )


def _without_key(node: Any) -> str:
    return (
        f"cannot import a PyTorch model: {_name(node).replace('aten.', 'aten::', 1)} at {line_of(node)} draws random "
        "numbers, and this call gives no random key; give one, or put the module into evaluation mode (module.eval())"
    )


def _call(node: Any, function: Callable[..., Any], found: Mapping[Any, Any]) -> Any:
    from torch.fx.node import map_arg  # pyright: ignore[reportMissingImports]

    args, options = map_arg((node.args, node.kwargs), found.__getitem__)
    try:
        value = function(*args, **options)
    except PlanetaryError:
        raise
    except Exception as error:  # any class: of torchax or JAX
        text = str(error).strip().partition("\n")[0][:200]
        raise CompileError(
            f"cannot import a PyTorch model: {_name(node).replace('aten.', 'aten::', 1)} at {line_of(node)} cannot be "
            f"computed in JAX: {type(error).__name__}: {text}; write that line with other operators (docs/models.md)"
        ) from error
    return _as_declared(node, value, node.meta.get("val"))


def _as_declared(node: Any, value: Any, declared: Any) -> Any:
    """Return a node's value in the type that PyTorch says; raise `CompileError` if it has another shape."""
    torch: Any = importlib.import_module("torch")
    from torchax.ops import mappings  # pyright: ignore[reportMissingImports]

    if isinstance(declared, list | tuple) and isinstance(value, list | tuple):
        return tuple(
            one if other is None else _as_declared(node, one, other)
            for one, other in zip(value, [*declared, *[None] * len(value)], strict=False)
        )
    if not isinstance(declared, torch.Tensor) or not hasattr(value, "dtype"):
        return value
    tensor: Any = declared
    if tuple(jnp.shape(value)) != tuple(tensor.shape):
        raise CompileError(
            f"cannot import a PyTorch model: {_name(node).replace('aten.', 'aten::', 1)} at {line_of(node)} has the "
            f"shape {list(jnp.shape(value))} in JAX, and {list(tensor.shape)} in PyTorch; write that line with other "
            "operators (docs/models.md)"
        )
    wanted = jax.dtypes.canonicalize_dtype(mappings.t2j_dtype(tensor.dtype))
    doubled = wanted == jnp.float32 and value.dtype == jnp.float64  # the whole graph in double precision
    return value if value.dtype == wanted or doubled else value.astype(wanted)
