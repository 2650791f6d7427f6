"""From logits to a token: the most likely 20 and their log-probabilities, and which of them is taken."""

from __future__ import annotations

import math
import random

import torch

TOP: int = 20


def top_logprobs(logits: torch.Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and log-probabilities of the 20 most likely tokens, most likely first. ``logits`` is ``[n, vocabulary]``; the softmax is
    over all of it, in float32."""
    best = torch.log_softmax(logits.float(), dim=-1).topk(min(TOP, logits.shape[-1]), dim=-1)
    return best.indices.tolist(), best.values.tolist()


def choose(ids: list[int], logprobs: list[float], temperature: float, seed: int, number: int) -> int:
    """The token: the most likely one at temperature 0, else one drawn from these by ``seed`` and the token's ``number``, so that what
    else is in the batch, and whether the request was preempted before, makes no difference."""
    if temperature == 0:
        return ids[0]
    weights = [math.exp((logprob - logprobs[0]) / temperature) for logprob in logprobs]
    if not all(math.isfinite(weight) for weight in weights):
        return ids[0]  # keys and values were destroyed; the comparison says so, at this token
    return random.Random(f"{seed}:{number}").choices(ids, weights)[0]
