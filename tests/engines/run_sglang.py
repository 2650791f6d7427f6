"""Serves a seeded workload with ``sglang.Engine`` and its unified memory pool on a CPU, in an environment of `tools/build_sglang_env.sh`.

Conversations of several turns over shared prefixes, one batch a turn, greedy: chats, or random token ids for a model without weights.
The pool is so small that the radix cache evicts, flushes are urgent and pages move.
"""

from __future__ import annotations

import argparse
import os
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.engines.prompts import ChatHistories, TokenChats, chats
from tests.engines.results import RunResult, Stopwatch, has_weights, model_folder, runner_parser

CONTEXT = 1024
VOCABULARY = 49152


def options(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``; the same names, with dashes, are flags of ``sglang.launch_server``."""
    chosen: dict[str, Any] = {
        "model_path": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "triton",
        "enable_unified_memory": True,
        "disable_cuda_graph": True,
        "skip_server_warmup": True,
        "grammar_backend": "none",
        "mem_fraction_static": 0.3,
        "max_total_tokens": arguments.pool_tokens,
        "max_running_requests": arguments.running,
        "page_size": arguments.page_size,
        "context_length": CONTEXT,
        "chunked_prefill_size": 256,
        "swa_full_tokens_ratio": 0.5,
        "random_seed": 1,
    }
    if not has_weights(folder):
        chosen |= {"load_format": "dummy", "skip_tokenizer_init": True}
    return chosen


def environment(lag: int) -> dict[str, str]:
    """Variables that SGLang and the stand-ins read; the scheduler's process inherits them."""
    variables = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "HF_HUB_OFFLINE": "1",
        # Importing the others is most of the time that a run takes.
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models()),
        # Threads that meet at a barrier after each small operation take a hundred times as long on a machine that is busy.
        "OMP_NUM_THREADS": "1",
    }
    if version("sglang") == "0.5.18":
        # Its check of an idle pool counts pages in pending reuse as leaked.
        variables["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"] = "0"
    if lag:
        # Without it no batch comes between two prefills, and non-urgent flushes are rare.
        variables |= {"EVENT_LAG": str(lag), "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP": "1"}
    return variables


def _other_models() -> list[str]:
    """SGLang's modules of models that none of ours is."""
    package = find_spec("sglang")
    assert package is not None and package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0]) / "srt" / "models"
    return sorted(path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "llama"))


def pool_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--pool-tokens", type=int, default=330, help="tokens that the pool holds")
    parser.add_argument("--running", type=int, default=8, help="requests that run at a time, at most")
    parser.add_argument("--lag", type=int, default=0, help="forward-done events lag by this many forwards")


def run(arguments: argparse.Namespace) -> RunResult:
    folder = model_folder(arguments)
    os.environ.update(environment(arguments.lag))
    import sglang

    chosen = options(folder, arguments) | {"skip_tokenizer_init": True, "log_level": "warning"}
    result = RunResult("sglang", version("sglang"), arguments.model, chosen | {"lag": arguments.lag})
    watch = Stopwatch()
    engine = sglang.Engine(**chosen)
    try:
        result.startup_seconds = watch.lap()
        conversations = _conversations(folder, arguments)
        for turn in range(arguments.rounds):
            requests = conversations.turn(turn)
            answers = engine.generate(
                input_ids=[request.input_ids for request in requests],
                sampling_params=[
                    {"temperature": 0.0, "max_new_tokens": request.max_tokens, "ignore_eos": True}
                    for request in requests
                ],
                return_logprob=arguments.logprobs,
            )
            for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
                result.outputs[request.name] = list(answer["output_ids"])
                if arguments.logprobs:
                    pairs = answer["meta_info"]["output_token_logprobs"]
                    result.logprobs[request.name] = [pair[0] for pair in pairs]
                conversations.answered(index, answer["output_ids"])
                for key in ("cached_tokens", "num_retractions"):
                    value = answer["meta_info"].get(key)
                    if value is not None:
                        result.counts[key] = result.counts.get(key, 0) + value
        result.seconds = watch.lap()
        # The scheduler is killed without a goodbye: whatever watches it is given time to write down what it saw.
        time.sleep(arguments.linger)
    finally:
        engine.shutdown()
    return result


def _conversations(folder: Path, arguments: argparse.Namespace) -> ChatHistories | TokenChats:
    # SGLang refuses a request that could not run alone, windows and their margin counted.
    longest = arguments.pool_tokens // 2
    if has_weights(folder):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        return ChatHistories(chats(arguments.requests, arguments.rounds, arguments.seed), tokenizer, longest)
    return TokenChats(
        arguments.requests,
        arguments.seed,
        vocabulary=VOCABULARY,
        longest=longest,
        shared=not arguments.own_prefixes,
    )


def main() -> None:
    parser = runner_parser("Run SGLang's engine on a CPU.", model="tiny_hybrid_swa", requests=20)
    pool_options(parser)
    parser.add_argument(
        "--own-prefixes",
        action="store_true",
        help="no prefix is shared; 0.5.18 fails where requests that share one run together (RecoverSWAWithLockedFull)",
    )
    parser.add_argument("--logprobs", action="store_true", help="log-probability of each token answered, too")
    parser.add_argument(
        "--linger", type=float, default=0.0, help="seconds between the last answer and the end"
    )
    arguments = parser.parse_args()
    run(arguments).write(arguments.out)


if __name__ == "__main__":
    main()
