"""Functions and operators that read a device tensor on the host: to Python, or to size their result."""

from __future__ import annotations

from typing import Any

import torch

from replayer.ledger.places import NONE, Args, Kwargs, Places, Syncs


def _first(args: Args, kwargs: Kwargs) -> Any:
    return args[0] if args else kwargs.get("input", kwargs.get("self"))


def reads_first(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """Reads its first argument."""
    return NONE if places.is_host(_first(args, kwargs)) else (1, 0)


def reads_result_size(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """Finds elements on the device and reads back how many there are; one read for any number of outputs."""
    return NONE if places.only_hosts(args, kwargs) else (1, 0)


def where(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """``where(condition)`` is a nonzero, ``where(condition, a, b)`` a plain kernel."""
    return reads_result_size(places, args, kwargs) if len(args) + len(kwargs) == 1 else NONE


def equal(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """Tensors of different shapes, or without elements, are compared without a look at the data."""
    first, second = (*args, *kwargs.values())[:2]
    if first.shape != second.shape or first.numel() == 0:
        return NONE
    return reads_result_size(places, args, kwargs)


def bincount(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """Reads the minimum, to refuse negative values, and the maximum, to size the result."""
    tensor = _first(args, kwargs)
    if tensor.numel() == 0 or places.is_host(tensor):
        return NONE
    return (1 if tensor.dtype == torch.uint8 else 2), 0


def repeat_interleave(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """Reads the sum of a tensor of repeats, to size the result, unless ``output_size`` gives it."""
    if kwargs.get("output_size") is not None:
        return NONE
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0] if args else None)
    if not isinstance(repeats, torch.Tensor) or places.is_host(repeats):
        return NONE
    return 1, 0


def isin(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """Compares each element with each, or, where those would be too many comparisons, makes both ``unique`` first: two reads
    (``aten/src/ATen/native/TensorCompare.cpp`` of torch 2.13, ``isin_Tensor_Tensor_out`` and ``isin_sorting``)."""
    given = dict(zip(("elements", "test_elements"), args, strict=False)) | kwargs
    elements, tested = given["elements"], given["test_elements"]
    if not isinstance(tested, torch.Tensor) or kwargs.get("assume_unique", False):
        return NONE
    count = elements.numel() if isinstance(elements, torch.Tensor) else 1
    if not count or tested.numel() < int(10 * count**0.145) or places.only_hosts(args, kwargs):
        return NONE
    return 2, 0


def fills(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """``masked_fill`` and ``index_fill`` hand the value to a kernel: one on the device is read first."""
    value = kwargs["value"] if "value" in kwargs else args[-1]
    return (1, 0) if isinstance(value, torch.Tensor) and not places.is_host(value) else NONE


def takes_numbers(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """All its arguments are numbers to torch: each tensor given for one is read."""
    values = (*args, *(value for name, value in kwargs.items() if name != "out"))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return (sum(not places.is_host(tensor) for tensor in tensors), 0) if tensors else NONE


def takes_numbers_after_first(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """The first argument is a tensor, the others are numbers to torch."""
    return takes_numbers(places, args[1:], {name: kwargs[name] for name in kwargs if name != "input"})
