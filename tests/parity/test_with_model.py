"""SmolLM2-135M and transformers' own code: paged attention against theirs, and the command from the shell."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from replayer.parity.engine import Engine
from replayer.parity.flushes import FlushLog
from replayer.parity.language_model import LanguageModel
from replayer.parity.model import PACKAGES, WHEEL, TransformersModel, load
from replayer.parity.pools import Allocation, KVPools, Layout
from replayer.parity.prompts import load_prompts
from replayer.parity.requests import Request
from replayer.parity.scheduler import Limits, serve
from tests.parity.toy import toy_requests


def _installed() -> bool:
    try:
        importlib.metadata.version(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return False
    return all(importlib.util.find_spec(name) is not None for name in PACKAGES)


pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not _installed(),
        reason="kvtape[model] is not installed (tools/build_model_env.sh builds an environment)",
    ),
]
LIMITS = Limits(max_running=4, max_prefill_tokens=96)


def served(model: LanguageModel, requests: list[Request], layout: Layout, tokens: int) -> tuple[Engine, int]:
    with FlushLog("cpu") as log:
        engine = Engine(model, KVPools(model.shape, layout, Allocation(tokens), log), requests)
        serve(engine, LIMITS)
        return engine, log.summary()["pages_moved"]


def assert_same_logprobs(engine: Engine, requests: list[Request], dense: Any, atol: float) -> None:
    """``dense``: text to logits of all its tokens, by the model without pools."""
    for request in requests:
        made = engine.generations[request.name]
        text = [*request.input_ids, *made.output_ids[:-1]]
        expected = torch.log_softmax(dense(text)[len(request.input_ids) - 1 :].float(), -1)
        for number, (ids, logprobs) in enumerate(zip(made.top_ids, made.top_logprobs, strict=True)):
            torch.testing.assert_close(expected[number][ids], torch.tensor(logprobs), rtol=0, atol=atol)


def tiny_config(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        **changes,
    }


def test_a_tiny_llama_says_what_it_says_with_transformers_attention() -> None:
    """Random weights, in float64; all layers see everything, as Llama's do."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**tiny_config())).double().eval()
    paged = LlamaForCausalLM(LlamaConfig(**tiny_config())).double()
    paged.load_state_dict(plain.state_dict())
    requests = toy_requests(10)
    engine, moved = served(TransformersModel(paged, "tiny"), requests, Layout(2, None), 220)
    assert moved > 20
    with torch.no_grad():
        assert_same_logprobs(
            engine, requests, lambda text: plain(torch.tensor([text]), use_cache=False).logits[0], 1e-5
        )


def test_a_tiny_gemma_slides_as_transformers_has_it() -> None:
    """Two layers of three with a sliding window, by transformers' own masks."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = tiny_config(
        sliding_window=16, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2
    )
    torch.manual_seed(0)
    plain = Gemma3ForCausalLM(Gemma3TextConfig(**config)).double().eval()
    paged = Gemma3ForCausalLM(Gemma3TextConfig(**config)).double()
    paged.load_state_dict(plain.state_dict())
    requests = toy_requests(10)
    engine, moved = served(TransformersModel(paged, "tiny"), requests, Layout(2, 16), 160)
    assert moved > 20
    with torch.no_grad():
        assert_same_logprobs(
            engine, requests, lambda text: plain(torch.tensor([text]), use_cache=False).logits[0], 1e-5
        )


def test_smollm2_without_a_window_says_what_transformers_generates() -> None:
    """The model as it was trained, on pools in which pages move: token for token what `generate` gives."""
    model, tokenizer = load("cpu")
    requests = [
        Request(request.name, request.input_ids, 8 + 2 * number)
        for number, request in enumerate(load_prompts(tokenizer, 8))
    ]
    engine, moved = served(model, requests, Layout(2, None), 260)
    assert moved > 50
    bare = model._model
    bare.set_attn_implementation("sdpa")
    for request in requests[2::2]:
        ids = torch.tensor([request.input_ids])
        with torch.no_grad():
            generated = bare.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=request.max_new_tokens,
                max_new_tokens=request.max_new_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert generated[0, ids.shape[1] :].tolist() == engine.generations[request.name].output_ids


def command(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            "import sys; from replayer.main import main; sys.exit(main())",
            *("parity", "--device", "cpu", "--json", *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_the_command_from_the_shell() -> None:
    code, found = command("--prompts", "4", "--strategy", "batched,device")
    assert (code, found["verdict"], found["hardware"], found["dtype"]) == (0, "held", "a CPU", "float32")
    for variant in found["variants"].values():
        assert (variant["exact"], variant["largest_difference"]) == (4, 0.0)
        assert variant["flushes"]["pages_moved"] > 20


def test_a_planted_fault_on_the_model() -> None:
    code, found = command("--prompts", "4", "--strategy", "batched", "--plant", "last-layer")
    assert (code, found["verdict"]) == (1, "failed")
    variant = found["variants"]["batched"]
    assert variant["exact"] < 4 and variant["first_difference"]["request"].startswith("0")
