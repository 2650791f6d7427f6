"""Well-formed files of level ``composite`` with senseless events: every one is either possible, and then holds, or refused as the trace's
fault. A correct composite is never blamed, and nothing else is ever raised."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from recorder.trace import COMPOSITE, EventKind, ImpossibleEvent, TraceWriter
from recorder.trace.errors import TraceError
from replayer.checks import CheckOptions
from replayer.replay import ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.composite_scenario import MAMBA, MAMBA_SWA, SWA, sized
from tests.scenario import PoolShape, header_for

pytestmark = pytest.mark.cpu

LAYOUTS = tuple(sized(layout, 2) for layout in (SWA, MAMBA, MAMBA_SWA))
Event = tuple[EventKind, int, dict[str, Any]]

small = st.integers(-1, 24)
near = st.lists(small, max_size=4)
far = st.lists(st.one_of(small, st.sampled_from([-(2**62), 2**31, 2**40, 2**62])), max_size=4)
#: Tokens of a page or two, as calls that make sense name them.
pages = st.lists(st.integers(1, 8), min_size=1, max_size=2).map(
    lambda pages: [t for p in pages for t in (2 * p, 2 * p + 1)]
)
tokens = st.one_of(pages, pages, near)
sizes = st.integers(0, 4).map(lambda n: 2 * n)


def on_all(kind: EventKind, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Event]:
    return st.tuples(st.just(kind), st.just(-1), st.fixed_dictionaries(arguments))


def on_one(kind: EventKind, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Event]:
    return st.tuples(st.just(kind), st.integers(0, 2), st.fixed_dictionaries(arguments))


starts = st.integers(0, 2).map(lambda n: 2 * n)
none = {"list0": st.just([0]), "list2": st.just([-1])}
events = st.one_of(
    on_all(EventKind.ALLOC, value=sizes),
    on_all(EventKind.ALLOC, value=sizes),
    on_all(EventKind.ALLOC_EXTEND, value=st.just(5), value2=st.sampled_from([-1, 3]), list1=st.just([5]), **none),
    on_all(EventKind.ALLOC_EXTEND, value=st.integers(1, 6), value2=st.just(-1), list0=near, list1=near, list2=near),
    on_all(EventKind.ALLOC_EXTEND_SWA_TAIL, value=st.just(7), value2=st.integers(-1, 8), list1=st.just([7]), **none),
    on_all(EventKind.ALLOC_DECODE, list1=near, list2=near),
    on_all(EventKind.FREE, list0=tokens),
    on_all(EventKind.FREE, list0=far),
    on_all(EventKind.FREE_SEGMENT, value=starts, list0=tokens),
    on_all(EventKind.FREE_SWA, list0=tokens),
    on_all(EventKind.FREE_SWA_SEGMENT, value=starts, list0=tokens),
    on_all(EventKind.FREE_FULL, list0=tokens),
    on_all(EventKind.FREE_FULL_SEGMENT, value=starts, list0=tokens),
    on_all(EventKind.FREE_GROUP_BEGIN),
    on_all(EventKind.FREE_GROUP_END),
    on_all(EventKind.FLUSH_DEFERRED_FULL_FREES),
    on_all(EventKind.ENSURE_CAPACITY, value=st.integers(0, 40), value2=st.integers(-1, 40)),
    on_all(EventKind.SET_FULL_TO_SWA_MAPPING, list0=tokens, list1=tokens),
    on_all(EventKind.PREPARE_MAMBA_ALLOCATION, value=st.integers(0, 6)),
    on_one(EventKind.SLOT_ALLOC, value=st.integers(0, 3)),
    on_one(EventKind.SLOT_FREE, list0=near),
    on_all(EventKind.FLUSH, value=st.integers(0, 1)),
    on_one(EventKind.FLUSH, value=st.integers(0, 1)),
    on_one(EventKind.FREE, list0=tokens),
    on_one(EventKind.ALLOC, value=sizes),
    on_one(EventKind.ALLOC_WITH_VIRTUAL, list0=near),
    on_one(EventKind.ALLOC_PHYSICAL, value=sizes),
    on_one(EventKind.FREE_PHYSICAL, list0=tokens),
    on_one(EventKind.CANCEL_PHYSICAL, list0=tokens),
    on_one(EventKind.FREE_GROUP_BEGIN),
    on_one(EventKind.FREE_GROUP_END),
    on_all(EventKind.FORWARD_BEGIN, value=st.integers(0, 9), list0=near, list1=near),
    on_all(EventKind.FORWARD_DONE, value=st.integers(0, 9)),
    on_all(EventKind.SET_INFLIGHT_FORWARD, value=st.integers(0, 9), list0=near),
    on_all(EventKind.MOVE_GATE, value=st.integers(0, 1)),
    on_one(EventKind.LEASE_BEGIN, value=st.integers(0, 2), list0=near),
    on_one(EventKind.LEASE_END, value=st.integers(0, 2)),
    on_one(EventKind.BACKUP_BEGIN, value=st.integers(0, 3), list0=near, list1=near),
    on_one(EventKind.LOAD_BACK_BEGIN, value=st.integers(0, 3), list0=near, list1=near),
    on_all(EventKind.HOST_COPY_DONE, value=st.integers(0, 3)),
    on_all(EventKind.CLEAR),
    on_one(EventKind.RESIZE, value=st.integers(0, 80), value2=st.just(-1)),
    on_all(EventKind.MARK, value=st.integers(0, 9)),
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(shapes=st.sampled_from(LAYOUTS), soup=st.lists(events, min_size=1, max_size=14), lazy=st.booleans())
@example(  # a window page for a page that is not there, which an alloc then hands out
    shapes=LAYOUTS[0],
    soup=[(EventKind.ALLOC_WITH_VIRTUAL, 1, {"list0": [2]}), (EventKind.ALLOC, -1, {"value": 2})],
    lazy=False,
)
def test_no_event_is_taken_for_the_composites_fault(
    shapes: tuple[PoolShape, ...], soup: list[Event], lazy: bool
) -> None:
    shapes = tuple(sized(shapes, 2, lazy=lazy))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "soup.msgpack.zst"
        header = header_for(shapes, 2560)
        header.level = COMPOSITE
        with TraceWriter(path, header) as writer:
            writer.append(EventKind.MARK, time_us=0, value=0)
            for at, (kind, pool, arguments) in enumerate(soup):
                try:
                    writer.append(kind, time_us=at, pool=min(pool, len(shapes) - 1), **arguments)
                except (TraceError, ValueError):
                    continue  # not even well-formed
        try:
            outcome = replay(
                ReplayOptions(path, TargetOptions(kv="stamp"), CheckOptions(every=1, logprob_every=1))
            )
        except ImpossibleEvent as error:
            assert "event" in str(error)
            return
        failure = outcome.failure
        # What a trace alone may get wrong: see the soup of sub-pools.
        allowed = (
            failure is None
            or (failure.check == "C9" and "lease" in failure.message)
            or failure.check == "C8"
            or (failure.check == "C7" and ("transfer" in failure.message or "load" in failure.message))
        )
        assert allowed, (failure, vars(failure) if failure else None)
