"""What it takes to run the real engines on a CPU, for tests and for the tools that record with them.

Nothing here imports an engine before it runs one: the runners (`run_sglang`, `run_vllm`, `run_transformers`) are started with an engine
environment's interpreter (`tools/build_sglang_env.sh`, `tools/build_vllm_env.sh`), ``python -m tests.engines.run_vllm --out run.json``.
"""
