"""The author's side of a model: loss and gradients as the source framework computes them.

At the import the framework is still there, so a compiled graph is compared with it. A loss function without an author
of its own is JAX's; a loss from another framework carries one in the attribute `planetary_author`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from planetary.core.errors import UserError

ATTRIBUTE = "planetary_author"


class Author(Protocol):
    """Loss and gradients of a model in the framework that it was written in, in the mode that is trained."""

    def loss_and_gradients(
        self, params: Mapping[str, np.ndarray], batch: Sequence[np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray | None]]:
        """Return the loss and the gradient of every floating-point leaf by its name.

        A call changes nothing: neither parameters, buffers nor gradients of the author's own model.

        Args:
            params: every parameter and buffer by its name in the manifest. Floats are float32, or float64 where the
                author should compute in double precision; a bfloat16 or float16 leaf comes with its value in float32.
            batch: the arrays of the example batch, in order; integers of its types, floats like those of `params`.

        Returns:
            The loss, and one array of the parameter's shape per name; None if the framework gives that parameter no
            gradient (frozen, detached, unused). Names that are left out count as None.
        """
        ...


def author_of(loss_fn: Any) -> Author | None:
    """Return the author that a loss function carries, or None. Raises `UserError` if it is none."""
    author = getattr(loss_fn, ATTRIBUTE, None)
    if author is not None and not callable(getattr(author, "loss_and_gradients", None)):
        raise UserError(
            f"{ATTRIBUTE} of a loss function must have loss_and_gradients(params, batch), found "
            f"{type(author).__name__} (docs/meaning.md)"
        )
    return author
