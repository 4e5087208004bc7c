"""The default model and its training step as PyTorch users write them, for `bench/train_step.py` and `bench/gpu.sh`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


class NanoChat(nn.Module):
    """`planetary.models.nanochat` with the same parameters in the same layout."""

    def __init__(self, params: Mapping[str, np.ndarray], n_head: int, length: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.from_numpy(value.copy())) for value in params.values()])
        self.names = {name: i for i, name in enumerate(params)}
        self.layers = sum(name.endswith("query") for name in params)
        self.n_head = n_head
        half = self.of("embedding").shape[1] // n_head // 2
        angle = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", torch.cos(angle)[:, None, :], persistent=False)
        self.register_buffer("sin", torch.sin(angle)[:, None, :], persistent=False)

    def of(self, name: str) -> Tensor:
        return self.weights[self.names[name]]

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * self.cos + second * self.sin, second * self.cos - first * self.sin], dim=-1)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        def norm(x: Tensor) -> Tensor:
            return functional.rms_norm(x, x.shape[-1:], eps=1e-6)

        batch, length = tokens.shape
        x = norm(functional.embedding(tokens, self.of("embedding")))
        for i in range(self.layers):
            query, key, value, output, up, down = (
                self.of(f"blocks.{i}.{name}")
                for name in (
                    "attention.query",
                    "attention.key",
                    "attention.value",
                    "attention.output",
                    "mlp.up",
                    "mlp.down",
                )
            )
            y = norm(x)
            q, k, v = ((y @ w).view(batch, length, self.n_head, -1) for w in (query, key, value))
            q, k = norm(self.rotate(q)), norm(self.rotate(k))
            mixed = functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            )
            x = x + mixed.transpose(1, 2).reshape(x.shape) @ output
            x = x + torch.relu(norm(x) @ up).square() @ down
        logits = 15.0 * torch.tanh(norm(x) @ self.of("head") / 15.0)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_step(
    params: Mapping[str, np.ndarray],
    n_head: int,
    batch: list[np.ndarray],
    *,
    compiled: bool,
    device: str = "cpu",
    bf16: bool = False,
) -> Any:
    """Return a function of the step's number that runs one AdamW step and returns the loss before it.

    Args:
        params: by name, in the layout of `planetary.models.nanochat`.
        n_head: heads of a layer.
        batch: tokens and targets.
        compiled: with `torch.compile`.
        device: of PyTorch.
        bf16: compute under autocast, as PyTorch's users do; parameters and optimizer stay in float32.
    """
    tokens, targets = (torch.from_numpy(array).long().to(device) for array in batch)
    model = NanoChat(params, n_head, tokens.shape[1]).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    forward = torch.compile(model) if compiled else model

    def step(_: int) -> float:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = forward(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step
