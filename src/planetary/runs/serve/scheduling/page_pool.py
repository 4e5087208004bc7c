"""Pages of a cache: who uses which, and which have a prefix of a sequence that another sequence may begin with."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from planetary.core.errors import LocalProtocolError
from planetary.runs.serve.program.shape import PAGE

Prefix = bytes
"""Stands for all tokens up to the end of a page, from the start of the sequence."""


def prefixes(tokens: Sequence[int], adapter: int = 0) -> Iterator[Prefix]:
    """Yield the key of the sequence up to the end of each full page, in order. Keys of other adapters are others."""
    known = b"%d" % adapter if adapter else b""
    for end in range(PAGE, len(tokens) + 1, PAGE):
        page = np.asarray(tokens[end - PAGE : end], np.int64).tobytes()
        known = hashlib.blake2b(known + page, digest_size=16).digest()
        yield known


class PagePool:
    """The pages of one worker's cache. Page 0 belongs to no sequence.

    A full page is known by all tokens up to the page's end. A sequence that begins with them uses it, too (Zheng et al.
    2023, arXiv:2312.07104, section 3, with a table in place of the tree). An unused page stays until the place is
    needed, the longest unused first.
    """

    def __init__(self, pages: int) -> None:
        """`pages` in all, page 0 included."""
        self._free = list(range(pages - 1, 0, -1))
        self._users: dict[int, int] = {}  # page -> how many sequences use it
        self._known: dict[Prefix, int] = {}
        self._prefix_of: dict[int, Prefix] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known pages without a user
        self._count = pages - 1

    @property
    def available(self) -> int:
        """How many pages can be taken."""
        return len(self._free) + len(self._idle)

    @property
    def used_share(self) -> float:
        """Which part of the pages sequences use, 0 to 1."""
        return 1 - self.available / self._count

    def allocate(self) -> int:
        """Return a page for one sequence. Raises `LocalProtocolError` if none is available."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            del self._known[self._prefix_of.pop(page)]
        else:
            raise LocalProtocolError("a page was taken where none is available")
        self._users[page] = 1
        return page

    def shared(self, tokens: Sequence[int], adapter: int = 0) -> list[int]:
        """Return the pages with the beginning of a sequence, in order, for one more sequence to use.

        At least one token is left out: the last one has to be computed for the next one.
        """
        found = []
        for prefix in prefixes(tokens[:-1], adapter):
            page = self._known.get(prefix)
            if page is None:
                break
            self._users[page] = self._users.get(page, 0) + 1
            self._idle.pop(page, None)
            found.append(page)
        return found

    def register(self, page: int, prefix: Prefix) -> None:
        """Register a used page with the last tokens of a prefix; an already registered page stays."""
        if page not in self._prefix_of and prefix not in self._known:
            self._known[prefix] = page
            self._prefix_of[page] = prefix

    def release(self, pages: Sequence[int]) -> None:
        """One sequence does not use these pages any more."""
        for page in reversed(pages):  # the end of a sequence is less likely to be shared than the beginning
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._prefix_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def invariants(self) -> Iterator[tuple[bool, str]]:
        """Yield the invariants, each with a sentence for a violation."""
        places = sorted([*self._free, *self._users, *self._idle])
        yield places == list(range(1, self._count + 1)), f"pages are lost or doubled: {places}"
        yield all(count > 0 for count in self._users.values()), "a page has no user, and is not free"
        known = sorted(self._known.values())
        yield known == sorted(self._prefix_of), f"known prefixes and pages differ: {known}"
