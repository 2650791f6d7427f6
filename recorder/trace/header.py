"""The header of a trace: where it comes from and which pools its events are about."""

from __future__ import annotations

import uuid as uuid_module
from dataclasses import dataclass, field, fields
from typing import Any, Final

from .errors import DamagedTrace, NewerTrace, NotATrace
from .limits import FORMAT_MAJOR, FORMAT_MINOR, MAX_POOLS
from .schema import LEVELS, SUB_POOL

POOL_KINDS: Final = ("mha", "mla", "mamba", "tokens")
GROW_DIRECTIONS: Final = ("up", "down", "float", "none")
PROVENANCE_KINDS: Final = ("recorded", "driven", "converted", "synthetic", "shrunk")
_SIGNATURE: Final = "kvtape"
_FRAME_KEYS: Final = ("kind", "signature")


@dataclass
class PoolHeader:
    """One sub-pool. Sizes: `page_size` in tokens, `entry_bytes` in bytes per slot over all layers."""

    name: str
    kind: str
    grow_direction: str
    page_size: int
    entry_bytes: int
    layer_num: int
    num_pages: int
    min_page_index: int
    num_virtual_ids: int
    is_id_owner: bool = True
    lazy_compaction: bool = True
    layout: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Provenance:
    """Where the events come from: `kind` is one of PROVENANCE_KINDS, the rest is plain text for people."""

    kind: str
    how: str = ""
    source: str = ""
    hardware: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


def _new_uuid() -> str:
    return str(uuid_module.uuid4())


@dataclass
class Header:
    """Everything a trace says about itself before its first event. Unknown keys of newer writers are in
    `extra`.
    """

    engine: str
    pools: list[PoolHeader]
    provenance: Provenance
    format: tuple[int, int] = (FORMAT_MAJOR, FORMAT_MINOR)
    uuid: str = field(default_factory=_new_uuid)
    producer: str = "kvtape"
    engine_version: str = ""
    allocator: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    total_bytes: int = 0
    device: str = ""
    model: str = ""
    rank: dict[str, Any] = field(default_factory=dict)
    clock_unit: str = "us"
    drop_policy: str = "none"
    level: str = SUB_POOL
    extra: dict[str, Any] = field(default_factory=dict)

    def pool_index(self, name: str) -> int:
        """Index of the pool called `name`; KeyError when there is none."""
        for index, pool in enumerate(self.pools):
            if pool.name == name:
                return index
        raise KeyError(name)


def _plain_map(record: PoolHeader | Provenance | Header) -> dict[str, Any]:
    known = {item.name: getattr(record, item.name) for item in fields(record) if item.name != "extra"}
    return {**record.extra, **known}


def header_to_map(header: Header) -> dict[str, Any]:
    """The msgpack map of the header frame."""
    body = _plain_map(header)
    body["pools"] = [_plain_map(pool) for pool in header.pools]
    body["provenance"] = _plain_map(header.provenance)
    body["format"] = list(header.format)
    return {
        "kind": "header",
        "signature": _SIGNATURE,
        **{key: body[key] for key in body if key not in _FRAME_KEYS},
    }


def check_version(body: dict[str, Any]) -> tuple[int, int]:
    """(major, minor) of a header map. NotATrace when the map is no header of ours, NewerTrace for a newer
    major.
    """
    if body.get("kind") != "header" or body.get("signature") != _SIGNATURE:
        raise NotATrace("the first frame is not the header of a kvtape trace")
    version = body.get("format")
    if (
        not isinstance(version, list)
        or len(version) < 2
        or not all(type(part) is int for part in version[:2])
    ):
        raise DamagedTrace("the header names no format version")
    major, minor = version[0], version[1]
    if major != FORMAT_MAJOR:
        raise NewerTrace(
            f"the trace is of format {major}.{minor}, this kvtape reads format {FORMAT_MAJOR}.x: "
            f"a version of kvtape that knows format {major} is needed"
        )
    return major, minor


def _text(body: dict[str, Any], key: str, default: str | None = None) -> str:
    value = body.get(key, default)
    if not isinstance(value, str):
        raise DamagedTrace(f"the header's {key!r} is not text")
    return value


def _count(body: dict[str, Any], key: str, default: int | None = None, low: int = 0) -> int:
    value = body.get(key, default)
    if type(value) is not int or not low <= value < 1 << 62:
        raise DamagedTrace(f"the header's {key!r} is not a count of at least {low}")
    return value


def _flag(body: dict[str, Any], key: str, default: bool) -> bool:
    value = body.get(key, default)
    if not isinstance(value, bool):
        raise DamagedTrace(f"the header's {key!r} is neither true nor false")
    return value


def _map(body: dict[str, Any], key: str) -> dict[str, Any]:
    value = body.get(key, {})
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise DamagedTrace(f"the header's {key!r} is not a map with text keys")
    return value


def _level(body: dict[str, Any], version: tuple[int, int]) -> str:
    level = _text(body, "level", SUB_POOL)
    if level in LEVELS:
        return level
    if version[1] > FORMAT_MINOR:
        raise NewerTrace(
            f"the trace's calls are of the level {level[:40]!r}, which this kvtape (format {FORMAT_MAJOR}.{FORMAT_MINOR}) does "
            f"not know: a kvtape that knows format {version[0]}.{version[1]} is needed"
        )
    raise DamagedTrace(f"the header's level is {level[:40]!r}, none of {', '.join(LEVELS)}")


def _unknown(
    body: dict[str, Any], record: type[PoolHeader] | type[Provenance] | type[Header]
) -> dict[str, Any]:
    known = {item.name for item in fields(record)} | {"kind", "signature"}
    return {key: value for key, value in body.items() if key not in known}


def _pool_from_map(body: Any) -> PoolHeader:
    if not isinstance(body, dict):
        raise DamagedTrace("a pool of the header is not a map")
    pool = PoolHeader(
        name=_text(body, "name"),
        kind=_text(body, "kind"),
        grow_direction=_text(body, "grow_direction"),
        page_size=_count(body, "page_size", low=1),
        entry_bytes=_count(body, "entry_bytes"),
        layer_num=_count(body, "layer_num"),
        num_pages=_count(body, "num_pages"),
        min_page_index=_count(body, "min_page_index"),
        num_virtual_ids=_count(body, "num_virtual_ids"),
        is_id_owner=_flag(body, "is_id_owner", True),
        lazy_compaction=_flag(body, "lazy_compaction", True),
        layout=_map(body, "layout"),
        extra=_unknown(body, PoolHeader),
    )
    if pool.kind not in POOL_KINDS:
        raise DamagedTrace(f"pool {pool.name!r} is of the unknown kind {pool.kind[:40]!r}")
    if pool.grow_direction not in GROW_DIRECTIONS:
        raise DamagedTrace(f"pool {pool.name!r} grows in the unknown direction {pool.grow_direction[:40]!r}")
    return pool


def header_from_map(body: dict[str, Any]) -> Header:
    """Header of a header map. Raises NotATrace, NewerTrace, or DamagedTrace naming the field."""
    version = check_version(body)
    pools = body.get("pools")
    if not isinstance(pools, list) or len(pools) > MAX_POOLS:
        raise DamagedTrace("the header has no list of pools")
    origin = _map(body, "provenance")
    header = Header(
        format=version,
        uuid=_text(body, "uuid"),
        producer=_text(body, "producer", ""),
        engine=_text(body, "engine", ""),
        engine_version=_text(body, "engine_version", ""),
        allocator=_text(body, "allocator", ""),
        settings=_map(body, "settings"),
        pools=[_pool_from_map(pool) for pool in pools],
        total_bytes=_count(body, "total_bytes", 0),
        device=_text(body, "device", ""),
        model=_text(body, "model", ""),
        rank=_map(body, "rank"),
        clock_unit=_text(body, "clock_unit", "us"),
        drop_policy=_text(body, "drop_policy", "none"),
        level=_level(body, version),
        provenance=Provenance(
            kind=_text(origin, "kind", ""),
            how=_text(origin, "how", ""),
            source=_text(origin, "source", ""),
            hardware=_text(origin, "hardware", ""),
            extra=_unknown(origin, Provenance),
        ),
        extra=_unknown(body, Header),
    )
    if len({pool.name for pool in header.pools}) != len(header.pools):
        raise DamagedTrace("two pools of the header have the same name")
    return header


def validate_header(header: Header) -> None:
    """Check a header that is about to be written. Raises ValueError naming the field."""
    if header.provenance.kind not in PROVENANCE_KINDS:
        raise ValueError(
            f"provenance kind {header.provenance.kind!r} is not one of {', '.join(PROVENANCE_KINDS)}"
        )
    if tuple(header.format) != (FORMAT_MAJOR, FORMAT_MINOR):
        raise ValueError(f"this writer writes format {FORMAT_MAJOR}.{FORMAT_MINOR}, not {header.format}")
    try:
        header_from_map(header_to_map(header))
    except DamagedTrace as problem:
        raise ValueError(problem.reason) from None
