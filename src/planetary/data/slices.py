"""Which tokens a lease stands for: pure, every token at most once per epoch.

A *lease* is a position in the run's endless data order: lease 0 is the first slice, or part of one, that is handed out.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from planetary.core.configuration.ranges import LeaseOrder
from planetary.core.errors import LocalProtocolError, UserError
from planetary.core.token_slice import Slice
from planetary.data.shuffle import permutation
from planetary.data.token_file import TokenFile


class SliceOrder(msgspec.Struct, frozen=True):
    """Maps leases to slices of a token file.

    The file is cut into whole slices, and each epoch hands each of them out exactly once: in an order drawn from the
    seed, or, with `sampling` "fifo", from the file's start to its end. The remainder at the ends (less than one slice)
    sits out the epoch; the cut starts at another block in each epoch, so over time no token is left out. "fifo" always
    begins at the file's start.

    Attributes:
        file: the tokens; already shuffled in blocks where `sampling` is "random", else in the order of the source.
        slice_tokens: tokens of one lease; a whole number of blocks.
        block_tokens: tokens of one sequence with the shifted target, so no block is ever cut in two.
        seed: of the order.
        sampling: as `data.sampling`.
        reorder: "fifo": draw the order of slices from the second epoch on.
        parts: leases a slice is divided into; those of one slice follow each other in the order and in the file.
    """

    file: TokenFile
    slice_tokens: int
    block_tokens: int
    seed: int
    sampling: LeaseOrder = "random"
    reorder: bool = False
    parts: int = 1

    def __post_init__(self) -> None:
        """Raise `UserError` for a file that is shorter than one slice."""
        if self.slice_tokens % self.block_tokens:
            raise UserError(
                f"a slice of {self.slice_tokens} tokens is no whole number of blocks of {self.block_tokens}"
            )
        if self.file.count < self.slice_tokens:
            raise UserError(
                f"the training data has {self.file.count} tokens, but one slice (inner_steps × batch_size × "
                f"(sequence_length + 1)) takes {self.slice_tokens}: give more data, or lower "
                "train.inner_steps, train.batch_size or train.sequence_length"
            )

    @property
    def per_epoch(self) -> int:
        """Number of leases in one epoch."""
        return self._slices * self.parts

    @property
    def _slices(self) -> int:
        return self.file.count // self.slice_tokens

    def epoch(self, lease: int) -> int:
        """Return the epoch (from 0) that a lease belongs to."""
        return lease // self.per_epoch

    def locate(self, lease: int) -> Slice:
        """Return the tokens a lease stands for."""
        if lease < 0:
            raise LocalProtocolError(f"lease {lease} does not exist; leases count from 0")
        number, part = divmod(lease, self.parts)
        epoch, position = divmod(number, self._slices)
        size = self.slice_tokens // self.parts
        if self.sampling == "fifo":
            index = int(_epoch_order(self._slices, self.seed, epoch)[position]) if self.reorder and epoch else position
            return self.file.slice(index * self.slice_tokens + part * size, size)
        spare_blocks = (self.file.count - self._slices * self.slice_tokens) // self.block_tokens
        start = _start_block(spare_blocks, self.seed, epoch) * self.block_tokens
        index = int(_epoch_order(self._slices, self.seed, epoch)[position])
        return self.file.slice(start + index * self.slice_tokens + part * size, size)


@lru_cache(maxsize=4)  # consecutive leases share an epoch
def _epoch_order(slices: int, seed: int, epoch: int) -> np.ndarray:
    return permutation(slices, seed, epoch, 0)


@lru_cache(maxsize=4)
def _start_block(spare_blocks: int, seed: int, epoch: int) -> int:
    return int(permutation(spare_blocks + 1, seed, epoch, 1)[0])


def eval_chunks(
    held_out: TokenFile, batches: int, batch_tokens: int, batches_per_chunk: int | None = None
) -> list[tuple[Slice, int]]:
    """Return the fixed held-out batches as `(slice, number of whole batches in it)`, in file order.

    Args:
        held_out: the held-out tokens, shuffled in blocks when the data was prepared, the same for every run
            seed.
        batches: how many batches are evaluated.
        batch_tokens: tokens of one batch.
        batches_per_chunk: how many go into one slice; None: all.

    Raises:
        UserError: the held-out data has fewer whole batches.
    """
    available = held_out.count // batch_tokens
    if available < batches:
        raise UserError(
            f"the held-out data has {held_out.count} tokens, which is {available} whole batches of "
            f"{batch_tokens} tokens, but eval.batches asks for {batches}: lower eval.batches, or raise "
            "data.held_out_fraction"
        )
    size = batches_per_chunk or batches
    return [
        (held_out.slice(first * batch_tokens, count * batch_tokens), count)
        for first in range(0, batches, size)
        for count in [min(size, batches - first)]
    ]
