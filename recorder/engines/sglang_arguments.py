"""The methods of SGLang's sub-pool allocators that are recorded, and what is read of their arguments (names as in SGLang 0.5.23)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from recorder.engines.sglang_tape import ALLOCATES, COUNTS, NO_ARGUMENTS, NO_RESULT, Arguments
from recorder.staging import Captured
from recorder.trace import NONE, EventKind

Reader = Callable[[tuple[Any, ...], dict[str, Any]], Arguments]

EXTEND: Final = (
    "prefix_lens",
    "prefix_lens_cpu",
    "seq_lens",
    "seq_lens_cpu",
    "last_loc",
    "extend_num_tokens",
    "num_new_pages",
)
DECODE: Final = ("seq_lens", "seq_lens_cpu", "last_loc")
_SIDES: Final = {"low": 0, "high": 1}


def readers(
    capture: Callable[[Any], Captured], number: Callable[[Any], int]
) -> dict[str, tuple[EventKind, int, Reader]]:
    """Method name to (kind, form of its result, reader of its arguments).

    Args:
        capture: copies ids.
        number: an event object's number, -1 for None.
    """

    def size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return int(args[0] if args else kwargs["need_size"]), NONE, None, None, None

    def extend(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if kwargs or len(args) != len(EXTEND):
            given = dict.fromkeys(EXTEND) | dict(zip(EXTEND, args, strict=False)) | kwargs
            args = tuple(given[name] for name in EXTEND)
        prefix, prefix_twin, seq, seq_twin, last, tokens, pages = args
        return (
            int(tokens),
            NONE if pages is None else int(pages),
            capture(on_host(prefix, prefix_twin)),
            capture(on_host(seq, seq_twin)),
            capture(last),
        )

    def decode(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if len(args) == 3:
            lens, twin, last = args
        else:
            given = dict(zip(DECODE, args, strict=False), **kwargs)
            lens, twin, last = given["seq_lens"], given["seq_lens_cpu"], given["last_loc"]
        return NONE, NONE, None, capture(on_host(lens, twin)), capture(last)

    def ids(name: str) -> Reader:
        def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            given = args[0] if args else kwargs[name]
            return NONE, NONE, [] if given is None else capture(given), None, None

        return read

    def free(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        given = args[0] if args else kwargs["free_index"]
        pages = args[1] if len(args) > 1 else kwargs.get("_pages")
        return NONE, NONE, [] if given is None else capture(given), capture(pages), None

    def segment(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        given = args[0] if args else kwargs["free_index"]
        start = args[1] if len(args) > 1 else kwargs["start_pos"]
        return int(start), NONE, [] if given is None else capture(given), None, None

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        virtual = args[0] if args else kwargs["virtual_ids"]
        physical = args[1] if len(args) > 1 else kwargs["physical_ids"]
        return NONE, NONE, capture(virtual), capture(physical), None

    def flush(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return int(kwargs["urgent"]), NONE, None, None, None

    def room(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return _SIDES[kwargs["side"]], int(kwargs["min_bytes"]), None, None, None

    def compact(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return _SIDES[kwargs["retreat_side"]], NONE, None, None, None

    def latest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        event = args[0] if args else kwargs["event"]
        return number(event), NONE, None, None, None

    def inflight(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        event = args[0] if args else kwargs["forward_done"]
        written = args[1] if len(args) > 1 else kwargs["out_cache_loc_virtual"]
        return number(event), NONE, capture(written), None, None

    def resize(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        slots = args[0] if args else kwargs["max_slots"]
        ids = kwargs.get("virtual_num_pages")
        return int(slots), NONE if ids is None else int(ids), None, None, None

    def nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return NO_ARGUMENTS

    return {
        "alloc": (EventKind.ALLOC, ALLOCATES, size),
        "alloc_extend": (EventKind.ALLOC_EXTEND, ALLOCATES, extend),
        "alloc_decode": (EventKind.ALLOC_DECODE, ALLOCATES, decode),
        "alloc_with_virtual": (EventKind.ALLOC_WITH_VIRTUAL, NO_RESULT, ids("virtual_pages")),
        "bind": (EventKind.BIND, NO_RESULT, bind),
        "unbind": (
            EventKind.UNBIND,
            NO_RESULT,
            ids("virtual_ids"),
        ),  # SGLang has no such method, kvtape's allocator does
        "free": (EventKind.FREE, NO_RESULT, free),
        "free_segment": (EventKind.FREE_SEGMENT, NO_RESULT, segment),
        "free_group_begin": (EventKind.FREE_GROUP_BEGIN, NO_RESULT, nothing),
        "free_group_end": (EventKind.FREE_GROUP_END, NO_RESULT, nothing),
        # Both public flushes come here, the opportunistic one only if there is something to do.
        "_flush": (EventKind.FLUSH, COUNTS, flush),
        "make_room": (EventKind.MAKE_ROOM, COUNTS, room),
        "compact_holes": (EventKind.COMPACT_HOLES, COUNTS, compact),
        "alloc_physical": (EventKind.ALLOC_PHYSICAL, ALLOCATES, size),
        "free_physical": (EventKind.FREE_PHYSICAL, NO_RESULT, ids("free_index")),
        "cancel_physical_reservation": (EventKind.CANCEL_PHYSICAL, NO_RESULT, ids("free_index")),
        "set_latest_forward_done_event": (EventKind.SET_LATEST_FORWARD_DONE_EVENT, NO_RESULT, latest),
        "set_inflight_forward": (EventKind.SET_INFLIGHT_FORWARD, NO_RESULT, inflight),
        "_set_capacity": (EventKind.RESIZE, NO_RESULT, resize),
        "clear": (EventKind.CLEAR, NO_RESULT, nothing),
    }


def on_host(device_tensor: Any, host_twin: Any) -> Any:
    """Of two tensors with the same lengths the one that is read for nothing."""
    if host_twin is not None and not device_tensor.is_cpu:
        return host_twin
    return device_tensor
