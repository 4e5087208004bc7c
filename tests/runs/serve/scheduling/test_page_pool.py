from __future__ import annotations

import numpy as np
import pytest

from planetary.core.errors import LocalProtocolError
from planetary.machine.machine import check_invariants
from planetary.runs.serve.program.shape import PAGE
from planetary.runs.serve.scheduling.page_pool import PagePool, prefixes


def known_text(pool: PagePool, tokens: list[int]) -> list[int]:
    pages = [pool.allocate() for _ in range(0, len(tokens), PAGE)]
    for page, prefix in zip(pages, prefixes(tokens), strict=False):
        pool.register(page, prefix)
    return pages


def test_a_text_shares_the_pages_that_it_begins_with() -> None:
    pool = PagePool(10)
    first = known_text(pool, list(range(3 * PAGE)))
    other = [*range(2 * PAGE), *([7] * PAGE)]
    assert pool.shared(other) == first[:2]
    check_invariants("pool", pool.invariants())
    pool.release(first)
    pool.release(first[:2])
    assert pool.available == 9
    check_invariants("pool", pool.invariants())


def test_the_last_token_is_never_shared() -> None:
    pool = PagePool(10)
    pages = known_text(pool, list(range(2 * PAGE)))
    assert pool.shared(list(range(2 * PAGE))) == pages[:1]
    assert pool.shared(list(range(2 * PAGE + 1))) == pages


def test_page_after_another_beginning_is_another() -> None:
    pool = PagePool(10)
    known_text(pool, [1] * PAGE + [2] * PAGE)
    assert pool.shared([3] * PAGE + [2] * PAGE + [0]) == []


def test_idle_pages_are_taken_least_recently_used_first() -> None:
    pool = PagePool(3)
    old, new = known_text(pool, [1] * PAGE), known_text(pool, [2] * PAGE)
    pool.release(old)
    pool.release(new)
    assert pool.allocate() == old[0]
    assert pool.shared([1] * (PAGE + 1)) == []
    assert pool.shared([2] * (PAGE + 1)) == new
    with pytest.raises(LocalProtocolError):
        pool.allocate()


def test_random_use_keeps_every_page_accounted_for() -> None:
    rng = np.random.default_rng(0)
    pool, held = PagePool(20), []
    for _ in range(2000):
        if held and (rng.random() < 0.45 or pool.available < 5):
            pool.release(held.pop(rng.integers(len(held))))
        else:
            tokens = [int(rng.integers(2))] * PAGE + [int(rng.integers(3))] * (PAGE + 3)
            pages = pool.shared(tokens)
            pages += [pool.allocate() for _ in range(3 - len(pages))]
            for page, prefix in zip(pages, prefixes(tokens), strict=False):
                pool.register(page, prefix)
            held.append(pages)
        check_invariants("pool", pool.invariants())
    for pages in held:
        pool.release(pages)
    assert pool.available == 19
