"""A small tokenizer with chat templates of four families, re-made, and chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planetary.data.tokenizer_settings import TEMPLATE_FILE

SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"),
)
_MARKED = {  # « and » stand around what the assistant says
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "«{{ m.content + '<|im_end|>' }}»{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama-3": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{% if m.role == 'assistant' %}«{{ m.content | trim + '<|eot_id|>' }}»"
        "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}«{{ ' ' + m.content + eos_token }}»"
        "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}{% if m.role == 'assistant' %}"
        "«{{ m.content | trim + '<end_of_turn>' }}»{% else %}{{ m.content | trim + '<end_of_turn>' }}{% endif %}"
        "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
}
MARKED = {
    name: text.replace("«", "{% generation %}").replace("»", "{% endgeneration %}") for name, text in _MARKED.items()
}
PLAIN = {name: text.replace("«", "").replace("»", "") for name, text in _MARKED.items()}


def said(*texts: str, system: str = "") -> list[dict[str, Any]]:
    """Return messages of a user and the assistant in turns."""
    roles = ("user", "assistant")
    found = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *found] if system else found


CHATS = [
    said("What is 2 + 3?", "5"),
    said("Say it.", "  with spaces \n", "Again, naïve?", "déjà vu – 日本"),
    said("a", "<|im_end|> inside", "b\n\nc", "d\n"),
    said("One more", "yes", "and a last one without an answer"),
]


def tokenizer_folder(folder: Path, template: str = "", *, trims_offsets: bool = False) -> Path:
    """Write a tokenizer with a template into `folder`; return the path of its tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=trims_offsets)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + len(SPECIAL) + 40,
        special_tokens=list(SPECIAL),
        initial_alphabet=letters,
        show_progress=False,
    )
    made.train_from_iterator([one["content"] for chat in CHATS for one in chat], trainer)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    if template:
        (folder / TEMPLATE_FILE).write_text(template)
    return folder / "tokenizer.json"
