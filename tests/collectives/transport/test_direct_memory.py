"""Memory that one process lends and another reads."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from planetary.collectives.transport.direct_memory import Borrower, Lender, address_of, draw_challenge
from planetary.core.errors import PeerError
from waiting import HANG_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory of processes is read on Linux only")


def test_what_is_lent_can_be_read_until_it_is_revoked() -> None:
    lender, challenge = Lender(), draw_challenge()
    with pytest.raises(PeerError, match="it has left"):
        Borrower(lender.loan, challenge)  # it did not agree
    lender.show(challenge)
    borrower = Borrower(lender.loan, challenge)
    held, found = np.arange(1000, dtype=np.uint8), np.zeros(1000, np.uint8)
    assert borrower.read(address_of(held), found.data)
    np.testing.assert_array_equal(found, held)
    assert not borrower.read(8, found.data)  # nothing is there
    lender.revoke()
    with pytest.raises(PeerError, match="it has left"):
        borrower.read(address_of(held), found.data)
    with pytest.raises(PeerError, match="it has left"):
        Borrower(lender.loan, challenge)


def test_memory_of_a_read_only_process_is_not_lent() -> None:
    lender, challenge = Lender(), draw_challenge()
    lender.show(challenge)
    with pytest.raises(PeerError, match="it has left"):
        Borrower(lender.loan, draw_challenge())
    with pytest.raises(PeerError, match="cannot be read"):
        Borrower(msgspec.structs.replace(lender.loan, word=8), challenge)
    with pytest.raises(PeerError, match="cannot be read"):
        Borrower(msgspec.structs.replace(lender.loan, pid=2**22 + 1), challenge)


@pytest.mark.processes
def test_a_child_reads_its_parent_where_the_system_allows_it() -> None:
    lender, challenge = Lender(), draw_challenge()
    lender.show(challenge)
    held = np.arange(5000, dtype=np.uint8)
    code = (
        "import sys, numpy as np\n"
        "from planetary.collectives.transport.direct_memory import Borrower, Loan\n"
        "from planetary.core.errors import PeerError\n"
        "pid, word, address = map(int, sys.argv[1:4])\n"
        "into = np.zeros(5000, np.uint8)\n"
        "try:\n"
        "    borrower = Borrower(Loan(pid, word), bytes.fromhex(sys.argv[4]))\n"
        "except PeerError:\n"
        "    print('not allowed')\n"
        "else:\n"
        "    print(borrower.read(address, into.data), int(into.sum()))\n"
    )
    arguments = [*(str(number) for number in (os.getpid(), lender.loan.word, address_of(held))), challenge.hex()]
    command = [sys.executable, "-c", code, *arguments]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S)
    assert found.stdout.strip() in (f"True {int(held.sum())}", "not allowed")
