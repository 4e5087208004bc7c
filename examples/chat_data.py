"""Write chats about sums, pairs of answers, and a tokenizer with a chat template: the data of chat.toml and dpo.toml.

    python examples/chat_data.py            # into examples/chat/
    planetary train examples/chat.toml
    planetary train examples/dpo.toml

The tokenizer's tokens are bytes, and two of ChatML. A pretrained model brings its own tokenizer and template.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from planetary.data.tokenizer import ByteTokenizer

FOLDER = Path(__file__).with_name("chat")
TEMPLATE = """\
{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{% else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def chat(draw: random.Random) -> dict[str, list[dict[str, str]]]:
    """Return a record of two questions and answers."""
    messages = []
    for _ in range(2):
        a, b = draw.randrange(10), draw.randrange(10)
        messages += [
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
        ]
    return {"messages": messages}


def pair(draw: random.Random) -> dict[str, str]:
    """Return a record of a question, the right answer, and one that is a little off."""
    a, b = draw.randrange(10), draw.randrange(10)
    wrong = a + b + draw.choice((-2, -1, 1, 2))
    return {"prompt": f"What is {a} + {b}?", "chosen": f"{a} + {b} = {a + b}", "rejected": f"{a} + {b} = {wrong}"}


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    made = Tokenizer.from_str(ByteTokenizer().to_json().decode())
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(FOLDER / "tokenizer.json"))
    (FOLDER / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (FOLDER / "chat_template.jinja").write_text(TEMPLATE)
    draw = random.Random(0)
    lines = [json.dumps(chat(draw)) + "\n" for _ in range(2000)]
    (FOLDER / "chats.jsonl").write_text("".join(lines))
    lines = [json.dumps(pair(draw)) + "\n" for _ in range(2000)]
    (FOLDER / "pairs.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
