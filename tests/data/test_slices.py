from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from planetary.core.errors import LocalProtocolError, UserError
from planetary.data.shuffle import permutation
from planetary.data.slices import SliceOrder, eval_chunks
from planetary.data.token_file import TokenFile, smallest_dtype
from planetary.runs.rounds.lease_ledger import LeaseLedger, check_ledger


def file_of(count: int) -> TokenFile:
    return TokenFile("/data/train.ui16", "ui16", count, "0" * 64)


# --- the order ----------------------------------------------------------------------------------------------


@given(
    block=st.integers(1, 9),
    blocks_per_slice=st.integers(1, 7),
    slices=st.integers(1, 40),
    spare=st.integers(0, 60),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_token_is_in_at_most_one_lease_of_an_epoch(
    block: int, blocks_per_slice: int, slices: int, spare: int, seed: int
) -> None:
    size = block * blocks_per_slice
    count = size * slices + spare % size
    order = SliceOrder(file_of(count), size, block, seed)
    assert order.per_epoch == slices
    for epoch in range(3):
        seen = np.zeros(count, np.int64)
        for lease in range(epoch * slices, (epoch + 1) * slices):
            assert order.epoch(lease) == epoch
            piece = order.locate(lease)
            assert piece.count == size
            assert piece.offset % block == 0
            seen[piece.offset : piece.offset + piece.count] += 1
        assert seen.max() == 1
        assert seen.sum() == slices * size


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def offsets(seed: int, epoch: int) -> list[int]:
        order = SliceOrder(file_of(1000), 10, 5, seed)
        return [order.locate(100 * epoch + n).offset for n in range(100)]

    assert offsets(1, 0) == offsets(1, 0)
    assert len({tuple(offsets(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_fifo_goes_from_the_start_to_the_end_in_every_epoch() -> None:
    order = SliceOrder(file_of(106), 10, 5, 3, "fifo")
    once = [10 * n for n in range(10)]
    assert [order.locate(lease).offset for lease in range(30)] == once * 3


def test_fifo_may_draw_the_order_from_the_second_epoch_on() -> None:
    order = SliceOrder(file_of(106), 10, 5, 3, "fifo", True)
    epochs = [[order.locate(10 * epoch + n).offset for n in range(10)] for epoch in range(3)]
    assert epochs[0] == sorted(epochs[0])
    assert epochs[1] != epochs[2]
    assert sorted(epochs[1]) == sorted(epochs[2]) == epochs[0]


def test_the_rest_that_sits_out_is_not_always_the_same() -> None:
    order = SliceOrder(file_of(10 + 6), 10, 1, 0)
    assert len({order.locate(epoch).offset for epoch in range(60)}) == 7


def test_the_order_is_the_same_everywhere() -> None:
    """Pinned: a resumed run on another machine must go on with the same data."""
    assert permutation(10, 0, 0).tolist() == PINNED_SMALL
    assert permutation(5, 2**32 - 1, 7, 1).tolist() == PINNED_LARGE_SEED


PINNED_SMALL = [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]
PINNED_LARGE_SEED = [3, 2, 0, 4, 1]


@given(st.integers(0, 500), st.integers(0, 2**32 - 1))
def test_a_permutation_is_one(count: int, seed: int) -> None:
    assert sorted(permutation(count, seed).tolist()) == list(range(count))


def test_too_little_data_is_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match=r"has 99 tokens, but one slice .* takes 100: .*train\.inner_steps"):
        SliceOrder(file_of(99), 100, 10, 0)
    with pytest.raises(UserError, match="no whole number of blocks"):
        SliceOrder(file_of(99), 35, 10, 0)
    with pytest.raises(LocalProtocolError, match="lease -1"):
        SliceOrder(file_of(99), 30, 10, 0).locate(-1)
    with pytest.raises(UserError, match="not all in it"):
        file_of(10).slice(8, 3)


def test_token_types_are_as_small_as_they_can_be() -> None:
    assert [smallest_dtype(n) for n in (1, 256, 257, 65536, 65537, 2**32)] == [
        "ui8",
        "ui8",
        "ui16",
        "ui16",
        "ui32",
        "ui32",
    ]
    with pytest.raises(UserError, match="does not fit"):
        smallest_dtype(2**32 + 1)


# --- held-out batches ---------------------------------------------------------------------------------------


def test_held_out_batches_are_whole_fixed_and_split_as_asked() -> None:
    file = file_of(107)
    assert eval_chunks(file, 5, 20) == [(file.slice(0, 100), 5)]
    assert eval_chunks(file, 5, 20, 2) == [
        (file.slice(0, 40), 2),
        (file.slice(40, 40), 2),
        (file.slice(80, 20), 1),
    ]
    with pytest.raises(UserError, match=r"107 tokens, which is 5 whole batches of 20 tokens, but .* asks for 6"):
        eval_chunks(file, 6, 20)


# --- the ledger ---------------------------------------------------------------------------------------------


class LedgerAgainstSets(RuleBasedStateMachine):
    """Drives a ledger with arbitrary calls beside a plain model of sets, and through JSON and back at any
    time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = LeaseLedger()
        self.free: set[int] = set()
        self.held: set[int] = set()
        self.trained: set[int] = set()
        self.top = 0

    @rule()
    def take(self) -> None:
        expected = min(self.free) if self.free else self.top
        assert self.ledger.peek() == expected
        lease = self.ledger.take()
        assert lease == expected
        assert lease not in self.held | self.trained
        self.free.discard(lease)
        self.top = max(self.top, lease + 1)
        self.held.add(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held)))
        self.ledger.give_back(lease)
        self.held.remove(lease)
        self.free.add(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held)))
        self.ledger.complete(lease)
        self.held.remove(lease)
        self.trained.add(lease)

    @rule(lease=st.integers(-1, 30), complete=st.booleans())
    def meddle_with_a_lease_that_nobody_holds(self, lease: int, complete: bool) -> None:
        if lease in self.held:
            return
        before = self.ledger.copy()
        with pytest.raises(LocalProtocolError, match=f"lease {lease} cannot be"):
            (self.ledger.complete if complete else self.ledger.give_back)(lease)
        assert self.ledger == before

    @rule()
    def restart(self) -> None:
        self.ledger = msgspec.json.decode(msgspec.json.encode(self.ledger), type=LeaseLedger)

    @rule()
    def lose_everyone(self) -> None:
        for lease in self.held:
            self.ledger.give_back(lease)
        self.free |= self.held
        self.held = set()

    @invariant()
    def agrees(self) -> None:
        assert set(self.ledger.returned) == self.free
        assert set(self.ledger.held) == self.held
        assert self.ledger.trained == len(self.trained)
        assert check_ledger(self.ledger) == ""


TestLedger = LedgerAgainstSets.TestCase


def test_replayed_calls_give_the_same_independent_state() -> None:
    """Replaying the calls gives the same state and copies are independent."""

    def run() -> LeaseLedger:
        ledger = LeaseLedger()
        for _ in range(5):
            ledger.take()
        ledger.give_back(3)
        ledger.complete(1)
        ledger.give_back(0)
        return ledger

    assert run() == run()
    copy = run().copy()
    original = copy.copy()
    copy.take()
    assert copy != original
    assert LeaseLedger() == LeaseLedger()
    assert LeaseLedger().held == []  # no list is shared between ledgers


@pytest.mark.parametrize(
    ("ledger", "words"),
    [
        (LeaseLedger(3, [2, 1], []), "returned leases are not ascending"),
        (LeaseLedger(3, [3], []), "numbers below 3"),
        (LeaseLedger(3, [], [-1]), "held leases are not ascending"),
        (LeaseLedger(3, [1], [1]), "both held and returned"),
    ],
)
def test_an_inconsistent_ledger_is_found(ledger: LeaseLedger, words: str) -> None:
    assert words in check_ledger(ledger)


def test_the_error_says_what_state_a_lease_is_in() -> None:
    ledger = LeaseLedger()
    ledger.complete(ledger.take())
    with pytest.raises(LocalProtocolError, match="trained already"):
        ledger.give_back(0)
    with pytest.raises(LocalProtocolError, match="it is free"):
        ledger.complete(1)
