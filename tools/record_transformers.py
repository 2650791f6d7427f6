"""Makes the trace of transformers' continuous batching again, with kvtape's recorder, on a CPU.

    tools/build_vllm_env.sh ENV
    python tools/record_transformers.py --env ENV

It takes about a minute on two cores.
"""

from __future__ import annotations

from recording import Recording, main

RECORDINGS = (
    Recording(
        "transformers_smollm2",
        "tests.engines.run_transformers --page-size 32 --blocks 32 --requests 12 --rounds 3",
        "transformers' continuous batching on a CPU, SmolLM2-135M, 32 blocks of 32 tokens, 36 chat turns over shared system "
        "prompts",
        100,
    ),
)

if __name__ == "__main__":
    main("transformers", "build_vllm_env.sh", RECORDINGS)
