"""Call logs of SGLang's sub-pool allocators (methods and arguments as in SGLang 0.5.23) to trace events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ..trace import (
    NONE,
    UNSET,
    EventKind,
    Header,
    ImpossibleEvent,
    PoolHeader,
    Provenance,
    StateRow,
    TooManyIds,
    TraceWriter,
)
from .errors import LogError
from .fields import Line

STATE_EVERY: Final = 256
"""A state that equals the one kept last is kept again after this many calls."""
DEFAULT_MOVE_CAP: Final = 4096
_MISSING: Final = object()

# Parameters of each method in SGLang 0.5.23, in order; a call may give them by place or by name.
_SIGNATURES: Final[dict[str, tuple[str, ...]]] = {
    "alloc": ("need_size",),
    "alloc_extend": (
        "prefix_lens",
        "prefix_lens_cpu",
        "seq_lens",
        "seq_lens_cpu",
        "last_loc",
        "extend_num_tokens",
        "num_new_pages",
    ),
    "alloc_decode": ("seq_lens", "seq_lens_cpu", "last_loc"),
    "alloc_with_virtual": ("virtual_pages",),
    "bind": ("virtual_ids", "physical_ids"),
    "unbind": ("virtual_ids",),
    "free": ("free_index", "_pages"),
    "free_segment": ("free_index", "start_pos"),
    "free_group_begin": (),
    "free_group_end": (),
    "flush_for_allocation": (),
    "flush_opportunistic": (),
    "make_room": ("side", "min_bytes"),
    "compact_holes": ("retreat_side",),
    "alloc_physical": ("need_size",),
    "free_physical": ("free_index",),
    "cancel_physical_reservation": ("free_index",),
    "set_latest_forward_done_event": ("event",),
    "set_inflight_forward": ("forward_done", "out_cache_loc_virtual"),
    "move_gate": ("open",),
    "clear": (),
}
_SIDES: Final = {"low": 0, "high": 1}


def sglang_header(line: Line, origin: str, ended: str) -> Header:
    """Trace header of the log's header line. `origin`: the log's file name; `ended`: "clean" or "cut"."""
    raw = line.need("header")
    if not isinstance(raw, dict):
        raise line.error("field 'header' is not an object")
    body = Line(line.path, line.number, raw)
    pools = body.need("pools")
    if not isinstance(pools, list) or not pools:
        raise line.error("the header has no pools")
    known = {
        "engine",
        "engine_version",
        "provenance",
        "how",
        "workload",
        "device",
        "total_bytes",
        "pools",
        "model",
    }
    known |= {"settings", "rank", "move_cap", "hardware"}
    settings = raw.get("settings") or {}
    if not isinstance(settings, dict):
        raise line.error("the header's settings are not an object")
    return Header(
        engine=str(raw.get("engine", "sglang")),
        engine_version=str(raw.get("engine_version", "")),
        allocator=str(raw.get("allocator", "MultiEndedAllocator")),
        settings={"placement": "engine", "move_cap": int(raw.get("move_cap", DEFAULT_MOVE_CAP)), **settings},
        pools=[_pool(body, pool) for pool in pools],
        total_bytes=body.integer("total_bytes"),
        device=str(raw.get("device", "")),
        model=str(raw.get("model", "")),
        rank=raw["rank"] if isinstance(raw.get("rank"), dict) else {},
        provenance=Provenance(
            kind=str(raw.get("provenance", "converted")),
            how=str(raw.get("how", "")),
            source=str(raw.get("workload", "")),
            hardware=str(raw.get("hardware", raw.get("device", ""))),
            extra={"log": origin, "log_ended": ended},
        ),
        extra={key: value for key, value in raw.items() if key not in known},
    )


def _pool(header: Line, raw: Any) -> PoolHeader:
    if not isinstance(raw, dict):
        raise header.error("a pool of the header is not an object")
    pool = Line(header.path, header.number, raw)
    known = set(PoolHeader.__dataclass_fields__)
    layout = raw.get("layout") or {}
    if not isinstance(layout, dict):
        raise header.error("a pool's layout is not an object")
    return PoolHeader(
        name=pool.text("name"),
        kind=pool.text("kind"),
        grow_direction=pool.text("grow_direction"),
        page_size=pool.integer("page_size"),
        entry_bytes=pool.integer("entry_bytes"),
        layer_num=pool.integer("layer_num"),
        num_pages=pool.integer("num_pages"),
        min_page_index=pool.integer("min_page_index"),
        num_virtual_ids=pool.integer("num_virtual_ids")
        if pool.has("num_virtual_ids")
        else pool.integer("num_pages"),
        is_id_owner=pool.flag("is_id_owner") if pool.has("is_id_owner") else True,
        lazy_compaction=pool.flag("lazy_compaction") if pool.has("lazy_compaction") else True,
        layout=layout,
        extra={key: value for key, value in raw.items() if key not in known},
    )


class SglangCalls:
    """Turns call lines into events of `writer`, in order."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._pools = {pool.name: number for number, pool in enumerate(writer.header.pools)}
        self._kept_state: Any = None
        self._kept_seq = -STATE_EVERY
        self.states = 0

    def call(self, line: Line) -> None:
        """Add one call line. Raises LogError."""
        op = line.text("op")
        if op not in _SIGNATURES:
            raise line.error(f"unknown op {op[:60]!r}")
        pool = self._pool(line)
        if line.has("seq") and line.integer("seq") != self._writer.events:
            raise line.error(f"seq {line.integer('seq')} where {self._writer.events} must come")
        bound = _bind(line, op)
        fields = _event(line, op, bound)
        try:
            seq = self._writer.append(
                fields.pop("kind"),
                pool=pool,
                time_us=line.integer("t_us"),
                depth=line.integer("depth") if line.has("depth") else 0,
                request=line.integer("request") if line.has("request") else NONE,
                queries=_queries(line),
                **fields,
            )
        except (ImpossibleEvent, TooManyIds) as problem:
            raise line.error(str(problem)) from None
        if line.has("state"):
            self._state(line, seq)

    def _pool(self, line: Line) -> int:
        name = line.text("pool")
        if name not in self._pools:
            raise line.error(f"unknown pool {name[:60]!r}")
        return self._pools[name]

    def _state(self, line: Line, seq: int) -> None:
        raw = line.data["state"]
        if raw == self._kept_state and seq - self._kept_seq < STATE_EVERY:
            return
        if not isinstance(raw, dict):
            raise line.error("field 'state' is not an object")
        row = StateRow(seq)
        for name, figures in raw.items():
            if name not in self._pools or not isinstance(figures, dict):
                raise line.error(f"the state of {name[:60]!r} is not that of a pool of the header")
            row.pools[name] = {key: _figure(line, key, value) for key, value in figures.items()}
        self._writer.state(row)
        self.states += 1
        self._kept_state, self._kept_seq = raw, seq


def _figure(line: Line, name: str, value: Any) -> int | bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):
        return line.as_integer(value, f"state figure {name[:60]!r}")
    try:
        digest = bytes.fromhex(value)
    except ValueError:
        raise line.error(f"state figure {name[:60]!r} is not a digest in hexadecimal") from None
    if len(digest) != 12:
        raise line.error(f"state figure {name[:60]!r} is a digest of {len(digest)} bytes, not 12")
    return digest


def _bind(line: Line, op: str) -> dict[str, Any]:
    """Arguments of the call by parameter name."""
    names = _SIGNATURES[op]
    args, kwargs = line.data.get("args", []), line.data.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise line.error("args must be a list and kwargs an object")
    if len(args) > len(names):
        raise line.error(f"{op} takes {len(names)} arguments, {len(args)} are given")
    bound = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names or name in bound:
            raise line.error(f"{op} has no argument {name[:60]!r}, or it is given twice")
        bound[name] = value
    return bound


def _argument(line: Line, op: str, bound: dict[str, Any], name: str) -> Any:
    if name not in bound:
        raise line.error(f"{op}: argument {name!r} is missing")
    return bound[name]


def _forward(line: Line, op: str, value: Any) -> int:
    """Event number of `{"event": n}` or null."""
    if value is None:
        return NONE
    if isinstance(value, dict) and "event" in value:
        return line.as_integer(value["event"], f"{op}: event")
    raise line.error(f'{op}: the event is neither null nor {{"event": number}}')


def _event(line: Line, op: str, bound: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of TraceWriter.append for one call."""

    def raw(name: str) -> Any:
        return _argument(line, op, bound, name)

    def ids(name: str) -> Any:
        return line.as_ids(raw(name), f"{op}: {name}")

    def optional_ids(name: str) -> Any:
        return None if bound.get(name) is None else ids(name)

    def integer(name: str) -> int:
        return line.as_integer(raw(name), f"{op}: {name}")

    def side(name: str) -> int:
        if raw(name) not in ("low", "high"):
            raise line.error(f"{op}: {name} is neither 'low' nor 'high'")
        return _SIDES[raw(name)]

    if op in ("alloc", "alloc_physical"):
        kind = EventKind.ALLOC if op == "alloc" else EventKind.ALLOC_PHYSICAL
        return {"kind": kind, "value": integer("need_size"), "result": _ids_result(line)}
    if op == "alloc_extend":
        return {
            "kind": EventKind.ALLOC_EXTEND,
            "value": integer("extend_num_tokens"),
            "value2": NONE if bound.get("num_new_pages") is None else integer("num_new_pages"),
            "list0": ids("prefix_lens"),
            "list1": ids("seq_lens"),
            "list2": ids("last_loc"),
            "result": _ids_result(line),
        }
    if op == "alloc_decode":
        return {
            "kind": EventKind.ALLOC_DECODE,
            "list1": ids("seq_lens"),
            "list2": ids("last_loc"),
            "result": _ids_result(line),
        }
    if op == "alloc_with_virtual":
        return {"kind": EventKind.ALLOC_WITH_VIRTUAL, "list0": ids("virtual_pages")}
    if op == "bind":
        return {"kind": EventKind.BIND, "list0": ids("virtual_ids"), "list1": ids("physical_ids")}
    if op == "unbind":
        return {"kind": EventKind.UNBIND, "list0": ids("virtual_ids")}
    if op == "free":
        return {"kind": EventKind.FREE, "list0": ids("free_index"), "list1": optional_ids("_pages")}
    if op == "free_segment":
        return {"kind": EventKind.FREE_SEGMENT, "value": integer("start_pos"), "list0": ids("free_index")}
    if op in ("free_physical", "cancel_physical_reservation"):
        kind = EventKind.FREE_PHYSICAL if op == "free_physical" else EventKind.CANCEL_PHYSICAL
        return {"kind": kind, "list0": ids("free_index")}
    if op in ("flush_for_allocation", "flush_opportunistic"):
        urgent = int(op == "flush_for_allocation")
        return {"kind": EventKind.FLUSH, "value": urgent, "result": _integer_result(line)}
    if op == "make_room":
        return {
            "kind": EventKind.MAKE_ROOM,
            "value": side("side"),
            "value2": integer("min_bytes"),
            "result": _integer_result(line),
        }
    if op == "compact_holes":
        return {
            "kind": EventKind.COMPACT_HOLES,
            "value": side("retreat_side"),
            "result": _integer_result(line),
        }
    if op == "set_latest_forward_done_event":
        return {"kind": EventKind.SET_LATEST_FORWARD_DONE_EVENT, "value": _forward(line, op, raw("event"))}
    if op == "set_inflight_forward":
        return {
            "kind": EventKind.SET_INFLIGHT_FORWARD,
            "value": _forward(line, op, raw("forward_done")),
            "list0": optional_ids("out_cache_loc_virtual"),
        }
    if op == "move_gate":
        if not isinstance(raw("open"), bool):
            raise line.error("move_gate: open is neither true nor false")
        return {"kind": EventKind.MOVE_GATE, "value": int(raw("open"))}
    simple = {
        "free_group_begin": EventKind.FREE_GROUP_BEGIN,
        "free_group_end": EventKind.FREE_GROUP_END,
        "clear": EventKind.CLEAR,
    }
    return {"kind": simple[op]}


def _ids_result(line: Line) -> Any:
    """Ids, None for null, UNSET where the line has no result."""
    value = line.data.get("result", _MISSING)
    if value is _MISSING:
        return UNSET
    return None if value is None else line.as_ids(value, "result")


def _integer_result(line: Line) -> Any:
    return UNSET if line.data.get("result") is None else line.as_integer(line.data["result"], "result")


def _queries(line: Line) -> list[tuple[int, bool]]:
    raw = line.data.get("event_queries") or []
    if not isinstance(raw, list):
        raise line.error("field 'event_queries' is not a list")
    queries = []
    for pair in raw:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], bool):
            raise line.error("an element of event_queries is not a pair of event number and answer")
        queries.append((line.as_integer(pair[0], "the event number of a query"), pair[1]))
    return queries


def convert_sglang(lines: Iterable[Line], writer: TraceWriter) -> dict[str, int]:
    """Add every call line of `lines` (those after the header line) to `writer`; counts for the report."""
    calls = SglangCalls(writer)
    footer: int | None = None
    for line in lines:
        if footer is not None:
            raise line.error("a line after the footer")
        if "footer" in line.data:
            footer = _check_footer(line, writer.events)
            continue
        calls.call(line)
    return {"states": calls.states}


def _check_footer(line: Line, events: int) -> int:
    footer = line.data["footer"]
    count = footer.get("events") if isinstance(footer, dict) else None
    if type(count) is not int:
        raise line.error("the footer has no count of events")
    if count != events:
        raise LogError(
            f"the footer counts {count} calls, the log has {events}", path=line.path, line=line.number
        )
    return count
