"""A served Llama in llama.cpp, for `bench/serving.py`: the same float32 weights through a GGUF file. Needs
`pip install gguf llama-cpp-python`, the second of which is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from planetary.models.llama import LlamaConfig
from planetary.serve.program.served_model import ServedModel

_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: ServedModel, config: LlamaConfig, path: Path, stored: Any = None) -> None:
    """Write a Llama without tokenizer; `stored`: type of its matrices, None: float32."""
    import gguf  # pyright: ignore[reportMissingImports] - of the bench alone

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(model.window)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_hidden)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_rope_dimension_count(config.head_width)
    writer.add_vocab_size(model.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    for name, value in model.arrays().items():
        there, array = _stored(name, value, config)
        if stored is not None and array.ndim == 2:
            writer.add_tensor(there, gguf.quants.quantize(array, stored), raw_dtype=stored)
        else:
            writer.add_tensor(there, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(name: str, value: np.ndarray, config: LlamaConfig) -> tuple[str, np.ndarray]:
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outside:
        return outside[name], value
    _, _, layer, *rest, _ = name.split(".")
    part = ".".join(rest)
    for projection, heads in (("self_attn.q_proj", config.n_head), ("self_attn.k_proj", config.n_kv_head)):
        if part == projection:  # there neighbouring channels are rotated together, here those half a head apart
            value = value.reshape(heads, 2, config.head_width // 2, -1).swapaxes(1, 2).reshape(value.shape)
    return f"blk.{layer}.{_BLOCK[part]}.weight", value


def continues(path: Path, prompt: list[int], count: int, threads: int) -> Callable[[], list[int]]:
    """Return what continues a prompt greedily with llama.cpp."""
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports] - of the bench alone

    llama: Any = Llama(str(path), n_ctx=len(prompt) + count + 8, n_threads=threads, verbose=False, logits_all=False)

    def generate() -> list[int]:
        llama.reset()
        tokens, found = list(prompt), []
        for _ in range(count):
            llama.eval(tokens)
            tokens = [int(np.argmax(_last(llama)))]
            found += tokens
        return found

    generate()
    return generate


def _last(llama: Any) -> np.ndarray:
    import llama_cpp  # pyright: ignore[reportMissingImports] - of the bench alone

    logits = llama_cpp.llama_get_logits(llama.ctx)
    return np.ctypeslib.as_array(logits, shape=(llama.n_vocab(),))
