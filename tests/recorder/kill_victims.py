"""Forks victims for `test_kills.py`: everything is imported once, and each victim begins to record at once.

Reads a folder from stdin, answers with the pid of a process that copies a trace's events, through a session, to a file in it.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from recorder.session import Item, Session, Sink
from recorder.staging import Staging
from recorder.trace import FORMAT_MAJOR, FORMAT_MINOR, UNSET, Header, ResultKind, TraceReader
from tests.recorder.recordings import TRACES, settings

SOURCE = TRACES / "sglang_tiny_swa_p16.msgpack.zst"
EVENTS = 6000


def load() -> tuple[Header, list[dict[str, object]]]:
    """The header and the first events of the source, as keyword arguments of `TraceWriter.append`."""
    events: list[dict[str, object]] = []
    with TraceReader(SOURCE) as reader:
        header = replace(reader.header, format=(FORMAT_MAJOR, FORMAT_MINOR))
        for chunk in reader.chunks():
            asked, answers = chunk.queries
            for index in range(len(chunk)):
                if len(events) == EVENTS:
                    return header, events
                result: object = UNSET
                if chunk.result_kind[index] == ResultKind.NULL:
                    result = None
                elif chunk.result_kind[index] == ResultKind.IDS:
                    result = chunk.result.get(index)
                elif chunk.result_kind[index] == ResultKind.INTEGER:
                    result = int(chunk.result_value[index])
                low, high = int(asked.offsets[index]), int(asked.offsets[index + 1])
                events.append(
                    {
                        "kind": int(chunk.kind[index]),
                        "pool": int(chunk.pool[index]),
                        "value": int(chunk.value[index]),
                        "value2": int(chunk.value2[index]),
                        "list0": chunk.list0.get(index),
                        "list1": chunk.list1.get(index),
                        "list2": chunk.list2.get(index),
                        "result": result,
                        "queries": list(
                            zip(asked.values[low:high].tolist(), answers[low:high].tolist(), strict=True)
                        ),
                    }
                )
    return header, events


def write_event(sink: Sink, item: Item) -> None:
    sink.writer.append(time_us=item[1], **item[2])


def victim(folder: Path, header: Header, events: list[dict[str, object]]) -> None:
    """Record until killed."""
    chosen = settings(folder, chunk_events=64, chunk_ms=10, on_overflow="block")
    staging = Staging(chosen.memory // 4)
    session = Session(folder / "run.msgpack.zst", header, chosen, staging, lambda reason: os._exit(9))
    for number, event in enumerate(events):
        if session.has_room():
            session.put((write_event, session.clock(), event))
        if number % 50 == 0:
            time.sleep(0.001)
    time.sleep(60)


def main() -> None:
    """Serve until stdin ends."""
    header, events = load()
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                victim(Path(line.strip()), header, events)
            finally:
                os._exit(8)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main()
