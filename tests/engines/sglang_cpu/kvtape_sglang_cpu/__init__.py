"""An SGLang plugin that lets its unified memory pool serve on a machine without a GPU. Test scaffolding; SGLang's files stay as they are.

Four things are put in place, and only where there is no CUDA:

- a current CUDA stream, whose waits have nothing to wait for (`streams`);
- the two paged allocation kernels, which are Triton only, by SGLang's own naive function (`kernels`);
- the attention backend named ``triton``, the only one the unified pool accepts, in torch operations (`attention`);
- forward-done events that lag, with ``EVENT_LAG=N`` in the environment (`events`): a CPU's events have always fired, so that no flush
  would ever meet an unfinished forward.

The packages ``sgl_kernel`` and ``torchvision`` have to be importable: `tools/build_sglang_env.sh` puts placeholders there. SGLang 0.5.18
and 0.5.23 are known; where they differ, `modules` says how.
"""

from __future__ import annotations

import os

#: Number of newer forwards after which an event is seen as fired; unset, empty or 0: at once, as on any CPU.
LAG_VARIABLE = "EVENT_LAG"
#: File to count waits in, of kvtape's allocator with numbers that come late (`tests.engines.late`); unset or empty: they are there at once.
LATE_VARIABLE = "LATE_NUMBERS"


def install() -> None:
    """Entry point of the group ``sglang.srt.plugins``; SGLang calls it once in each of its processes."""
    import torch

    if torch.cuda.is_available():
        return
    from . import attention, events, faults, kernels, streams

    streams.install()
    kernels.install()
    attention.install()
    lag = int(os.environ.get(LAG_VARIABLE) or 0)
    if lag > 0:
        events.install(lag)
    faults.install(os.environ.get("RECORDER_FAULT", ""))
    numbers = os.environ.get(LATE_VARIABLE)
    if numbers:
        # Of the checkout that the engine runs in, as `faults` has its recorder.
        from tests.engines import late

        late.install(numbers)
