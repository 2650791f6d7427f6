"""Functions that carry data between host and device, or decide on which side their result is made."""

from __future__ import annotations

from typing import Any

import torch

from replayer.ledger.places import NONE, Args, Kwargs, Places, Syncs


def makes_nothing(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """A kernel on the device, or memory on the host: no synchronisation either way."""
    return NONE


def cpu(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """``t.cpu()``."""
    return NONE if places.is_host(args[0]) else (1, 0)


def to(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """``t.to(device)``, ``t.to(other)``, ``t.to(dtype)`` and their mixtures."""
    device, beside = _target(args, kwargs)
    if beside is not None:
        to_host = places.is_host(beside)
    elif device is not None:
        to_host = _is_host_side(places, args[0], device)
    else:
        return NONE
    return _carries(places, args[0], to_host, may_be_asynchronous=_is_non_blocking(args, kwargs))


def to_on_host(places: Places, args: Args, kwargs: Kwargs) -> bool | None:
    """Where the result of :func:`to` lives; ``None``: where the tensor did."""
    device, beside = _target(args, kwargs)
    if beside is not None:
        return places.is_host(beside)
    return None if device is None else _is_host_side(places, args[0], device)


def cuda(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """``t.cuda(device=None, non_blocking=False)``."""
    return _carries(places, args[0], False, may_be_asynchronous=_is_non_blocking(args, kwargs))


def copy_(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """``target.copy_(source, non_blocking=False)``, as a method or an operator."""
    target = args[0]
    source = args[1] if len(args) > 1 else kwargs["src"]
    to_host, from_host = places.is_host(target), places.is_host(source)
    if to_host == from_host:
        return NONE
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if non_blocking and places.is_pinned(target if to_host else source):
        return NONE
    return (1, 0) if to_host else (0, 1)


def from_data(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """``torch.tensor`` and its kin: data of Python or numpy is laid out on the host, then copied, blocking.

    Tensors in a list are read one by one before that.
    """
    data, device = _data_and_device(args, kwargs)
    if isinstance(data, torch.Tensor):
        if device is None:
            return NONE
        return _carries(places, data, _is_host_side(places, data, device), may_be_asynchronous=False)
    reads = 0
    if isinstance(data, (list, tuple)) and data and isinstance(data[0], torch.Tensor):
        reads = sum(isinstance(element, torch.Tensor) and not places.is_host(element) for element in data)
    return reads, 0 if places.is_host_device(device) else 1


def from_data_on_host(places: Places, args: Args, kwargs: Kwargs) -> bool | None:
    """Where the result of :func:`from_data` lives; ``None``: where the tensor did that was the data."""
    data, device = _data_and_device(args, kwargs)
    if isinstance(data, torch.Tensor):
        return None if device is None else _is_host_side(places, data, device)
    return places.is_host_device(device)


def new_tensor(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """``t.new_tensor(data)`` lands beside ``t`` unless a device is named."""
    device = kwargs.get("device")
    on_host = places.is_host(args[0]) if device is None else places.is_host_device(device)
    data = args[1] if len(args) > 1 else kwargs["data"]
    if isinstance(data, torch.Tensor):
        return _carries(places, data, on_host, may_be_asynchronous=False)
    return NONE if on_host else (0, 1)


def new_tensor_on_host(places: Places, args: Args, kwargs: Kwargs) -> bool | None:
    """Where the result of :func:`new_tensor` lives."""
    device = kwargs.get("device")
    return places.is_host(args[0]) if device is None else places.is_host_device(device)


def factory_on_host(places: Places, args: Args, kwargs: Kwargs) -> bool | None:
    """Where ``torch.arange(...)`` and other factories make their result."""
    return places.is_host_device(kwargs.get("device"))


def like_on_host(places: Places, args: Args, kwargs: Kwargs) -> bool | None:
    """Where ``torch.zeros_like(t)`` and others make their result; ``None``: beside ``t``."""
    device = kwargs.get("device")
    return None if device is None else places.is_host_device(device)


def always_on_host(places: Places, args: Args, kwargs: Kwargs) -> bool | None:
    """The result is a host tensor."""
    return True


def _carries(places: Places, source: torch.Tensor, to_host: bool, *, may_be_asynchronous: bool) -> Syncs:
    from_host = places.is_host(source)
    if from_host == to_host:
        return NONE
    if from_host:  # without page-locked memory a copy blocks, whatever `non_blocking` says
        return NONE if may_be_asynchronous and places.is_pinned(source) else (0, 1)
    return NONE if may_be_asynchronous else (1, 0)  # torch makes page-locked memory for the result itself


def _is_host_side(places: Places, source: torch.Tensor, device: Any) -> bool:
    """Whether ``device`` names the host, for a tensor that is moved there.

    In a stand-in run ``"cpu"`` can mean both sides. It is taken for the device: code for a GPU says
    ``.cpu()`` to reach the host, and ``.to(device)`` for the other way and for tensors already there.
    """
    return False if places.stand_in else places.is_host_device(device)


def _target(args: Args, kwargs: Kwargs) -> tuple[Any, torch.Tensor | None]:
    """The device, or the tensor beside which, ``t.to(...)`` puts its result; two ``None`` where it stays."""
    if "device" in kwargs:
        return kwargs["device"], None
    target = kwargs["other"] if "other" in kwargs else (args[1] if len(args) > 1 else None)
    if isinstance(target, torch.Tensor):
        return None, target
    if isinstance(target, (torch.device, str)) or (isinstance(target, int) and not isinstance(target, bool)):
        return target, None
    return None, None


def _is_non_blocking(args: Args, kwargs: Kwargs) -> bool:
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    flags = [value for value in args[1:] if isinstance(value, bool)]
    return bool(flags and flags[0])


def _data_and_device(args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    return data, kwargs["device"] if "device" in kwargs else (args[2] if len(args) > 2 else None)
