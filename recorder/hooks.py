"""Functions of an engine that are wrapped while recording, and given back afterwards."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class MissingFunction(Exception):
    """The engine lacks a function without which a trace of it would be wrong: another version than it says, or a changed one."""


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
        self._over = False

    def __len__(self) -> int:
        return len(self._replaced)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """Replace `owner.name` by `make(original)`, where `owner` itself defines it.

        Returns:
            False, with nothing changed, where `owner` does not define `name` (a version without it, or a base class's method, which
            is wrapped there), or where recording has ended meanwhile.
        """
        original = vars(owner).get(name)
        if original is None:
            return False
        wrapper = make(original)
        with contextlib.suppress(AttributeError, TypeError):
            functools.update_wrapper(wrapper, original)
        with self._lock:
            if self._over:
                return False
            self._replaced.append(_Replaced(owner, name, original, wrapper))
            setattr(owner, name, wrapper)
        return True

    def require(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """`wrap` for what a trace would be wrong without. Raises MissingFunction."""
        if not self.wrap(owner, name, make) and not self._over:
            raise MissingFunction(f"{getattr(owner, '__name__', owner)} has no {name}")

    def restore(self) -> None:
        """Give everything back for good. What somebody else has wrapped since is left to them: our wrapper inside passes calls
        through when recording is off."""
        with self._lock:
            self._over = True
        self.undo(0)

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock; it is not here."""
        self._lock = threading.Lock()

    def undo(self, count: int) -> None:
        """Give back all but the first `count`, the last first."""
        with self._lock:
            while len(self._replaced) > count:
                replaced = self._replaced.pop()
                if vars(replaced.owner).get(replaced.name) is replaced.wrapper:
                    setattr(replaced.owner, replaced.name, replaced.original)
