"""The copy of texts' pages on a worker's device is used for the next tokens of the same texts alone."""

from __future__ import annotations

import msgspec
import pytest

from planetary.serve.protocol.serving_messages import ComputeCall
from planetary.serve.worker.serving_role import RecalledTexts

TEXTS = RecalledTexts("decode_b2_p4", ((1, 2), (3,)), (20, 9))
NEXT = ComputeCall(
    call=1, function="decode_b2_p4", tokens=((5,), (6,)), starts=(20, 9), pages=((1, 2), (3,)), full=False
)


@pytest.mark.parametrize(
    ("changes", "serves"),
    [
        ({}, True),
        ({"tokens": ((7,), (8,))}, True),
        ({"pages": ((1, 2), (3, 9))}, True),  # a text got a further page
        ({"pages": ((1, 4), (3,))}, False),
        ({"pages": ((1,), (3,))}, False),
        ({"starts": (21, 9)}, False),
        ({"function": "decode_b2_p8"}, False),
        ({"tokens": ((5,),), "starts": (20,), "pages": ((1, 2),)}, False),
        ({"tokens": ((6,), (5,)), "starts": (9, 20), "pages": ((3,), (1, 2))}, False),
    ],
)
def test_the_copy_serves_the_next_call_of_its_texts(changes: dict[str, object], serves: bool) -> None:
    assert TEXTS.serves(msgspec.structs.replace(NEXT, **changes)) == serves


@pytest.mark.parametrize(
    ("start", "pages", "changed"),
    [(0, (4, 5), False), (0, (3,), True), (16, (1, 5), False), (0, (1, 5), True), (32, (1, 2, 7), False)],
)
def test_a_chunk_changes_the_copy_if_it_writes_to_a_page_of_it(
    start: int, pages: tuple[int, ...], changed: bool
) -> None:
    chunk = ComputeCall(
        call=1, function="prefill_s16_p4", tokens=((1,) * 16,), starts=(start,), pages=(pages,), full=False
    )
    assert TEXTS.is_changed_by(chunk) == changed
