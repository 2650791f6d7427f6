"""Serves a seeded workload with transformers' continuous batching on a CPU, in an environment of `tools/build_vllm_env.sh`.

Chats over shared system prompts, one batch a turn, greedy, in a pool so small that requests wait for blocks.
"""

from __future__ import annotations

import argparse
import os
from importlib.metadata import version
from typing import Any

from tests.engines.prompts import ChatHistories, chats
from tests.engines.results import RunResult, Stopwatch, model_folder, runner_parser

ANSWER_SECONDS = 120.0


def run(arguments: argparse.Namespace) -> RunResult:
    folder = model_folder(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

    options: dict[str, Any] = {
        "page_size": arguments.page_size,
        "num_blocks": arguments.blocks,
        "max_batch_tokens": arguments.batch_tokens,
    }
    result = RunResult("transformers", version("transformers"), arguments.model, options)
    watch = Stopwatch()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    conversations = ChatHistories(
        chats(arguments.requests, arguments.rounds, arguments.seed, shortest=8, longest=24),
        tokenizer,
        arguments.page_size * arguments.blocks // 2,
    )
    result.startup_seconds = watch.lap()
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    # One manager for all turns: each makes its own pool.
    with model.continuous_batching_context_manager(
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**options),
        timeout=30,
    ) as manager:
        for turn in range(arguments.rounds):
            requests = conversations.turn(turn)
            for request in requests:
                manager.add_request(
                    request.input_ids, request_id=request.name, max_new_tokens=request.max_tokens
                )
            answers = _collect(manager, len(requests))
            for index, request in enumerate(requests):
                result.outputs[request.name] = answers[request.name]
                conversations.answered(index, answers[request.name])
        result.seconds = watch.lap()
    return result


def _collect(manager: Any, count: int) -> dict[str, list[int]]:
    """Token ids of the next ``count`` requests that finish, by request.

    Raises:
        TimeoutError: one took too long, or the manager's thread ended.
    """
    answers: dict[str, list[int]] = {}
    while len(answers) < count:
        answer = manager.get_result(timeout=ANSWER_SECONDS)
        if answer is None:
            raise TimeoutError(f"no answer within {ANSWER_SECONDS:.0f} s, {count - len(answers)} are missing")
        if answer.is_finished():
            answers[answer.request_id] = list(answer.generated_tokens)
    return answers


def main() -> None:
    parser = runner_parser("Run transformers' continuous batching on a CPU.", model="smollm2", requests=12)
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--batch-tokens", type=int, default=256, help="tokens of a batch, at most")
    arguments = parser.parse_args()
    run(arguments).write(arguments.out)


if __name__ == "__main__":
    main()
