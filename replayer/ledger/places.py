"""On which side a tensor lives, also where a CPU stands in for the GPU and both sides are one device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Syncs = tuple[int, int]  # device-to-host reads, blocking host-to-device copies
NONE: Final[Syncs] = (0, 0)


class Places:
    """Tells host tensors from device tensors.

    With a real device the tensors' own ``device`` says it. Where the declared device is the CPU, standing in
    for a GPU, every tensor has that device; a tensor then counts as a device tensor unless it was declared to
    be on the host, was made by a function that makes host tensors, or was computed from such tensors only.

    Attributes:
        stand_in: whether the CPU stands in for the device.
        hosts: the host tensors known in a stand-in run, weakly, by ``id``; always empty otherwise.
    """

    __slots__ = ("__weakref__", "_pinned", "_pinned_memory", "device", "hosts", "stand_in")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stand_in = device.type == "cpu"
        self.hosts: dict[int, weakref.ref[torch.Tensor]] = {}
        self._pinned: set[int] = set()
        # Addresses of pinned memory: a view of a pinned tensor is pinned too.
        self._pinned_memory: dict[int, int] = {}

    def declare_host(self, tensor: torch.Tensor, *, pinned: bool = False) -> None:
        """Take ``tensor`` for a host tensor for as long as it lives; ``pinned`` if a GPU run would pin it."""
        if not self.stand_in:
            return
        identity = id(tensor)
        if identity not in self.hosts:
            hosts, pinned_ones, memory = self.hosts, self._pinned, self._pinned_memory

            def forget(_: weakref.ref[torch.Tensor]) -> None:
                hosts.pop(identity, None)
                pinned_ones.discard(identity)
                for address in [where for where, owner in memory.items() if owner == identity]:
                    del memory[address]

            hosts[identity] = weakref.ref(tensor, forget)
        if pinned:
            self._pinned.add(identity)
            self._pinned_memory[tensor.untyped_storage().data_ptr()] = identity

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether reading ``tensor`` costs no synchronisation."""
        return id(tensor) in self.hosts if self.stand_in else tensor.device.type == "cpu"

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor lies in page-locked memory, from which a copy can be asynchronous."""
        if not self.stand_in:
            return tensor.is_pinned()
        if id(tensor) in self._pinned:
            return True
        return bool(self._pinned_memory) and tensor.untyped_storage().data_ptr() in self._pinned_memory

    def is_host_device(self, device: Any) -> bool:
        """Whether a ``device=`` argument of a factory means the host; ``None`` is torch's default device."""
        if device is None:
            if self.stand_in:
                return True  # code for a GPU names the device; what names none stays on the host
            return torch.get_default_device().type == "cpu"
        if self.stand_in:
            return False  # it names the stand-in
        return _device_type(device) == "cpu"

    def only_hosts(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether there are tensors among the arguments and all of them are on the host."""
        found = False
        for tensor in _tensors(args):
            if not self.is_host(tensor):
                return False
            found = True
        for tensor in _tensors(kwargs.values()):
            if not self.is_host(tensor):
                return False
            found = True
        return found

    def mark_host(self, result: Any) -> None:
        """Declare what a function returned, a tensor or a sequence of some, to be on the host."""
        for tensor in _tensors((result,)):
            self.declare_host(tensor)


def _device_type(device: Any) -> str:
    if isinstance(device, int):
        return torch.device(device).type
    return str(device).partition(":")[0]


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
