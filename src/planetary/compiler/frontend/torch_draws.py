"""Random numbers of PyTorch's own forward, drawn from a key of JAX: those of the compiled step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from planetary.compiler.frontend.torch_operators import DRAWS
from planetary.core.errors import UserError

KEY_TYPE = "threefry2x32"  # type of a training step's keys

_IN_PLACE = {
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.exponential_.default": "aten.exponential.default",
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.uniform_.default": "aten.uniform.default",
}


def draws_from(words: np.ndarray) -> AbstractContextManager[Any]:
    """Return a context in which operators of PyTorch draw their random numbers as a compiled step does.

    The n-th draw has the key with n folded in.

    Args:
        words: of the key, uint32 [2].
    """
    torch: Any = importlib.import_module("torch")
    from torch.utils._python_dispatch import TorchDispatchMode  # pyright: ignore[reportMissingImports]

    key, drawn = jax.random.wrap_key_data(jax.numpy.asarray(words, np.uint32), impl=KEY_TYPE), 0

    def next_key() -> Any:
        nonlocal drawn
        drawn += 1
        return jax.random.fold_in(key, drawn - 1)

    class Draws(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            options = kwargs or {}
            name = str(func)
            if torch.Tag.nondeterministic_seeded not in func.tags or _is_idle(name, args):
                return func(*args, **options)
            if name in _IN_PLACE:
                return args[0].copy_(_tensor(_drawn(DRAWS[_IN_PLACE[name]], next_key(), args, options), args[0].dtype))
            if name == "aten.rrelu_with_noise.default":
                y, noise = _drawn(DRAWS["aten.rrelu_with_noise_functional.default"], next_key(), args, options)
                args[1].copy_(_tensor(noise, args[1].dtype))
                return _tensor(y, args[0].dtype)
            if name not in DRAWS:
                raise UserError(f"{name} draws random numbers that no compiled step draws")
            found = _drawn(DRAWS[name], next_key(), args, options)
            kind = options.get("dtype") or next((a.dtype for a in args if isinstance(a, torch.Tensor)), None)
            return tuple(_tensor(one, None) for one in found) if isinstance(found, tuple) else _tensor(found, kind)

    return Draws()


def _is_idle(name: str, args: Any) -> bool:
    return name == "aten.native_dropout.default" and (args[1] == 0 or not args[2])


def _drawn(function: Callable[..., Any], key: Any, args: Any, options: Any) -> Any:
    torch: Any = importlib.import_module("torch")

    plain = [np.asarray(a.detach()) if isinstance(a, torch.Tensor) else a for a in args]
    named = {name: one for name, one in options.items() if name != "generator"}
    # In double precision a step's numbers stay those of single precision.
    return function(key, *(jax.numpy.asarray(a, np.float32) if _is_wide(a) else a for a in plain), **named)


def _is_wide(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float64


def _tensor(value: Any, dtype: Any) -> Any:
    torch: Any = importlib.import_module("torch")

    made = torch.from_numpy(np.array(value))
    return made if dtype is None else made.to(dtype)
