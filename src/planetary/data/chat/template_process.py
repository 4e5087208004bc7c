"""The process that renders chats: a request and an answer a line, within limits of memory.

It ends with the end of standard input, and so with the gateway.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys

import msgspec

from planetary.core import decoding
from planetary.core.errors import UserError
from planetary.data.chat.messages import TRAINING_DAY, ChatToRender, Rendered
from planetary.data.chat.template import ChatTemplate

MEMORY_BYTES = 1 << 30
"""Address space of the process."""


def main() -> None:
    """Render until the standard input ends."""
    for limited, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # a lower limit is there already
            resource.setrlimit(limited, (most, most))
    source, template = "", None
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        chat = decoding.from_json(line, ChatToRender)
        signal.setitimer(signal.ITIMER_REAL, chat.seconds)
        try:
            if template is None or chat.template != source:
                source, template = chat.template, None
                template = ChatTemplate(source)
            if chat.turns is None:
                day = {"strftime_now": TRAINING_DAY.strftime} if chat.is_training else {}
                answer = msgspec.json.encode(Rendered(text=template.text({**chat.names, **day})))
            else:
                answer = msgspec.json.encode(Rendered(samples=tuple(template.samples(chat.names, chat.turns))))
        except UserError as error:
            answer = msgspec.json.encode(Rendered(problem=str(error)))
        except MemoryError:
            answer = msgspec.json.encode(Rendered(problem="it needs too much memory"))
        except UnicodeEncodeError:
            answer = msgspec.json.encode(Rendered(problem="it makes a text that is no Unicode"))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
