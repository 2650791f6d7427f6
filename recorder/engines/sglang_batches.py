"""`alloc_extend` and `alloc_decode`: the wrappers of the calls that take lists of a whole batch.

A copy of a list costs the engine's thread half a microsecond, and there are three and four of them. So that the hook stays within its time,
these two wrappers do what `SglangHooks._call` does for any method, with the method's own parameters and without a function call for each
list. A method with other parameters gets the general wrapper.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from recorder.engines.sglang_arguments import DECODE, EXTEND, on_host
from recorder.engines.sglang_tape import ALLOCATES, DISAGG_GATE, MARK, TRANSFER_GATE, Arguments, write_call
from recorder.staging import INT64, MEMORY, SMALL_IDS
from recorder.trace import NONE, EventKind

if TYPE_CHECKING:
    from recorder.engines.sglang import SglangHooks


def batch_wrapper(hooks: SglangHooks, method: Any, name: str) -> Callable[[Any], Any] | None:
    """What makes the wrapper of `method`, None where it is another method or has other parameters or defaults than SGLang 0.5.23's."""
    known = _WRAPPERS.get(name)
    if known is None:
        return None
    parameters, defaults, make = known
    try:
        found = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return None
    given = {
        name: each.default for name, each in found.items() if each.default is not inspect.Parameter.empty
    }
    is_known = tuple(found) == ("self", *parameters) and given == defaults
    return (lambda original: make(hooks, original)) if is_known else None


def _extend(hooks: SglangHooks, original: Any) -> Any:
    recorder, calls, capture = hooks.recorder, hooks.recorder.calls, hooks.recorder.staging.capture
    on_this_host = hooks.recorder.staging.only_host
    kind = int(EventKind.ALLOC_EXTEND)

    def alloc_extend(
        allocator: Any,
        prefix_lens: Any,
        prefix_lens_cpu: Any,
        seq_lens: Any,
        seq_lens_cpu: Any,
        last_loc: Any,
        extend_num_tokens: Any,
        num_new_pages: Any = None,
    ) -> Any:
        here = calls.here
        attributes = allocator.__dict__
        pool = attributes.get(MARK)
        if pool is None or here.depth or not recorder.active:
            return original(
                allocator,
                prefix_lens,
                prefix_lens_cpu,
                seq_lens,
                seq_lens_cpu,
                last_loc,
                extend_num_tokens,
                num_new_pages,
            )
        arguments: Arguments | None = None
        try:
            session = pool.session or pool.begin()
            here.asked = None
            if attributes.get(DISAGG_GATE) is not None or attributes.get(TRANSFER_GATE) is not None:
                hooks.listen_to_gates(pool.tape, allocator)
            queue = pool.queue
            if (len(queue) < session.most_items and not session.drops_waiting) or session.has_room():
                count = last_loc.numel()
                if (
                    count <= SMALL_IDS
                    and on_this_host
                    and last_loc.is_cpu
                    and last_loc.dtype is INT64
                    and last_loc.is_contiguous()
                    and prefix_lens.numel() == count
                    and prefix_lens.is_cpu
                    and prefix_lens.dtype is INT64
                    and prefix_lens.is_contiguous()
                    and seq_lens.numel() == count
                    and seq_lens.is_cpu
                    and seq_lens.dtype is INT64
                    and seq_lens.is_contiguous()
                ):
                    size = count * 8
                    prefix, seq, last = prefix_lens.data_ptr(), seq_lens.data_ptr(), last_loc.data_ptr()
                    arguments = (
                        extend_num_tokens,
                        NONE if num_new_pages is None else num_new_pages,
                        MEMORY[prefix : prefix + size],
                        MEMORY[seq : seq + size],
                        MEMORY[last : last + size],
                    )
                else:
                    arguments = (
                        extend_num_tokens,
                        NONE if num_new_pages is None else num_new_pages,
                        capture(on_host(prefix_lens, prefix_lens_cpu)),
                        capture(on_host(seq_lens, seq_lens_cpu)),
                        capture(last_loc),
                    )
        except Exception as problem:
            recorder.fail(problem)
        here.depth = 1
        try:
            result = original(
                allocator,
                prefix_lens,
                prefix_lens_cpu,
                seq_lens,
                seq_lens_cpu,
                last_loc,
                extend_num_tokens,
                num_new_pages,
            )
        except BaseException:
            here.depth = 0
            if arguments is not None:
                hooks.put(session, kind, pool.number, here, arguments)
            raise
        here.depth = 0
        if arguments is not None:
            try:
                if session.drops_waiting:
                    session.put_drops()
                queue.append(
                    (
                        write_call,
                        session.clock_ns(),
                        kind,
                        pool.number,
                        0,
                        here.request,
                        arguments,
                        ALLOCATES,
                        capture(result),
                        here.asked,
                    )
                )
                tape = pool.tape
                tape.calls_to_state -= 1
                if tape.calls_to_state == 0:
                    tape.put_state(session)
            except Exception as problem:
                recorder.fail(problem)
        return result

    return alloc_extend


def _decode(hooks: SglangHooks, original: Any) -> Any:
    recorder, calls, capture = hooks.recorder, hooks.recorder.calls, hooks.recorder.staging.capture
    on_this_host = hooks.recorder.staging.only_host
    kind = int(EventKind.ALLOC_DECODE)

    def alloc_decode(allocator: Any, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
        here = calls.here
        attributes = allocator.__dict__
        pool = attributes.get(MARK)
        if pool is None or here.depth or not recorder.active:
            return original(allocator, seq_lens, seq_lens_cpu, last_loc)
        arguments: Arguments | None = None
        try:
            session = pool.session or pool.begin()
            here.asked = None
            if attributes.get(DISAGG_GATE) is not None or attributes.get(TRANSFER_GATE) is not None:
                hooks.listen_to_gates(pool.tape, allocator)
            queue = pool.queue
            if (len(queue) < session.most_items and not session.drops_waiting) or session.has_room():
                count = last_loc.numel()
                if (
                    count <= SMALL_IDS
                    and on_this_host
                    and last_loc.is_cpu
                    and last_loc.dtype is INT64
                    and last_loc.is_contiguous()
                    and seq_lens.numel() == count
                    and seq_lens.is_cpu
                    and seq_lens.dtype is INT64
                    and seq_lens.is_contiguous()
                ):
                    size = count * 8
                    seq, last = seq_lens.data_ptr(), last_loc.data_ptr()
                    arguments = (NONE, NONE, None, MEMORY[seq : seq + size], MEMORY[last : last + size])
                else:
                    lens = capture(on_host(seq_lens, seq_lens_cpu))
                    arguments = (NONE, NONE, None, lens, capture(last_loc))
        except Exception as problem:
            recorder.fail(problem)
        here.depth = 1
        try:
            result = original(allocator, seq_lens, seq_lens_cpu, last_loc)
        except BaseException:
            here.depth = 0
            if arguments is not None:
                hooks.put(session, kind, pool.number, here, arguments)
            raise
        here.depth = 0
        if arguments is not None:
            try:
                if session.drops_waiting:
                    session.put_drops()
                queue.append(
                    (
                        write_call,
                        session.clock_ns(),
                        kind,
                        pool.number,
                        0,
                        here.request,
                        arguments,
                        ALLOCATES,
                        capture(result),
                        here.asked,
                    )
                )
                tape = pool.tape
                tape.calls_to_state -= 1
                if tape.calls_to_state == 0:
                    tape.put_state(session)
            except Exception as problem:
                recorder.fail(problem)
        return result

    return alloc_decode


_WRAPPERS: Final[dict[str, tuple[tuple[str, ...], dict[str, Any], Callable[..., Any]]]] = {
    "alloc_extend": (EXTEND, {"num_new_pages": None}, _extend),
    "alloc_decode": (DECODE, {}, _decode),
}
