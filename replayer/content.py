"""What KV bytes should hold, and the stores that hold them.

Every live token has a *stamp*: one 64-bit word made from pool, virtual page, generation of that page, offset in it and how often a
forward has written it. A store keeps the stamps (`StampStore`: one word a token, so that a 57 GiB pool replays on a laptop) or the
bytes grown from them in the pool's real layout (`ByteStore`). The allocator sees either one as its ``kvcache`` and moves and zeroes it
through the two methods it would call on a GPU.

The harness reads and writes with numpy arrays of physical page or token ids; on a CPU these are views of the same memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from replayer.failure import CheckFailure

if TYPE_CHECKING:
    from allocator import UnifiedKVPool

IntArray = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


def same_ids(one: IntArray, other: IntArray) -> bool:
    """Whether two one-dimensional arrays hold the same ids. Of a few, bytes say so in a tenth of the time that numpy takes."""
    if len(one) != len(other):
        return False
    if len(one) < 256 and one.dtype == other.dtype:
        return one.tobytes() == other.tobytes()
    return not np.count_nonzero(one != other)


#: Odd constants: multiplying by them permutes 64-bit words.
_OFFSET = np.uint64(0x9E3779B97F4A7C15)
_WRITTEN = np.uint64(0xC2B2AE3D27D4EB4F)
_PAGE = np.uint64(0xD6E8FEB86659FD93)
_GENERATION = np.uint64(0xA0761D6478BD642F)
_HALF, _LAST, _ODD = np.uint64(32), np.uint64(29), np.uint64(1)


def page_words(pool: int, virtual_pages: IntArray, generations: IntArray) -> Words:
    """The stamp of offset 0 of each page, before any forward wrote it: uint64 ``[n]``, never 0."""
    words = virtual_pages.astype(np.uint64)
    words *= _PAGE
    words += generations.astype(np.uint64) * _GENERATION
    words += np.uint64(pool + 1)
    words ^= words >> _HALF
    words *= _PAGE
    words ^= words >> _LAST
    words |= _ODD
    return words


def offset_words(page_size: int) -> Words:
    """What each offset adds to its page's word: uint64 ``[page_size]``."""
    return np.arange(page_size, dtype=np.uint64) * _OFFSET


def written_words(times_written: npt.NDArray[np.uint8]) -> Words:
    """What having been written by a forward adds, same shape."""
    return times_written.astype(np.uint64) * _WRITTEN


class StoreLog(Protocol):
    """Receives what the allocator does to the bytes, in order. The tensors are the allocator's own until cloned."""

    def moved(self, pool: str, dst_pages: torch.Tensor, src_pages: torch.Tensor) -> None: ...

    def zeroed(self, pool: str, pages: torch.Tensor) -> None: ...


class KVStore(ABC):
    """Base of the stores: the two calls of the allocator, timed and logged."""

    #: "stamp" or "full".
    form: str = ""

    def __init__(self, pool: str, page_size: int, log: StoreLog) -> None:
        self.pool = pool
        self.page_size = page_size
        self._log = log
        self.nanoseconds = 0

    def move_physical_pages(self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int) -> None:
        if page_size != self.page_size or dst_pages.shape != src_pages.shape:
            raise CheckFailure(
                "C6",
                "asked to move other bytes than whole pages",
                self.pool,
                expected=f"as many places as pages, {self.page_size} slots each",
                found=f"{dst_pages.shape[0]} places for {src_pages.shape[0]} pages of {page_size} slots",
            )
        begin = perf_counter_ns()
        self._log.moved(self.pool, dst_pages, src_pages)
        self._copy(dst_pages, src_pages)
        self.nanoseconds += perf_counter_ns() - begin

    @abstractmethod
    def _copy(self, dst_pages: torch.Tensor, src_pages: torch.Tensor) -> None:
        """Copy whole pages."""

    @abstractmethod
    def _zero(self, pages: torch.Tensor) -> None:
        """Zero whole pages."""

    @abstractmethod
    def write_pages(self, physical_pages: IntArray, words: Words) -> None:
        """Put stamps ``[n, page_size]`` on whole pages; 0 leaves zero bytes."""

    @abstractmethod
    def write_tokens(self, physical_tokens: IntArray, words: Words) -> None:
        """Put stamps ``[n]`` at physical token ids."""

    @abstractmethod
    def differing(self, physical_pages: IntArray, words: Words) -> Mask:
        """Where pages do not hold these stamps: bool ``[n, page_size]``."""

    @abstractmethod
    def read_raw(self, physical_pages: IntArray) -> Any:
        """Whatever the store keeps of whole pages, copied to the host: an array or tensor with a row a page."""

    @abstractmethod
    def write_raw(self, physical_pages: IntArray, content: Any) -> None:
        """Put back what `read_raw` gave."""

    def found_words(self, physical_pages: IntArray) -> Words | None:
        """The stamps on pages, uint64 ``[n, page_size]``; None where bytes cannot be read back as stamps."""
        return None


class _ZeroOnHandOut:
    """Token pools are zeroed when handed out (sgl-project/sglang#33974); the allocator calls this if it is there."""

    pool: str
    nanoseconds: int
    _log: StoreLog
    _zero: Callable[[torch.Tensor], None]

    def zero_physical_pages(self, pages: torch.Tensor) -> None:
        begin = perf_counter_ns()
        self._log.zeroed(self.pool, pages)
        self._zero(pages)
        self.nanoseconds += perf_counter_ns() - begin


class StampStore(KVStore):
    """One stamp a token: int64 ``[num_pages, page_size]`` on ``device``."""

    form = "stamp"

    def __init__(self, pool: str, num_pages: int, page_size: int, device: str, log: StoreLog) -> None:
        super().__init__(pool, page_size, log)
        self.words = torch.zeros(num_pages, page_size, dtype=torch.int64, device=device)
        self._on_host = self.words.numpy().view(np.uint64) if self.words.device.type == "cpu" else None
        self._flat = None if self._on_host is None else self._on_host.reshape(-1)

    def _copy(self, dst_pages: torch.Tensor, src_pages: torch.Tensor) -> None:
        self.words.index_copy_(0, dst_pages, self.words.index_select(0, src_pages))

    def _zero(self, pages: torch.Tensor) -> None:
        self.words.index_fill_(0, pages, 0)

    def write_pages(self, physical_pages: IntArray, words: Words) -> None:
        if self._on_host is not None:
            self._on_host[physical_pages] = words
        else:
            self.words[self._to_device(physical_pages)] = self._to_device(words.view(np.int64))

    def write_tokens(self, physical_tokens: IntArray, words: Words) -> None:
        if self._flat is not None:
            self._flat[physical_tokens] = words
        else:
            self.words.view(-1)[self._to_device(physical_tokens)] = self._to_device(words.view(np.int64))

    def differing(self, physical_pages: IntArray, words: Words) -> Mask:
        mask: Mask = self.found_words(physical_pages) != words
        return mask

    def found_words(self, physical_pages: IntArray) -> Words:
        if self._on_host is not None:
            return self._on_host[physical_pages]
        return self.words[self._to_device(physical_pages)].cpu().numpy().view(np.uint64)

    def read_raw(self, physical_pages: IntArray) -> Any:
        return self.found_words(physical_pages).copy()

    def write_raw(self, physical_pages: IntArray, content: Any) -> None:
        self.write_pages(physical_pages, content)

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.words.device)


class ZeroingStampStore(_ZeroOnHandOut, StampStore):
    """`StampStore` of a token pool."""


class ByteStore(KVStore):
    """The pool's real bytes in the shared buffer, so that a band reaching into its neighbour really overwrites it."""

    form = "full"

    def __init__(self, pool: str, buffer: UnifiedKVPool, log: StoreLog) -> None:
        from allocator import kv_store_for

        super().__init__(pool, buffer.page_size_of(pool), log)
        self.rows = kv_store_for(buffer, pool)
        self.spec = buffer.spec(pool)
        self._pages = buffer.pages(pool)
        self._entries = self._pages.view(self._pages.shape[0] * self.page_size, -1)
        self._grow = entry_grower(self.spec)

    def _copy(self, dst_pages: torch.Tensor, src_pages: torch.Tensor) -> None:
        self.rows.move_physical_pages(dst_pages, src_pages, self.page_size)

    def _zero(self, pages: torch.Tensor) -> None:
        self._pages.index_fill_(0, pages, 0)

    def write_pages(self, physical_pages: IntArray, words: Words) -> None:
        slots = physical_pages[:, None] * self.page_size + np.arange(self.page_size)
        self.write_tokens(slots.reshape(-1), words.reshape(-1))

    def write_tokens(self, physical_tokens: IntArray, words: Words) -> None:
        device = self._entries.device
        self._entries[torch.from_numpy(physical_tokens).to(device)] = self._grow(words).to(device)

    def differing(self, physical_pages: IntArray, words: Words) -> Mask:
        if not len(physical_pages):
            return np.zeros(words.shape, dtype=np.bool_)
        found = self._pages[torch.from_numpy(physical_pages).to(self._pages.device)].cpu()
        grown = self._grow(words.reshape(-1)).view(found.shape)
        mask: Mask = (found != grown).view(*words.shape, -1).any(-1).numpy()
        return mask

    def read_raw(self, physical_pages: IntArray) -> Any:
        return self._pages[torch.from_numpy(physical_pages).to(self._pages.device)].cpu()

    def write_raw(self, physical_pages: IntArray, content: Any) -> None:
        self._pages[torch.from_numpy(physical_pages).to(self._pages.device)] = content.to(self._pages.device)


class ZeroingByteStore(_ZeroOnHandOut, ByteStore):
    """`ByteStore` of a token pool."""


#: The 256 values that rows are made of: finite in every dtype, distinct in bfloat16, between -1 and 1.
_VALUES = torch.linspace(-1.0, 1.0, 256, dtype=torch.float64)


def grow_values(words: Words, count: int, salt: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` numbers of ``dtype`` from each stamp, ``[n, count]``; a stamp of 0 gives zeros. ``salt`` tells rows apart."""
    steps = (torch.arange(count, dtype=torch.int64) + (salt << 20)) * 0x2545F4914F6CDD1D | 1
    mixed = torch.from_numpy(words.view(np.int64).copy())[:, None] * steps
    values = (
        _VALUES.to(dtype)[(mixed >> 55) & 0xFF]
        if dtype != torch.uint8
        else ((mixed >> 55) & 0xFF).to(torch.uint8)
    )
    return torch.where(
        torch.from_numpy(words.view(np.int64) == 0)[:, None], torch.zeros((), dtype=dtype), values
    )


def entry_grower(spec: Any) -> Callable[[Words], torch.Tensor]:
    """A function from stamps ``[n]`` to whole entries, uint8 ``[n, entry_bytes]``, every row of every layer different."""
    parts = spec.parts()
    entry_bytes: int = spec.entry_bytes()

    def grow(words: Words) -> torch.Tensor:
        entries = torch.zeros(words.shape[0], entry_bytes, dtype=torch.uint8)
        for number, part in enumerate(parts):
            count = part.row_bytes // part.dtype.itemsize
            for layer in range(spec.layer_num):
                row = grow_values(words, count, number * 1024 + layer, part.dtype)
                start = part.offset + layer * part.layer_stride
                entries[:, start : start + part.row_bytes] = (
                    row.contiguous().view(torch.uint8).view(words.shape[0], part.row_bytes)
                )
        return entries

    return grow
