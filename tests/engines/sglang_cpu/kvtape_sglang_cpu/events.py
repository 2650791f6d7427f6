"""Forward-done events that lag.

They are exchanged where the scheduler hands them to the composite allocator, above the sub-pools: whatever watches the sub-pools sees the
lagging event and its answers, whichever plugin was loaded first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import modules

MOST_QUERIES = 32
HANDOVERS = ("set_latest_forward_done_event", "set_inflight_forward")


class LaggingEvent:
    """Not fired until ``lag`` newer ones were made, somebody waits for it on the host, or it was asked `MOST_QUERIES` times.

    An idle scheduler makes no newer ones and asks thousands of times a second; a real forward would have ended.
    """

    _made = 0

    def __init__(self, lag: int) -> None:
        LaggingEvent._made += 1
        self._fires_at = LaggingEvent._made + lag
        self._waited_for = False
        self._queries = 0

    def query(self) -> bool:
        self._queries += 1
        asked_enough = self._queries > MOST_QUERIES
        return self._waited_for or asked_enough or LaggingEvent._made >= self._fires_at

    def synchronize(self) -> None:
        self._waited_for = True

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


def install(lag: int) -> None:
    for cls in _composites():
        for name in HANDOVERS:
            if name in vars(cls):
                setattr(cls, name, _with_lagging_event(vars(cls)[name], lag))


def _composites() -> set[type]:
    """SGLang's own, also where another plugin has put classes derived from them in their place."""
    return {
        base
        for module in modules.composite_modules()
        for cls in list(vars(module).values())
        if isinstance(cls, type)
        for base in cls.__mro__
        # The old versions keep the sub-pools in the same module.
        if base.__module__ == module.__name__ and base.__name__.startswith("Unified")
    }


def _with_lagging_event(method: Callable[..., Any], lag: int) -> Callable[..., Any]:
    @functools.wraps(method)
    def handover(self: Any, event: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, _lagging(event, lag), *args, **kwargs)

    return handover


def _lagging(event: Any, lag: int) -> LaggingEvent | None:
    """The stand-in of ``event``, the same one each time."""
    if event is None or isinstance(event, LaggingEvent):
        return event
    stand_in = getattr(event, "_kvtape_lagging", None)
    if stand_in is None:
        stand_in = event._kvtape_lagging = LaggingEvent(lag)
    return stand_in
