"""A small GPT as a plain PyTorch module, trained without PyTorch on any worker.

    pip install 'planetary-compute[torch]'
    planetary train examples/stdlib.toml --set model.source=examples/torch_gpt.py:TorchGpt --set 'model.options={}'

The class is all that is needed: `model.options` are its arguments, and the loss is the next tokens' cross-entropy
unless there is a function `loss(output, target)` beside it. It is traced once, where the run is started; what travels
to the workers is the compiled training step. Afterwards the trained weights go back into a module:

    planetary.torch.load_into(module, "runs/stdlib")
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


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

    def __init__(
        self, n_layer: int = 2, n_embd: int = 128, n_head: int = 4, vocab_size: int = 256, sequence_length: int = 128
    ) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocab_size, n_embd), nn.Embedding(sequence_length, n_embd)
        self.blocks = nn.ModuleList([Block(n_embd, n_head) for _ in range(n_layer)])
        self.norm = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight
        self.register_buffer("future", torch.ones(sequence_length, sequence_length, dtype=torch.bool).triu(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.future)
        return self.head(self.norm(x))
