"""A small GPT as a plain PyTorch module, trained without PyTorch on any worker.

    pip install torch torchax
    planetary train examples/stdlib.toml --set model.source=examples/torch_gpt.py:build --set 'model.options={}'

torchax traces the module into JAX here, once; what travels to the workers is the compiled training step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from planetary.models.torch_module import from_torch, torch_function


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
        weights = scores.masked_fill(future[:length, :length], float("-inf")).softmax(dim=-1)
        x = x + self.output((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class TorchGpt(nn.Module):
    """Token ids [B, T] to logits [B, T, vocabulary]; the head is tied to the embedding."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight
        self.register_buffer("future", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.future)
        return self.head(self.norm(x))


def make(*, n_layer: int, n_embd: int, n_head: int, vocab_size: int, sequence_length: int, seed: int) -> TorchGpt:
    torch.manual_seed(seed)
    return TorchGpt(n_layer, n_embd, n_head, vocab_size, sequence_length)


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten().long())


def build(
    *,
    n_layer: int = 2,
    n_embd: int = 128,
    n_head: int = 4,
    vocab_size: int = 256,
    sequence_length: int = 128,
    batch_size: int = 8,
    seed: int = 0,
) -> tuple[Any, Any, Any]:
    """The model that planetary trains: `(loss_fn, params, example_batch)`."""
    module = make(
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        seed=seed,
    )
    tokens = np.zeros((batch_size, sequence_length), np.int32)
    return from_torch(module, (tokens, tokens), next_token_loss)


def logits(params: Any, tokens: Any, **options: Any) -> Any:
    """What `planetary generate` samples from."""
    sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 256, "sequence_length": 128, "seed": 0}
    module = make(**{name: options.get(name, default) for name, default in sizes.items()})
    return torch_function(module)[1](params, tokens)
