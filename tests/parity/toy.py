"""A tiny random decoder in plain torch, whose attention goes through the paged pools: the engine runs on it without transformers."""

from __future__ import annotations

import random

import torch

from replayer.parity.attention import PagedBatch
from replayer.parity.language_model import ModelShape
from replayer.parity.pools import Layout
from replayer.parity.requests import Request
from replayer.parity.run import Setup
from replayer.parity.scheduler import Limits

VOCABULARY = 96
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 6, 4, 2, 16
SETUP = Setup(Layout(page_size=4, window=24), Limits(max_running=5, max_prefill_tokens=96), 190, 4000)


class ToyModel:
    """Attention only, with learned positions; weights are drawn from a seed. Also answers without pools, for comparison: `dense`."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(seed)
        width = HEADS * HEAD_DIM

        def weights(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=draw) / shape[0] ** 0.5).to(dtype)

        self.shape = ModelShape("toy", LAYERS, KV_HEADS, HEAD_DIM, dtype, "cpu")
        self._embed, self._places = weights(VOCABULARY, width) * 8, weights(512, width) * 8
        self._layers = [
            (weights(width, width), weights(width, 2 * KV_HEADS * HEAD_DIM), weights(width, width))
            for _ in range(LAYERS)
        ]
        self._head = weights(width, VOCABULARY) * 4

    def logits(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        return self._run(input_ids, positions, batch.attend)[rows] @ self._head

    def dense(self, tokens: list[int], layout: Layout) -> torch.Tensor:
        """Logits of every token of one text, computed at once: float ``[tokens, vocabulary]``."""
        count = torch.arange(len(tokens))
        ahead = count[:, None] - count[None, :]

        def attend(layer, query, key, value, scaling):
            seen = ahead >= 0
            if layout.window is not None and layout.pool_of(layer) == "window":
                seen = seen & (ahead < layout.window)
            answer = torch.nn.functional.scaled_dot_product_attention(
                query[None], key[None], value[None], attn_mask=seen, scale=scaling, enable_gqa=True
            )
            return answer[0].transpose(0, 1)

        return self._run(torch.tensor(tokens), count, attend) @ self._head

    def _run(self, input_ids: torch.Tensor, positions: torch.Tensor, attend) -> torch.Tensor:
        hidden = self._embed[input_ids] + self._places[positions]
        for layer, (to_query, to_kv, out) in enumerate(self._layers):
            normed = torch.nn.functional.layer_norm(hidden, hidden.shape[-1:])
            query = (normed @ to_query).unflatten(-1, (HEADS, HEAD_DIM)).transpose(0, 1)
            key, value = (normed @ to_kv).unflatten(-1, (2, KV_HEADS, HEAD_DIM)).unbind(1)
            answer = attend(layer, query, key.transpose(0, 1), value.transpose(0, 1), HEAD_DIM**-0.5)
            hidden = hidden + answer.flatten(1) @ out
        return torch.nn.functional.layer_norm(hidden, hidden.shape[-1:])


def toy_requests(count: int, seed: int = 0) -> list[Request]:
    """Prompts of random tokens on four shared prefixes, half of them greedy."""
    draw = random.Random(seed)
    prefixes = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(18, 40))] for _ in range(4)]
    return [
        Request(
            f"toy-{number}",
            (*draw.choice(prefixes), *(draw.randrange(VOCABULARY) for _ in range(draw.randint(3, 20)))),
            draw.randint(8, 24),
            temperature=0.8 * (number % 2),
            seed=number,
        )
        for number in range(count)
    ]
