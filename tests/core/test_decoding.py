"""Types are decoded in any thread, also for the first time."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import planetary

PACKAGE = Path(planetary.__file__).parent
OWN = PACKAGE / "core" / "decoding.py"
TYPED = "type=", "msgspec.convert", "Decoder", "from msgspec"
FIRST_USES = """
import gc, sys, threading, types
from planetary.core import decoding

sys.setswitchinterval(1e-6)
gc.callbacks.append(lambda phase, info: None)  # Python code in a collection: another thread may go on
source, text = "import msgspec", "1"
for depth in range(5):
    inner = f"Type{depth - 1}" if depth else "int"
    source += f"\\nclass Type{depth}(msgspec.Struct):\\n  one: '{inner}'\\n  more: 'tuple[{inner}, ...]' = ()\\n"
    text = '{"one":%s,"more":[%s]}' % (text, text)
for number in range(60):
    module = sys.modules[f"types{number}"] = types.ModuleType(f"types{number}")
    exec(source, module.__dict__)
    found, barrier = [], threading.Barrier(3)

    def decode(kind=module.Type4):
        barrier.wait()
        found.append(decoding.from_json(text, kind))

    threads = [threading.Thread(target=decode) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(found) == 3 and found[0] == found[1] == found[2]
"""
"""Without the lock, msgspec 0.22 crashes here in nearly every run."""


def test_threads_decode_a_type_for_the_first_time() -> None:
    ended = subprocess.run([sys.executable, "-c", FIRST_USES], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_no_type_is_decoded_around_the_lock() -> None:
    """In the whole package, scripts that other processes run included."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        uses = path != OWN and any(word in text for word in TYPED)
        for node in ast.walk(ast.parse(text)) if uses else ():
            if not isinstance(node, ast.Call):
                continue
            called, names = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
            typed = called.endswith(".decode") and called.startswith("msgspec.") and "type" in names
            if typed or called == "msgspec.convert" or (called.startswith("msgspec.") and called.endswith(".Decoder")):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {called}")
    assert found == []
