"""Two runs of the same requests, held against each other token by token: exactly, nothing is rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from replayer.parity.requests import Generation

OUTPUT_ID, TOP_IDS, TOP_LOGPROBS = "output id", "top-20 ids", "top-20 log-probabilities"


@dataclass(frozen=True)
class Difference:
    """Where two runs part: request, number of the token among the generated ones (from 0), forward it came from, and in what."""

    request: str
    token: int
    forward: int
    what: str
    expected: str
    found: str


@dataclass(frozen=True)
class Comparison:
    """``exact`` of ``requests`` are equal in all output ids, top ids and log-probabilities. ``largest`` is the largest difference of two
    log-probabilities of the same rank, over the ``tokens`` compared: of each request up to and with the first other output id, since what
    follows answers another text. ``first`` is the first difference in time."""

    requests: int
    exact: int
    tokens: int
    largest: float
    first: Difference | None


def compare(reference: Mapping[str, Generation], run: Mapping[str, Generation]) -> Comparison:
    """``run`` against ``reference``, which have the same requests."""
    exact = tokens = 0
    largest = 0.0
    first: Difference | None = None
    for name, expected in reference.items():
        differs = False
        for found in _differences(name, expected, run[name]):
            differs = True
            if first is None or (found.forward, found.token) < (first.forward, first.token):
                first = found
            break
        exact += not differs
        for token in range(_comparable(expected, run[name])):
            tokens += 1
            largest = max(largest, _largest(expected.top_logprobs[token], run[name].top_logprobs[token]))
    return Comparison(len(reference), exact, tokens, largest, first)


def _comparable(expected: Generation, found: Generation) -> int:
    """Tokens up to and with the first other output id."""
    count = min(len(expected.output_ids), len(found.output_ids))
    for token in range(count):
        if expected.output_ids[token] != found.output_ids[token]:
            return token + 1
    return count


def _differences(name: str, expected: Generation, found: Generation) -> Iterator[Difference]:
    """In the order of tokens; lengths last, as a missing token."""
    for token in range(min(len(expected.output_ids), len(found.output_ids))):
        forward = found.forwards[token]
        for what, left, right in (
            (TOP_LOGPROBS, expected.top_logprobs[token], found.top_logprobs[token]),
            (TOP_IDS, expected.top_ids[token], found.top_ids[token]),
            (OUTPUT_ID, expected.output_ids[token], found.output_ids[token]),
        ):
            if left != right:
                yield Difference(name, token, forward, what, _shown(left), _shown(right))
    if len(expected.output_ids) != len(found.output_ids):
        token = min(len(expected.output_ids), len(found.output_ids))
        forward = found.forwards[-1] if found.forwards else 0
        yield Difference(
            name,
            token,
            forward,
            OUTPUT_ID,
            f"{len(expected.output_ids)} tokens",
            f"{len(found.output_ids)} tokens",
        )


def _largest(left: list[float], right: list[float]) -> float:
    differences = [abs(one - other) for one, other in zip(left, right, strict=True) if one != other]
    return max((math.inf if math.isnan(each) else each for each in differences), default=0.0)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(repr(each) for each in value[:3])}, ...]"
    return repr(value)
