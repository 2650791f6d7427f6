"""Serves a seeded workload with ``vllm.LLM`` on a CPU, in this process, in an environment of `tools/build_vllm_env.sh`.

Chats of several turns over shared system prompts, one batch a turn, greedy. The pool is so small that cached blocks are evicted and
requests preempted. A model without weights gets random token ids instead of text.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.engines.prompts import ChatHistories, TokenChats, chats
from tests.engines.results import RunResult, Stopwatch, has_weights, model_folder, runner_parser

VOCABULARY = 49152
#: OpenMP of Intel, from the environment itself: with it a batch runs several times faster.
FAST_OPENMP = Path(sys.prefix) / "lib" / "libiomp5.so"


def options(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``; the same names, with dashes, are flags of its server."""
    chosen: dict[str, Any] = {
        "model": str(folder),
        "dtype": "bfloat16",
        "max_model_len": arguments.context,
        "block_size": 32,
        "num_gpu_blocks_override": arguments.blocks,
        "max_num_seqs": arguments.running,
        "enforce_eager": True,
        "seed": 0,
    }
    if not has_weights(folder):
        chosen |= {"load_format": "dummy", "skip_tokenizer_init": True}
    return chosen


def environment() -> dict[str, str]:
    """Variables for an offline CPU run. OMP_NUM_THREADS stays as it is: vLLM binds its threads itself."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def pool_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=24, help="blocks of 32 tokens in the pool")
    parser.add_argument("--context", type=int, default=560, help="tokens of a sequence, at most")
    parser.add_argument("--running", type=int, default=8, help="requests that run at a time, at most")


def use_fast_openmp() -> None:
    """Start this process again with Intel's OpenMP loaded first, where it is installed."""
    if FAST_OPENMP.exists() and str(FAST_OPENMP) not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = f"{FAST_OPENMP} {os.environ.get('LD_PRELOAD', '')}".strip()
        os.execv(sys.executable, sys.orig_argv)


def run(arguments: argparse.Namespace) -> RunResult:
    folder = model_folder(arguments)
    os.environ.update(environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    from vllm import LLM, SamplingParams

    chosen = options(folder, arguments) | {"disable_log_stats": True}
    result = RunResult("vllm", version("vllm-cpu"), arguments.model, chosen)
    watch = Stopwatch()
    engine = LLM(**chosen)
    count_preemptions = _count_preemptions(engine)
    longest = min(arguments.context, 32 * (arguments.blocks - 1)) - 8
    conversations: ChatHistories | TokenChats
    if has_weights(folder):
        conversations = ChatHistories(
            chats(arguments.requests, arguments.rounds, arguments.seed),
            engine.get_tokenizer(),
            longest,
        )
    else:
        conversations = TokenChats(
            arguments.requests, arguments.seed, vocabulary=VOCABULARY, longest=longest, scale=4
        )
    result.startup_seconds = watch.lap()
    for turn in range(arguments.rounds):
        requests = conversations.turn(turn)
        answers = engine.generate(
            [{"prompt_token_ids": request.input_ids} for request in requests],
            [
                SamplingParams(
                    temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            output_ids = list(answer.outputs[0].token_ids)
            result.outputs[request.name] = output_ids
            conversations.answered(index, output_ids)
            cached = answer.num_cached_tokens or 0
            result.counts["cached_tokens"] = result.counts.get("cached_tokens", 0) + cached
    result.seconds = watch.lap()
    result.counts["preemptions"] = count_preemptions()
    engine.reset_prefix_cache()
    engine.llm_engine.engine_core.shutdown()
    return result


def _count_preemptions(engine: Any) -> Callable[[], int]:
    """Counts what the scheduler preempts; the engine runs in this process."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    counted = 0
    preempt = scheduler._preempt_request

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal counted
        counted += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counting
    return lambda: counted


def main() -> None:
    parser = runner_parser("Run vLLM's engine on a CPU.", model="smollm2", requests=16)
    pool_options(parser)
    arguments = parser.parse_args()
    use_fast_openmp()
    run(arguments).write(arguments.out)


if __name__ == "__main__":
    main()
