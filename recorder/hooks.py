"""Functions of an engine that are wrapped while recording, and given back afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class _Replaced(NamedTuple):
    owner: Any
    name: str
    original: Any
    wrapper: Any


class Hooks:
    """Every attribute replaced for recording. Off means that this holds nothing, and that nothing of it is left anywhere."""

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._replaced)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """Replace `owner.name` by `make(original)`, where `owner` itself defines it.

        Returns:
            False, with nothing changed, where `owner` does not define `name` (a version without it, or a base class's method, which
            is wrapped there).
        """
        original = vars(owner).get(name)
        if original is None:
            return False
        wrapper = make(original)
        with self._lock:
            self._replaced.append(_Replaced(owner, name, original, wrapper))
            setattr(owner, name, wrapper)
        return True

    def restore(self) -> None:
        """Give everything back, the last first. What somebody else has wrapped since is left to them: our wrapper inside passes
        calls through when recording is off."""
        with self._lock:
            while self._replaced:
                replaced = self._replaced.pop()
                if vars(replaced.owner).get(replaced.name) is replaced.wrapper:
                    setattr(replaced.owner, replaced.name, replaced.original)
