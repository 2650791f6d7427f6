"""What a runner writes down: the tokens it got for each request, and how fast."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.models import MODELS, default_parent, prepare


@dataclass
class RunResult:
    engine: str
    engine_version: str
    model: str
    options: dict[str, Any]
    #: Token ids that were answered, by request.
    outputs: dict[str, list[int]] = field(default_factory=dict)
    #: Their log-probabilities, by request, from a runner that asks for them.
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    startup_seconds: float = 0.0
    #: From the first request to the last answer.
    seconds: float = 0.0
    #: Figures of the engine's own, such as preemptions.
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def output_tokens(self) -> int:
        return sum(len(ids) for ids in self.outputs.values())

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def write(self, path: Path | None) -> None:
        figures = {
            "requests": len(self.outputs),
            "output_tokens": self.output_tokens,
            "tokens_per_second": round(self.tokens_per_second, 2),
        }
        if path is not None:
            path.write_text(json.dumps(asdict(self) | figures), encoding="utf-8")
        brief = {
            key: value for key, value in asdict(self).items() if key not in ("outputs", "logprobs", "options")
        }
        print(json.dumps(brief | figures), flush=True)


class Stopwatch:
    def __init__(self) -> None:
        self._started = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last lap, to the millisecond."""
        now = time.monotonic()
        elapsed = now - self._started
        self._started = now
        return round(elapsed, 3)


def runner_parser(description: str, *, model: str, requests: int) -> argparse.ArgumentParser:
    """Options that every runner has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file with the outputs")
    parser.add_argument("--model", default=model, choices=sorted(MODELS))
    parser.add_argument("--models", type=Path, default=default_parent(), help="where model folders are kept")
    parser.add_argument("--requests", type=int, default=requests, help="requests at a time")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each conversation")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def model_folder(arguments: argparse.Namespace) -> Path:
    return prepare(arguments.model, arguments.models)


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))
