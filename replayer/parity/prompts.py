"""The 80 prompts in ``prompts.json``, written for kvtape: questions to six assistants, whose instructions are the shared prefixes."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from replayer.errors import UsageError
from replayer.parity.requests import Request


def load_prompts(tokenizer: Any, count: int) -> list[Request]:
    """The first ``count`` prompts as token ids, by the tokenizer's chat template.

    Raises:
        UsageError: there are not as many.
    """
    data = json.loads(files("replayer.parity").joinpath("prompts.json").read_text(encoding="utf-8"))
    prompts = data["prompts"]
    if not 1 <= count <= len(prompts):
        raise UsageError(f"--prompts {count}: there are {len(prompts)} prompts")
    requests = []
    for number, prompt in enumerate(prompts[:count]):
        messages = [
            {"role": "system", "content": data["prefixes"][prompt["prefix"]]},
            {"role": "user", "content": prompt["user"]},
        ]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        requests.append(
            Request(
                f"{number:02}-{prompt['prefix']}",
                tuple(ids),
                prompt["new_tokens"],
                float(prompt["temperature"]),
                prompt["seed"],
            )
        )
    return requests
