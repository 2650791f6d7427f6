"""Whose an unexpected exception is: a replay also asks the allocator for sizes and tables, outside the calls that a trace has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from replayer.content import IntArray
from replayer.failure import CheckFailure

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def raised_inside(error: Exception, objects: Iterable[Any]) -> CheckFailure | None:
    """The failure that ``error`` is if a method of one of ``objects`` raised it or called what did; None if it is not theirs."""
    names = {id(each): getattr(each, "sub_pool_name", "") for each in objects}
    step = error.__traceback__
    while step is not None:
        owner = step.tb_frame.f_locals.get("self")
        if id(owner) in names:
            return CheckFailure(
                "CALL",
                f"{step.tb_frame.f_code.co_name} raised {type(error).__name__}: {' '.join(str(error).split())}",
                str(names[id(owner)]),
            )
        step = step.tb_next
    return None


def ids_in(answer: Any, name: str, pool: str) -> IntArray | None:
    """The ids that a call answered, on the host: int64 or int32 ``[n]``, or None as it is.

    Raises:
        CheckFailure: CALL, the answer is something else.
    """
    if answer is None:
        return None
    if not isinstance(answer, torch.Tensor):
        found = type(answer).__name__
    elif answer.dim() != 1 or answer.dtype not in (torch.int64, torch.int32):
        found = f"a tensor of {str(answer.dtype).removeprefix('torch.')}, shape {list(answer.shape)}"
    else:
        ids: IntArray = answer.detach().cpu().numpy()
        return ids
    raise CheckFailure(
        "CALL", f"{name} answered what names no ids", pool, [], "ids of int64, shape [n], or None", found
    )


def number_in(answer: Any, name: str, pool: str) -> int:
    """The number that a call answered; it may still be on its way from a device.

    Raises:
        CheckFailure: CALL, the answer is something else.
    """
    try:
        number = int(answer)
    except (TypeError, ValueError):
        number = None
    if number is None or not _LEAST <= number <= _MOST:
        found = "None" if answer is None else f"{type(answer).__name__} {str(answer)[:40]}"
        raise CheckFailure("CALL", f"{name} answered no number", pool, [], "a number of 64 bits", found)
    return number
