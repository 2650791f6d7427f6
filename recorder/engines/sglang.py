"""SGLang's unified memory pool: calls on its sub-pool allocators (`MultiEndedAllocator`, `FloatMultiEndedAllocator`).

Recorded is what happens to an allocator from outside, one event a call: depth 0. Flushes and moves made on the way are recorded with
their depth, so that a reader sees them; a replay drives depth 0 only. What passes the methods by and is recorded as well:

- `_transfer_swa_pages` (`mem_cache/unified_cache/components/swa.py`, 0.5.23) writes `virtual_to_physical` itself after a `bind`: UNBIND;
- the answer of each `event.query()`: what a flush does depends on them;
- move gates: their last answer, as MOVE_GATE when it changes.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from recorder.engines.registry import matches
from recorder.engines.sglang_arguments import Reader, readers
from recorder.engines.sglang_batches import batch_wrapper
from recorder.engines.sglang_header import SAME_PLACEMENT, Engine
from recorder.engines.sglang_requests import RequestHooks, definer
from recorder.engines.sglang_tape import (
    ALLOCATES,
    DISAGG_GATE,
    MARK,
    NO_RESULT,
    TRANSFER_GATE,
    Arguments,
    Tape,
    write_call,
)
from recorder.hooks import MissingFunction
from recorder.process import ThreadState
from recorder.session import Session
from recorder.trace import NONE, EventKind

if TYPE_CHECKING:
    from recorder.process import Recorder

NAME: Final = "sglang"
HOST: Final = "sglang"
VERSIONS: Final = ("0.5.18", "0.5.23")

# 0.5.20 split the allocators out of one module; which of the two is there decides, not the version.
ALLOCATOR_MODULES: Final = (
    "sglang.srt.mem_cache.allocator.unified_sub_pool",
    "sglang.srt.mem_cache.multi_ended_allocator",
)
SWA_MODULE: Final = "sglang.srt.mem_cache.unified_cache.components.swa"
NEEDED: Final = (
    "alloc",
    "alloc_extend",
    "alloc_decode",
    "free",
    "_flush",
    "set_latest_forward_done_event",
    "set_inflight_forward",
    "clear",
)
"""Without one of these a trace would be wrong, so a version that lacks one is not recorded."""
GATES: Final = (DISAGG_GATE, TRANSFER_GATE)
LISTENERS: Final = "_kvtape_on_replaced"
"""Attribute of SGLang's allocator module while it is recorded: functions to be called with the module by whoever puts other classes in the
place of the allocators."""


def installed_version() -> str | None:
    """Version of the SGLang in this environment."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def attach(recorder: Recorder) -> None:
    """Wrap the allocators of the SGLang installed here. Allocators made before are not recorded."""
    version = installed_version() or ""
    SglangHooks(recorder, Engine(NAME, version, matches(version, SAME_PLACEMENT))).attach(_allocator_module())


def _allocator_module() -> Any:
    for name in ALLOCATOR_MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as problem:
            if problem.name is None or not name.startswith(problem.name):
                raise
    raise ImportError(f"SGLang has neither of {', '.join(ALLOCATOR_MODULES)}")


class SglangHooks:
    """Makes the wrappers. One instance a recording; the wrappers hold it and, through it, the recorder."""

    def __init__(self, recorder: Recorder, engine: Engine) -> None:
        self.recorder = recorder
        self._engine = engine
        self._calls = recorder.calls
        self._capture = recorder.staging.capture
        self._tapes: dict[int, Tape] = {}
        self._last_event = 0
        self._asked_classes: set[type] = set()
        self._readers = readers(self._capture, self._number)
        self._wrapped: set[tuple[type, str]] = set()

    def attach(self, module: Any) -> None:
        """Wrap the allocators of `module` (SGLang's, or another with classes of these names and methods), and what is beside them."""
        self.recorder.on_stop(self._take_marks_off)
        self._wrap_classes(module)
        # Another plugin may come after this one and replace them.
        listeners = vars(module).setdefault(LISTENERS, [])
        listeners.append(self._replaced)
        self.recorder.on_stop(partial(self._stop_listening, module))
        self._attach_transfer()
        RequestHooks(self.recorder, self._tapes.values()).attach()

    def _wrap_classes(self, module: Any) -> None:
        constructor = definer(module.MultiEndedAllocator, "__init__")
        if (constructor, "__init__") not in self._wrapped:
            self.recorder.hooks.require(constructor, "__init__", self._constructor)
            self._wrapped.add((constructor, "__init__"))
        for name in NEEDED:
            if definer(module.MultiEndedAllocator, name) is None:
                raise MissingFunction(f"{module.MultiEndedAllocator.__name__} has no {name}")
        for owner in (module.MultiEndedAllocator, getattr(module, "FloatMultiEndedAllocator", None)):
            if owner is not None:
                self._wrap_methods(owner)

    def _replaced(self, module: Any) -> None:
        """Other classes stand where the allocators stood: they are what is recorded from now on."""
        try:
            if self.recorder.active:
                self._wrap_classes(module)
        except Exception as problem:
            self.recorder.fail(problem)

    def _stop_listening(self, module: Any) -> None:
        listeners = vars(module).get(LISTENERS, [])
        if self._replaced in listeners:
            listeners.remove(self._replaced)
        if not listeners:
            vars(module).pop(LISTENERS, None)

    def _wrap_methods(self, owner: type) -> None:
        """Wrap the methods of a class, each where it is defined and once."""
        for name, (kind, form, read) in self._readers.items():
            defining = definer(owner, name)
            if defining is not None and (defining, name) not in self._wrapped:
                self._wrapped.add((defining, name))
                make = batch_wrapper(self, vars(defining)[name], name) or partial(
                    self._call, kind=kind, form=form, read=read
                )
                self.recorder.hooks.wrap(defining, name, make)

    # -- wrappers

    def _constructor(self, original: Any) -> Any:
        def __init__(allocator: Any, *args: Any, **kwargs: Any) -> None:
            original(allocator, *args, **kwargs)
            if self.recorder.active:
                try:
                    buffer = getattr(allocator, "unified_buffer", None)
                    if buffer is None or MARK in allocator.__dict__:
                        return
                    tape = self._tapes.get(id(buffer))
                    if tape is None or tape.buffer() is not buffer:
                        tape = self._tapes[id(buffer)] = Tape(self.recorder, buffer, self._engine)
                        weakref.finalize(buffer, self._buffer_is_gone, id(buffer), tape).atexit = False
                    tape.add(allocator)
                    # A subclass of somebody else's may define methods anew.
                    self._wrap_methods(type(allocator))
                except Exception as problem:
                    self.recorder.fail(problem)

        return __init__

    def _buffer_is_gone(self, number: int, tape: Tape) -> None:
        """The engine has given up a buffer: its file ends here, and with it the writer thread."""
        if self._tapes.get(number) is tape:
            del self._tapes[number]
        if tape.session is not None:
            tape.session.close(seconds=0.0)

    def _call(self, original: Any, kind: EventKind, form: int, read: Reader) -> Any:
        """The wrapper of one method. Written for the engine's thread: what is not needed for most calls is elsewhere."""
        recorder, calls, capture = self.recorder, self._calls, self._capture
        number, shown_when_nested, asks_gates = int(kind), kind in _SHOWN_WHEN_NESTED, kind in _ASKS_GATES
        announces = kind in _ANNOUNCES

        def recorded(allocator: Any, *args: Any, **kwargs: Any) -> Any:
            here = calls.here
            depth = here.depth
            attributes = allocator.__dict__
            pool = attributes.get(MARK)
            if pool is None or not recorder.active or (depth and not shown_when_nested):
                return original(allocator, *args, **kwargs)
            arguments = None
            try:
                session = pool.session or pool.begin()
                if not depth:
                    here.asked = None
                    if asks_gates and (
                        attributes.get(DISAGG_GATE) is not None or attributes.get(TRANSFER_GATE) is not None
                    ):
                        self.listen_to_gates(pool.tape, allocator)
                if announces:
                    here.pool = pool
                if (len(pool.queue) < session.most_items and not session.drops_waiting) or session.has_room():
                    arguments = read(args, kwargs)
            except Exception as problem:
                recorder.fail(problem)
            here.depth = depth + 1
            try:
                result = original(allocator, *args, **kwargs)
            except BaseException:
                here.depth = depth
                if arguments is not None:
                    # The call that raised is the event somebody will want to see.
                    self.put(session, number, pool.number, here, arguments, depth)
                raise
            here.depth = depth
            if arguments is not None:
                try:
                    if session.drops_waiting:  # of events inside this call
                        session.put_drops()
                    pool.queue.append(
                        (
                            write_call,
                            session.clock_ns(),
                            number,
                            pool.number,
                            depth,
                            here.request,
                            arguments,
                            form,
                            capture(result) if form == ALLOCATES else result,
                            None if depth else here.asked,
                        )
                    )
                    if not depth:
                        tape = pool.tape
                        tape.calls_to_state -= 1
                        if tape.calls_to_state == 0:  # below from the start where no states are wanted
                            tape.put_state(session)
                except Exception as problem:
                    recorder.fail(problem)
            return result

        # Code of its own for each method: Python 3.11 and later specialise code to what it calls, and that differs here.
        recorded.__code__ = recorded.__code__.replace(co_name=original.__name__)
        return recorded

    def put(
        self, session: Session, kind: int, pool: int, here: ThreadState, arguments: Arguments, depth: int = 0
    ) -> None:
        """Queue an event without a result, off the beaten track. Never raises."""
        try:
            asked = None if depth else here.asked
            if session.drops_waiting:
                session.put_drops()
            session.queue.append(
                (
                    write_call,
                    session.clock_ns(),
                    kind,
                    pool,
                    depth,
                    here.request,
                    arguments,
                    NO_RESULT,
                    None,
                    asked,
                )
            )
        except Exception as problem:
            self.recorder.fail(problem)

    def _number(self, event: Any) -> int:
        """The number of a forward's event: rises from launch to launch. An event that is recorded anew is a new one."""
        if event is None:
            return NONE
        cls = type(event)
        if cls not in self._asked_classes:
            self._asked_classes.add(cls)
            self.recorder.hooks.wrap(definer(cls, "query"), "query", self._query)
        number = getattr(event, "_kvtape_number", 0)
        pool = self._calls.here.pool
        last = 0 if pool is None else pool.last_event
        if not number or number < last:
            # Not seen yet, or recorded anew: this pool has been told of a later forward since.
            self._last_event += 1
            number = event._kvtape_number = self._last_event
        if pool is not None:
            pool.last_event = number
        return int(number)

    def _query(self, original: Any) -> Any:
        recorder, calls = self.recorder, self._calls

        def query(event: Any) -> Any:
            answer = original(event)
            here = calls.here
            if here.depth and recorder.active:
                number = getattr(event, "_kvtape_number", 0)
                if number:
                    if here.asked is None:
                        here.asked = []
                    here.asked.append((number, bool(answer)))
            return answer

        return query

    def listen_to_gates(self, tape: Tape, allocator: Any) -> None:
        attributes = allocator.__dict__
        for slot in GATES:
            gate = attributes.get(slot)
            if gate is not None and type(gate) is not _Gate:
                setattr(allocator, slot, _Gate(gate, slot, tape, self))

    def gate_changed(self, tape: Tape, slot: str, is_open: bool) -> None:
        """A gate's answer is another one than the last time: an event of all pools, before the call that asked."""
        try:
            was_open = all(tape.gates.values())
            tape.gates[slot] = is_open
            now_open = all(tape.gates.values())
            session = tape.session
            if now_open != was_open and self.recorder.active and session is not None and session.has_room():
                arguments = (int(now_open), NONE, None, None, None)
                self.put(session, int(EventKind.MOVE_GATE), NONE, ThreadState(), arguments)
        except Exception as problem:
            self.recorder.fail(problem)

    # -- what passes the allocators by

    def _attach_transfer(self) -> None:
        """`_transfer_swa_pages` takes the incoming pages' places away without a call on the allocator."""
        try:
            module = importlib.import_module(SWA_MODULE)
        except ModuleNotFoundError:
            return  # before 0.5.20
        for owner in vars(module).values():
            if isinstance(owner, type) and "_transfer_swa_pages" in vars(owner):
                self.recorder.hooks.wrap(owner, "_transfer_swa_pages", self._transfer)

    def _transfer(self, original: Any) -> Any:
        recorder, calls = self.recorder, self._calls

        def transfer(component: Any, allocator: Any, full_value: Any, incoming_full_value: Any) -> Any:
            answer = original(component, allocator, full_value, incoming_full_value)
            if recorder.active:
                try:
                    swa = allocator.swa_attn_allocator
                    pool = swa.__dict__.get(MARK)
                    here = calls.here
                    if pool is not None and not here.depth:
                        session = pool.session or pool.begin()
                        if session.has_room():
                            here.asked = None
                            _, incoming = component._page_pairs(full_value, incoming_full_value)
                            pages = (NONE, NONE, self._capture(incoming), None, None)
                            self.put(session, int(EventKind.UNBIND), pool.number, here, pages)
                except Exception as problem:
                    recorder.fail(problem)
            return answer

        return transfer

    def _take_marks_off(self) -> None:
        for tape in self._tapes.values():
            for reference in tape.allocators:
                allocator = reference()
                if allocator is not None:
                    allocator.__dict__.pop(MARK, None)
                    for slot in GATES:
                        gate = getattr(allocator, slot, None)
                        if isinstance(gate, _Gate):
                            setattr(allocator, slot, gate.gate)
        self._tapes.clear()


_SHOWN_WHEN_NESTED: Final = frozenset({EventKind.FLUSH, EventKind.MAKE_ROOM, EventKind.COMPACT_HOLES})
_ANNOUNCES: Final = frozenset({EventKind.SET_LATEST_FORWARD_DONE_EVENT, EventKind.SET_INFLIGHT_FORWARD})
_ASKS_GATES: Final = _SHOWN_WHEN_NESTED | {
    EventKind.ALLOC,
    EventKind.ALLOC_EXTEND,
    EventKind.ALLOC_DECODE,
    EventKind.ALLOC_WITH_VIRTUAL,
    EventKind.ALLOC_PHYSICAL,
}
"""Calls that can move pages, themselves or through a neighbour they ask to make room."""


class _Gate:
    """A move gate that tells when its answer changes."""

    def __init__(self, gate: Callable[[], bool], slot: str, tape: Tape, hooks: SglangHooks) -> None:
        self.gate = gate
        self._slot, self._tape, self._hooks = slot, tape, hooks

    def __call__(self) -> bool:
        is_open = self.gate()
        if bool(is_open) != self._tape.gates.get(self._slot, True):
            self._hooks.gate_changed(self._tape, self._slot, bool(is_open))
        return is_open
