"""Stands in for a package that SGLang imports and kvtape's measurement never calls.

``sgl_kernel`` has no CPU build and ``torchvision``'s wheel does not import beside CPU torch, yet SGLang's allocator modules import both on
the way. The environment's builder installs this file as a module and, for each such package, an ``__init__.py`` that calls `stand_in`.
Every submodule and every name can be imported; using one for anything says which name was used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

VERSION = "0+placeholder"


class PlaceholderName:
    """Any name of a package that is not there; its attributes are placeholders too, so that constants can be read at import."""

    def __init__(self, dotted: str) -> None:
        self._dotted = dotted
        self.__name__ = self.__qualname__ = dotted.rpartition(".")[2]

    def __getattr__(self, attribute: str) -> PlaceholderName:
        return PlaceholderName(_dotted_public_name(self._dotted, attribute))

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{self._dotted} is a placeholder of kvtape's SGLang environment: it can be imported, not used"
        )

    def __repr__(self) -> str:
        return f"<placeholder {self._dotted}>"


class PlaceholderModule(ModuleType):
    """A submodule made up on import."""

    def __getattr__(self, attribute: str) -> PlaceholderName:
        return PlaceholderName(_dotted_public_name(self.__name__, attribute))


class SubmoduleFinder(MetaPathFinder, Loader):
    """Answers the import of any submodule of ``package``."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(self._prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names appear when they are asked for."""


def stand_in(package: str) -> None:
    """Make the module ``package``, which is being imported, answer for everything below it."""
    module: Any = sys.modules[package]
    module.__class__ = PlaceholderModule
    module.__version__ = VERSION
    sys.meta_path.append(SubmoduleFinder(package))


def _dotted_public_name(parent: str, attribute: str) -> str:
    # Python and libraries probe for special names (__path__, __wrapped__, ...); a made-up answer would mislead them.
    if attribute.startswith("__"):
        raise AttributeError(f"{parent} has no attribute {attribute}")
    return f"{parent}.{attribute}"
