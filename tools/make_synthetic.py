"""Writes the synthetic traces of `traces/` again: `python tools/make_synthetic.py [FOLDER]`, from the top of a checkout.

Each is a scenario that recorded runs do not contain, made by calling kvtape's own allocator.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.scenario import Scenario


def two_batches_one_event(path: Path) -> None:
    """Two flushes during one forward; all pages of both must come back when its event fires (sgl-project/sglang#39982)."""
    s = Scenario(path, force=True)
    ids = s.alloc("full", 12)
    assert ids
    s.free("full", ids[1:3])
    s.forward_begin("full", 1)
    assert s.flush("full") > 0
    s.free("full", ids[3:5])
    assert s.flush("full") > 0
    s.forward_done(1)
    s.flush("full")
    s.free("full", ids[5:12] + ids[0:1])
    s.flush("full", urgent=True)
    s.close()


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("traces")
    two_batches_one_event(folder / "synthetic_two_batches_one_event.msgpack.zst")
    print(f"wrote {folder / 'synthetic_two_batches_one_event.msgpack.zst'}")


if __name__ == "__main__":
    main()
