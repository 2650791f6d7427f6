"""transformers' continuous batching, really running, recorded: what lives by the trace is what its block tables and ledgers hold."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from recorder.engines.transformers import VERSIONS, installed_version
from tests.engine.recording import read_recording, record, replay_holds

version = installed_version() or ""
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None or not version.startswith(VERSIONS),
        reason=f"transformers {' or '.join(VERSIONS)} is not installed (tools/build_vllm_env.sh)",
    ),
]

REQUESTS = 16
#: Blocks of all layers that the cache has room for: so few that requests are moved out.
ROOM = 24


@pytest.mark.parametrize("layers", ["full", "both"])
def test_trace_says_what_lives(tmp_path: Path, layers: str) -> None:
    """With layers of full attention only, blocks are shared and kept for their contents; with both kinds, two pools share the tensor."""
    trace, steps = record(
        "tests.engine.test_transformers_recording", tmp_path, layers, KVTAPE_STATE_EVERY="16"
    )
    found = read_recording(trace)
    assert len(next(iter(steps.values()))) > 50
    assert found.lives == steps
    assert found.marks["REQUEST_ARRIVE"] == found.marks["REQUEST_FINISH"] == found.named == REQUESTS
    assert found.marks["PREEMPT"] > 0 and found.marks["ALLOC_FAIL"] > 0
    header = found.header
    assert header.engine_version == version and header.device == "cpu"
    by_name = {pool.name: pool for pool in header.pools}
    # Keys and values of 2 heads of 16 in bfloat16 for each layer.
    assert by_name["full_attention"].entry_bytes == 2 * 2 * 16 * 2 * by_name["full_attention"].layer_num
    if layers == "full":
        assert list(by_name) == ["full_attention"] and header.settings["use_prefix_sharing"] is True
    else:
        assert by_name["sliding_attention"].extra["sliding_window"] == 64
        assert sorted(pool.grow_direction for pool in header.pools) == ["down", "up"]
        assert found.without_request == 0
    replay_holds(trace)


def _model(layers: str) -> Any:
    """A random Gemma 3 with both kinds of layers, or a random Llama."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

    sizes: dict[str, Any] = {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    }
    if layers == "full":
        config: Any = LlamaConfig(num_hidden_layers=2, **sizes)
    else:
        config = Gemma3TextConfig(
            num_hidden_layers=3,
            sliding_window=64,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            **sizes,
        )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(torch.bfloat16).eval()


def _serve(steps_path: Path, layers: str) -> None:
    """Serve random requests over shared prompts, and keep what lives after each batch is made by transformers' own books."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.scheduler import FIFOScheduler

    steps: dict[str, list[list[int]]] = {}
    original = FIFOScheduler.schedule_batch

    def schedule_batch(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(scheduler, *args, **kwargs)
        if answer[0]:
            for name, allocator in scheduler.cache.cache_allocators.items():
                held = {block for table in allocator.block_table.values() for block in table}
                steps.setdefault(name, []).append(sorted(held | set(allocator.ledger.cached_blocks)))
        return answer

    FIFOScheduler.schedule_batch = schedule_batch

    from recorder import plugin, process

    plugin.transformers()
    numbers = random.Random(1)
    shared = [[numbers.randrange(3, 900) for _ in range(100)] for _ in range(3)]
    prompts = [
        numbers.choice(shared) + [numbers.randrange(3, 900) for _ in range(numbers.randrange(5, 150))]
        for _ in range(REQUESTS)
    ]
    outputs = _model(layers).generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=50, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32, num_blocks=ROOM, max_batch_tokens=256, scheduler_type="fifo"
        ),
        progress_bar=False,
    )
    assert len(outputs) == REQUESTS
    recorder = process.current()
    assert recorder is not None and recorder.active, "recording has ended early"
    assert [session.dropped for session in recorder.sessions] == [0]
    steps_path.write_text(json.dumps(steps), encoding="utf-8")


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2])
