"""Functions that no torch mode sees: waits, and two ways to make a tensor from memory of the host.

They are wrapped while a ledger is open and put back when the last one closes. A wrapper calls the original
and then tells the open ledgers; those that have no call open do nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import torch


class Listener(Protocol):
    """Who is told: a ledger."""

    def waited(self, operation: str) -> None:
        """The host waited for the device."""

    def made_on_host(self, tensor: torch.Tensor) -> None:
        """A tensor was made from memory of the host."""


class _Hook(NamedTuple):
    owner: Any
    name: str
    label: str
    tell: Callable[[Listener, str, Any], None]


def _waited(listener: Listener, label: str, result: Any) -> None:
    listener.waited(label)


def _made_on_host(listener: Listener, label: str, result: Any) -> None:
    listener.made_on_host(result)


# `torch.Stream` and `torch.Event`, the device-independent base types, are built in and cannot be wrapped.
_HOOKS: Final = (
    _Hook(torch.cuda, "synchronize", "torch.cuda.synchronize", _waited),
    _Hook(torch.cuda.Stream, "synchronize", "torch.cuda.Stream.synchronize", _waited),
    _Hook(torch.cuda.Event, "synchronize", "torch.cuda.Event.synchronize", _waited),
    _Hook(torch.cpu, "synchronize", "torch.cpu.synchronize", _waited),
    _Hook(torch.accelerator, "synchronize", "torch.accelerator.synchronize", _waited),
    _Hook(torch, "from_numpy", "torch.from_numpy", _made_on_host),
    _Hook(torch, "frombuffer", "torch.frombuffer", _made_on_host),
)

_listeners: list[weakref.ref[Listener]] = []
_originals: dict[_Hook, tuple[Any, Any]] = {}  # hook -> what stood there, the wrapper put there


def listen(listener: Listener) -> Callable[[], None]:
    """Tell ``listener``, held weakly, from now on; returns what ends it, which may be called again."""
    reference = weakref.ref(listener)
    if not _listeners:
        for hook in _HOOKS:
            _install(hook)
    _listeners.append(reference)
    return functools.partial(_stop, reference)


def _stop(reference: weakref.ref[Listener]) -> None:
    if reference not in _listeners:
        return
    _listeners.remove(reference)
    if not _listeners:
        for hook, (original, wrapper) in _originals.items():
            if (
                vars(hook.owner)[hook.name] is wrapper
            ):  # else somebody wrapped it again: leave theirs in place
                setattr(hook.owner, hook.name, original)
        _originals.clear()


def _install(hook: _Hook) -> None:
    original = vars(hook.owner)[hook.name]

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for reference in tuple(_listeners):
            listener = reference()
            if listener is not None:
                hook.tell(listener, hook.label, result)
        return result

    _originals[hook] = (original, wrapper)
    setattr(hook.owner, hook.name, wrapper)
