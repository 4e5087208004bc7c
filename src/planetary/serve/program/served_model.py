"""A trained model as the gateway serves it, wherever it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from planetary.core.tensors import TensorSpec, host_dtype
from planetary.data.tokenizer import Tokenizer
from planetary.models.context import CacheSizes, StateSizes
from planetary.serve.program.serving_program import Decode


@dataclass(frozen=True)
class ServedModel:
    """What is needed to serve a model.

    Attributes:
        name: by which clients ask for it.
        decode: its forward pass; see `models.context`.
        params: the pytree that `decode` expects.
        specs: its leaves in order, by their names.
        sizes: of what a device keeps of a text; None: nothing, every token takes a whole forward pass.
        vocabulary: tokens that the model knows.
        window: the longest text that it was trained for, in tokens.
        tokenizer: of its texts.
        version: the round that the parameters are of; 0: they are of no run.
        chat_template: in Jinja, as the tokenizer's files have it; "": it has none.
        special_tokens: that the template writes, by the names it has for them.
        begins: tokens before every text that is no chat.
        ends: tokens that end a text.
        warning: what people must know who serve it; "": nothing.
        refresh: returns the newest version of the model, or None if it is this one's; None: there are no others.
    """

    name: str
    decode: Decode
    params: Any
    specs: tuple[TensorSpec, ...]
    sizes: CacheSizes | StateSizes | None
    vocabulary: int
    window: int
    tokenizer: Tokenizer
    version: int = 0
    chat_template: str = ""
    special_tokens: tuple[tuple[str, str], ...] = ()
    begins: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()
    warning: str = ""
    refresh: Callable[[int], ServedModel | None] | None = None

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the parameters by name, as a host has them."""
        import jax

        leaves = zip(self.specs, jax.tree.leaves(self.params), strict=True)
        return {spec.name: np.ascontiguousarray(np.asarray(leaf)).view(host_dtype(spec.dtype)) for spec, leaf in leaves}

    @property
    def param_count(self) -> int:
        """Scalars."""
        return sum(spec.size for spec in self.specs)
