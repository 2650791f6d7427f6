"""What ``t[key]`` and ``t[key] = value`` cost on a GPU, read off their arguments."""

from __future__ import annotations

from typing import Any

import torch

from replayer.ledger.places import NONE, Args, Kwargs, Places, Syncs

_MASKS = (torch.bool, torch.uint8)


class _Key:
    """The parts of an index: how many there are of each sort, and what using them costs."""

    __slots__ = ("advanced", "device_masks", "masks", "new_axes", "reads", "scalars", "uploads")

    def __init__(self, places: Places, key: Any) -> None:
        self.reads = 0  # integers taken from device tensors
        self.uploads = 0  # indices that lie on the host and have to be copied to the device
        self.masks = 0
        self.device_masks = 0  # each is turned into ids by a nonzero on the device
        self.advanced = 0  # tensors and sequences, which select element by element
        self.scalars = 0
        self.new_axes = 0
        for part in key if isinstance(key, tuple) else (key,):
            self._add(places, part)

    def _add(self, places: Places, part: Any) -> None:
        if isinstance(part, torch.Tensor):
            self._add_tensor(places, part)
        elif isinstance(part, slice):
            for bound in (part.start, part.stop, part.step):
                self.reads += isinstance(bound, torch.Tensor) and not places.is_host(bound)
        elif part is None or isinstance(part, bool):
            self.new_axes += 1
        elif part is Ellipsis:
            pass
        elif hasattr(part, "__len__"):  # a list, a range, a numpy array: made into a tensor on the device
            self.advanced += 1
            self.uploads += 1
            if _holds_booleans(part):
                self.masks += 1
                self.device_masks += 1
        else:
            self.scalars += 1

    def _add_tensor(self, places: Places, part: torch.Tensor) -> None:
        on_host = places.is_host(part)
        if part.dtype in _MASKS:
            self.advanced += 1
            self.masks += 1
            if on_host:  # nonzero runs on the host, and its ids, one tensor per dimension, are copied
                self.uploads += max(part.dim(), 1)
            else:
                self.device_masks += 1
        elif part.dim() == 0:
            self.scalars += 1
            self.reads += not on_host
        else:
            self.advanced += 1
            self.uploads += on_host

    def put(self, value: Any, value_on_host: bool, *, accumulate: bool) -> Syncs:
        """The cost of writing ``value`` to the elements that an advanced key selects."""
        is_number = not isinstance(value, torch.Tensor) or value.numel() == 1
        is_one_mask = self.masks == 1 and self.advanced == 1
        if value_on_host and is_number and is_one_mask and not accumulate:
            return self.reads, self.uploads  # torch makes it a masked_fill, the number a kernel argument
        return self.reads + self.device_masks, self.uploads + value_on_host


def _holds_booleans(sequence: Any) -> bool:
    dtype = getattr(sequence, "dtype", None)
    if dtype is not None:
        return str(dtype) == "bool"
    return len(sequence) > 0 and isinstance(sequence[0], bool)


def _is_free(places: Places, key: Any) -> bool:
    """Whether reading with a key costs nothing for certain: the common cases, decided quickly."""
    if isinstance(key, torch.Tensor):
        return key.dtype == torch.int64 and key.dim() > 0 and places.stand_in and id(key) not in places.hosts
    if type(key) is slice:
        return not isinstance(key.start, torch.Tensor) and not isinstance(key.stop, torch.Tensor)
    return type(key) is int


def getitem(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """``args`` are the tensor and the key."""
    target, key = args
    if _is_free(places, key) or places.is_host(target):
        return NONE
    parts = _Key(places, key)
    return parts.reads + parts.device_masks, parts.uploads


def setitem(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """``args`` are the tensor, the key and the value."""
    target, key, value = args
    value_on_host = not isinstance(value, torch.Tensor) or places.is_host(value)
    if places.is_host(target):
        return (0 if value_on_host else 1), 0
    if not value_on_host and _is_free(places, key):
        return NONE
    parts = _Key(places, key)
    if parts.advanced:
        return parts.put(value, value_on_host, accumulate=False)
    if not value_on_host:
        return parts.reads, 0
    # A number fills a slice as a kernel argument, but is copied, from pageable memory, into a single element.
    is_number = not isinstance(value, torch.Tensor) or value.dim() == 0
    is_one_element = parts.scalars == target.dim() and not parts.new_axes
    return parts.reads, int(is_one_element or not is_number)


def index_put(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """``(self, indices, values, accumulate=False)``, as a method, a function or an operator."""
    target = args[0]
    indices = args[1] if len(args) > 1 else kwargs["indices"]
    values = args[2] if len(args) > 2 else kwargs["values"]
    accumulate = bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    values_on_host = places.is_host(values)
    if places.is_host(target):
        return (0 if values_on_host else 1), 0
    return _indices_key(places, indices).put(values, values_on_host, accumulate=accumulate)


def index(places: Places, args: Args, kwargs: Kwargs) -> Syncs:
    """``(self, indices)``: the operator below ``t[key]``."""
    if places.is_host(args[0]):
        return NONE
    key = _indices_key(places, args[1])
    return key.device_masks, key.uploads


def _indices_key(places: Places, indices: Any) -> _Key:
    """The key of an indices argument, where ``None`` is a whole dimension and nothing is read as a number."""
    key = _Key(places, tuple(slice(None) if part is None else part for part in indices))
    key.advanced += key.scalars
    key.reads = key.scalars = 0
    return key
