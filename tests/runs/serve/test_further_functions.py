"""A serving worker gets functions while it computes."""

from __future__ import annotations

import queue
import threading
from typing import Any, cast

import pytest

from planetary.core.errors import CompileError
from planetary.core.tensors import Tensors
from planetary.fleet.protocol import messages as m
from planetary.fleet.worker.events import RoleConnected
from planetary.runs.serve.further_functions import AddFunctions, Extension
from planetary.runs.serve.loaded_model import LoadedModel
from planetary.runs.serve.messages import ComputeCall, FunctionsChecked, FurtherFunctions, ServingReady
from planetary.runs.serve.role import ServingRole
from waiting import HANG_S

FIRST, SECOND = FurtherFunctions("1", ("decode_b4_p8",)), FurtherFunctions("2", ("decode_b8_p8",))


@pytest.mark.parametrize("refused", ["", "decode_b4_p8 is 3 nats away"])
def test_functions_are_fetched_checked_and_told(refused: str) -> None:
    sent: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    here: set[str] = set()
    added: list[FurtherFunctions] = []

    def send(message: m.Message, tensors: Tensors | None) -> None:
        sent.put(message)

    def add(one: FurtherFunctions) -> None:
        if one is FIRST and refused:
            raise CompileError(refused)
        added.append(one)

    ready = ServingReady(artifact="a", weights="w", device="", verified="")
    role = ServingRole(cast("LoadedModel", cast("Any", None)), ready, send, Extension(here.__contains__, add))
    instruction = AddFunctions((FIRST, SECOND))
    try:
        role.carry_out(instruction)
        assert sent.get(timeout=HANG_S) == m.FetchBlob(digest="1")  # one blob after the other
        here |= {"1", "2"}
        role.carry_out(instruction)
        role.carry_out(instruction)  # the job comes again with every blob, and with every new connection
        assert sent.get(timeout=HANG_S) == FunctionsChecked(functions=FIRST.functions, refused=refused)
        assert sent.get(timeout=HANG_S) == FunctionsChecked(functions=SECOND.functions)
        role.carry_out(RoleConnected())
        known = SECOND.functions if refused else (*FIRST.functions, *SECOND.functions)
        again = sent.get(timeout=HANG_S)
        assert isinstance(again, ServingReady)
        assert again.functions == known
    finally:
        role.close()
    assert added == ([SECOND] if refused else [FIRST, SECOND])
    assert sent.empty()


def test_call_waits_for_one_comparison_alone() -> None:
    sent: queue.SimpleQueue[m.Message] = queue.SimpleQueue()
    begun, may_end = threading.Event(), threading.Event()

    def send(message: m.Message, tensors: Tensors | None) -> None:
        sent.put(message)

    def add(one: FurtherFunctions) -> None:
        begun.set()
        assert may_end.wait(HANG_S)

    ready = ServingReady(artifact="a", weights="w", device="", verified="")
    without_model = cast("LoadedModel", cast("Any", None))
    role = ServingRole(without_model, ready, send, Extension(lambda digest: True, add))
    call = ComputeCall(call=7, function="decode_b1_p8", tokens=((1,),), starts=(0,), page_tables=((1,),), full=False)
    try:
        role.carry_out(AddFunctions((FIRST, SECOND)))
        assert begun.wait(60)
        role.received(1, call, {})
        may_end.set()
        assert isinstance(sent.get(timeout=HANG_S), FunctionsChecked)
        failed = sent.get(timeout=HANG_S)  # there is no model
        assert isinstance(failed, m.TaskFailed)
        assert failed.task == 7
        assert isinstance(sent.get(timeout=HANG_S), FunctionsChecked)
    finally:
        role.close()
