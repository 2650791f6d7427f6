"""vLLM, really running, recorded: what lives by the trace is what lives by vLLM's own reference counts and hashes, at every step."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from recorder.engines.vllm import installed_version
from tests.engine.recording import read_recording, record, replay_holds
from tests.engines.models import prepare

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (tools/build_vllm_env.sh)"
    ),
]

REQUESTS = 16


def test_trace_says_what_lives(tmp_path: Path) -> None:
    """Two sliding-window groups and one of full attention share a pool that is too small: evictions, preemptions, a reset of the cache."""
    model = prepare("gemma3_tiny_swa", tmp_path)
    trace, steps = record("tests.engine.test_vllm_recording", tmp_path, str(model), KVTAPE_STATE_EVERY="16")
    found = read_recording(trace)
    assert len(steps["blocks"]) > 50
    assert found.lives == steps
    assert found.marks["REQUEST_ARRIVE"] == found.marks["REQUEST_FINISH"] == found.named == REQUESTS + 1
    assert found.marks["PREEMPT"] > 0 and found.marks["ALLOC_FAIL"] > 0 and found.marks["CACHE_RESET"] == 1
    # Frees of a step that no request is named for: those of the reset.
    assert found.without_request == 1
    header = found.header
    assert header.engine_version == installed_version() and header.device == "cpu"
    assert header.model == "gemma3_tiny_swa" and str(tmp_path) not in repr(header)
    assert header.settings["prefix_caching"] is True and header.settings["max_model_len"] == 560
    (pool,) = header.pools
    assert (pool.num_pages, pool.page_size, pool.min_page_index) == (60, 32, 1)
    # Two layers of a group, keys and values, 2 heads of 32, bfloat16.
    assert pool.entry_bytes == 2 * 2 * 2 * 32 * 2 and pool.layer_num == 2
    assert [group["kind"] for group in pool.extra["groups"]].count("SlidingWindowSpec") == 2
    replay_holds(trace)


def _serve(steps_path: Path, model: str) -> None:
    """Serve random requests over shared prompts, and keep what lives after each step by vLLM's own books."""
    import os

    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    from vllm.v1.core.sched.scheduler import Scheduler

    steps: list[list[int]] = []
    original = Scheduler.schedule

    def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(scheduler, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            blocks = scheduler.kv_cache_manager.block_pool.blocks
            steps.append(
                [
                    block.block_id
                    for block in blocks
                    if not block.is_null and (block.ref_cnt > 0 or block.block_hash is not None)
                ]
            )
        return output

    Scheduler.schedule = schedule

    from recorder import plugin, process

    plugin.vllm()
    plugin.vllm()  # engines call their plugins more than once
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=560,
        block_size=32,
        num_gpu_blocks_override=60,
        max_num_seqs=8,
        enable_prefix_caching=True,
        enforce_eager=True,
        seed=0,
    )
    numbers = random.Random(3)
    shared = [[numbers.randrange(3, 49000) for _ in range(100)] for _ in range(3)]
    prompts = [
        {
            "prompt_token_ids": numbers.choice(shared)
            + [numbers.randrange(3, 49000) for _ in range(numbers.randrange(5, 150))]
        }
        for _ in range(REQUESTS)
    ]
    options = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, detokenize=False)
    engine.generate(prompts, options, use_tqdm=False)
    assert engine.reset_prefix_cache()
    engine.generate(prompts[:1], options, use_tqdm=False)
    recorder = process.current()
    assert recorder is not None and recorder.active, "recording has ended early"
    assert [session.dropped for session in recorder.sessions] == [0]
    steps_path.write_text(json.dumps({"blocks": steps}), encoding="utf-8")


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2])
