"""Makes the traces of SGLang's engine and server again, with kvtape's recorder, on a CPU.

    tools/build_sglang_env.sh ENV
    python tools/record_sglang.py --env ENV [NAME...]

All of them take about ten minutes on two cores.
"""

from __future__ import annotations

from recording import LINGER_SECONDS, Recording, main

ENGINE = f"tests.engines.run_sglang --lag 3 --linger {LINGER_SECONDS}"
SERVER = f"tests.engines.serve sglang --lag 3 --linger {LINGER_SECONDS}"
ON_A_CPU = "on a CPU with unified memory and lagging forward-done events"

RECORDINGS = (
    Recording(
        "sglang_tiny_swa_p1",
        f"{ENGINE} --page-size 1 --pool-tokens 330 --requests 20 --rounds 3",
        f"sglang.Engine {ON_A_CPU}, a tiny random hybrid sliding-window model, page 1, 60 requests",
        4_000,
    ),
    Recording(
        "sglang_tiny_swa_p16",
        f"{ENGINE} --page-size 16 --pool-tokens 480 --requests 60 --rounds 5",
        f"sglang.Engine {ON_A_CPU}, a tiny random hybrid sliding-window model, page 16, 300 requests",
        20_000,
    ),
    Recording(
        "sglang_smollm2_swa_p16",
        f"{ENGINE} --model smollm2_swa --page-size 16 --pool-tokens 640 --requests 20 --rounds 3",
        f"sglang.Engine {ON_A_CPU}, SmolLM2-135M with a hybrid sliding-window pattern, page 16, 60 chat turns",
        3_000,
    ),
    Recording(
        "sglang_server_smollm2",
        f"{SERVER} --model smollm2_swa --page-size 16 --pool-tokens 960 --requests 24 --rounds 3",
        f"sglang.launch_server {ON_A_CPU}, SmolLM2-135M with a hybrid sliding-window pattern, page 16; an OpenAI client holding "
        "24 streaming chats of 3 turns, 8 at a time, over shared system prompts, some of the answers aborted",
        2_000,
    ),
)

if __name__ == "__main__":
    main("SGLang", "build_sglang_env.sh", RECORDINGS)
