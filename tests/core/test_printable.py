from __future__ import annotations

import logging

import pytest

from planetary.cli.logs import log_to_stderr
from planetary.core.printable import as_name, is_name, one_line


@pytest.mark.parametrize("name", ["node-a/0", "gpu.lab.example:4711", "a", "x" * 128])
def test_names(name: str) -> None:
    assert is_name(name)
    assert as_name(name) == name


@pytest.mark.parametrize("name", ["", "a b", "a\n", "\x1b[2Jnode", "nodé", "x" * 129, "a\u202eb"])
def test_what_is_no_name(name: str) -> None:
    assert not is_name(name)
    assert is_name(as_name(name))


def test_a_line_obeys_nothing() -> None:
    assert one_line("lost\n12:00:00 gateway INFO all is well") == "lost\\n12:00:00 gateway INFO all is well"
    assert one_line("\x1b]0;title\x07 \x9b31m \u202eabc \u2028") == "\\x1b]0;title\\x07 \\x9b31m \\u202eabc \\u2028"
    assert one_line("µ-batches, 3·10³⁸ – fine") == "µ-batches, 3·10³⁸ – fine"


def test_a_message_of_another_machine_forges_no_line_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    loggers = [logging.getLogger(name) for name in ("planetary", "asyncio")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    try:
        log_to_stderr("gateway", verbose=False)
        logging.getLogger("planetary.fleet").info("worker %s was lost", "a\n12:00:00 gateway INFO \x1b[2Jforged")
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("worker a\\n12:00:00 gateway INFO \\x1b[2Jforged was lost")
