"""Put on the path of a recorded command by `kvtape record`, for engines that have no plugin system (transformers).

Python imports this at start-up. It does nothing but wait for the engine's module to be imported, and hands over to any `sitecustomize`
that would have been found without it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_WATCHED = "transformers.generation.continuous_batching"
_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the watched module like everybody else, and hooks it once it has been imported."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _WATCHED or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Hooking(spec.loader)
        return spec


class _Hooking(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            from recorder.plugin import transformers

            transformers()
        except Exception as problem:  # whatever it is, the program that is being started must not meet it
            sys.stderr.write(f"kvtape: transformers cannot be recorded: {problem}\n")


def _chain() -> None:
    """Run the sitecustomize that this one stands in front of."""
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("KVTAPE_RECORD"):
    sys.meta_path.insert(0, _AfterImport())
_chain()
