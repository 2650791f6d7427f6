"""Requests, what is generated for them, and where a running one stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from replayer.parity.pools import FULL, WINDOW
from replayer.parity.prefix_cache import Node


@dataclass(frozen=True)
class Request:
    """One prompt. ``temperature`` 0 is greedy; otherwise tokens are drawn, by ``seed`` and the token's number alone."""

    name: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Generation:
    """What came out for one request: a token a step, at each step the 20 most likely ids and their log-probabilities, and the number of
    the forward that it came from."""

    output_ids: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)


@dataclass(eq=False)
class Running:
    """A request in the batch.

    Attributes:
        length: tokens whose keys and values are in the pools.
        path: nodes of the prefix cache that hold its first pages.
        pages: virtual pages by pool, those of ``path`` first; 0 where the window has left a page behind.
        window_begin: first page it still holds in the window pool.
    """

    request: Request
    length: int
    path: list[Node]
    pages: dict[str, list[int]]
    window_begin: int

    @classmethod
    def on_prefix(cls, request: Request, path: list[Node], window_begin: int, page_size: int) -> Running:
        """A request that reuses the pages of ``path``."""
        window = [node.window_page or 0 for node in path]
        window[:window_begin] = [0] * window_begin
        pages = {FULL: [node.full_page for node in path], WINDOW: window}
        return cls(request, len(path) * page_size, path, pages, window_begin)

    def last_token_id(self, pool: str, page_size: int) -> int:
        """Virtual id of the last token that is in the pool, -1 if there is none."""
        if not self.length:
            return -1
        return self.pages[pool][(self.length - 1) // page_size] * page_size + (self.length - 1) % page_size

    def own_pages(self) -> tuple[list[int], list[int]]:
        """Full and window pages that are this request's alone."""
        shared = len(self.path)
        return self.pages[FULL][shared:], self.pages[WINDOW][max(shared, self.window_begin) :]
