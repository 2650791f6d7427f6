"""The engine: carries out operations (extend, decode, evict, preempt) on a model, its pools and a prefix cache, and keeps what comes out.

What to do next is not decided here but in `replayer.parity.scheduler`, by what room there is or from a schedule. An operation that lacks
room changes nothing that a later one could notice, and is not in the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from replayer.parity.attention import PagedBatch, Rows
from replayer.parity.forwards import forward_done
from replayer.parity.language_model import LanguageModel
from replayer.parity.notices import Notices
from replayer.parity.pools import FULL, WINDOW, KVPools
from replayer.parity.prefix_cache import Node, PrefixCache
from replayer.parity.requests import Generation, Request, Running
from replayer.parity.sampling import choose, top_logprobs
from replayer.parity.schedule import Decode, Evict, Extend, Operation, Preempt


@dataclass(frozen=True)
class _Turn:
    """One request's part in a forward: its tokens from ``begin`` on are computed."""

    running: Running
    begin: int
    tokens: list[int]


class Engine:
    """One run over ``requests``.

    Attributes:
        waiting: requests that are not running, next one first.
        running: requests in the batch, in the order they joined.
        generations: what came out so far, by name.
        schedule: operations carried out so far.
        forwards: how many forwards there were.
    """

    def __init__(
        self,
        model: LanguageModel,
        pools: KVPools,
        requests: Sequence[Request],
        *,
        flushes_between: bool = True,
    ) -> None:
        self.model, self.pools = model, pools
        self.notices = Notices()
        self.cache = PrefixCache(pools.page_size, pools.window.window)
        self.waiting: list[Request] = list(requests)
        self.running: list[Running] = []
        self.generations = {request.name: Generation() for request in requests}
        self.schedule: list[Operation] = []
        self._flushes_between = flushes_between
        self.forwards = 0
        self._arrived: set[str] = set()

    # -- operations

    def extend(self, requests: Sequence[Request]) -> str | None:
        """Let waiting requests join: reuse what is cached of their prompts, compute the rest (and what they had generated before they
        were preempted), and give each its next token. Returns None, or the name of the pool that is short."""
        joining = [self._on_cached_prefix(request) for request in requests]
        turns = []
        for running in joining:
            tokens = self.tokens_of(running.request)
            turns.append(_Turn(running, running.length, tokens[running.length :]))
        short = self._grow(turns)
        if short is not None:
            for running in joining:
                self._unlock(running)
            return short
        self.schedule.append(Extend(tuple((turn.running.request.name, turn.begin) for turn in turns)))
        for turn in turns:
            request = turn.running.request
            self.waiting.remove(request)
            self.running.append(turn.running)
            self.cache.touch(turn.running.path)
            if request.name not in self._arrived:
                self._arrived.add(request.name)
                self.notices.arrived(request.name, len(request.input_ids))
        self._forward(turns)
        return None

    def decode(self) -> str | None:
        """Give every running request one more token. Returns None, or the name of the pool that is short."""
        turns = [
            _Turn(running, running.length, self.generations[running.request.name].output_ids[-1:])
            for running in self.running
        ]
        short = self._grow(turns)
        if short is None:
            self.schedule.append(Decode(tuple(turn.running.request.name for turn in turns)))
            self._forward(turns)
        return short

    def evict(self, pool: str, pages: int) -> int:
        """Take about ``pages`` pages back from the prefix cache, those of the window pool without their nodes if it is the window pool
        that is short. Returns how many came back, both pools together."""
        full: list[int] = []
        window = self.cache.evict_window(pages) if pool == WINDOW else []
        if not window:
            full, window = self.cache.evict_full(pages)
        if not full and not window:
            window = self.cache.evict_window(pages)
        self.pools.free(FULL, full)
        self.pools.free(WINDOW, window)
        if full or window:
            self.schedule.append(Evict(pool, pages))
        return len(full) + len(window)

    def preempt(self, name: str) -> None:
        """Take a running request's pages away; it waits, first in line, and keeps what it has generated."""
        (running,) = (each for each in self.running if each.request.name == name)
        self.schedule.append(Preempt(name))
        self.notices.preempted(name, running.length)
        self._leave(running)
        self.waiting.insert(0, running.request)

    # -- what they are made of

    def tokens_of(self, request: Request) -> list[int]:
        """The prompt, and what has been generated."""
        return [*request.input_ids, *self.generations[request.name].output_ids]

    def cached_tokens(self, request: Request) -> int:
        """Tokens of the request that could be reused now."""
        return len(self._match(request)) * self.pools.page_size

    def _match(self, request: Request) -> list[Node]:
        # At least one token has to be computed, for its logits.
        prompt = list(request.input_ids)
        most = len(prompt) if self.generations[request.name].output_ids else len(prompt) - 1
        return self.cache.match(prompt, most)

    def _on_cached_prefix(self, request: Request) -> Running:
        path = self._match(request)
        self.cache.lock(path)
        return Running.on_prefix(request, path, self.cache.first_window_page(len(path)), self.pools.page_size)

    def _grow(self, turns: Sequence[_Turn]) -> str | None:
        size = self.pools.page_size
        begins = [turn.begin for turn in turns]
        ends = [turn.begin + len(turn.tokens) for turn in turns]
        last = {pool: [turn.running.last_token_id(pool, size) for turn in turns] for pool in (FULL, WINDOW)}
        found = self.pools.grow(begins, ends, last)
        if isinstance(found, str):
            return found
        for pool, ids in found.items():
            at = 0
            for turn in turns:
                mine = ids[at : at + len(turn.tokens)]
                at += len(turn.tokens)
                turn.running.pages[pool].extend(token // size for token in mine if token % size == 0)
        for turn in turns:
            turn.running.length += len(turn.tokens)
        return None

    def _forward(self, turns: Sequence[_Turn]) -> None:
        device = self.pools.device
        self.forwards += 1
        batch = PagedBatch(
            self.pools, [Rows(turn.begin, turn.running.length, turn.running.pages) for turn in turns]
        )
        input_ids = torch.tensor([token for turn in turns for token in turn.tokens], device=device)
        positions = torch.cat(
            [torch.arange(turn.begin, turn.running.length, device=device) for turn in turns]
        )
        lasts = torch.tensor([len(turn.tokens) for turn in turns]).cumsum(0) - 1
        with torch.no_grad():
            logits = self.model.logits(input_ids, positions, lasts.to(device), batch)
        done = forward_done(device)
        self.pools.forward_launched(done, {name: each.written for name, each in batch.passes.items()})
        if self._flushes_between:
            self.pools.flush_opportunistic()
        done.synchronize()
        self.notices.forward_done(done)
        ids, logprobs = top_logprobs(logits)
        for turn, top_ids, top_values in zip(turns, ids, logprobs, strict=True):
            with self.notices.for_request(turn.running.request.name):
                self._advance(turn.running, top_ids, top_values)

    def _advance(self, running: Running, top_ids: list[int], top_values: list[float]) -> None:
        """Take the next token, share the prompt's pages, let go of what fell out of the window, and leave when that was all."""
        request = running.request
        made = self.generations[request.name]
        number = len(made.output_ids)
        made.output_ids.append(choose(top_ids, top_values, request.temperature, request.seed, number))
        made.forwards.append(self.forwards)
        made.top_ids.append(top_ids)
        made.top_logprobs.append(top_values)
        self._share_prompt(running)
        if len(made.output_ids) == request.max_new_tokens:
            self.notices.finished(request.name, running.length)
            self._leave(running)
        else:
            self._slide_window(running)

    def _share_prompt(self, running: Running) -> None:
        """Put the prompt's whole pages into the prefix cache. What another request has put there meanwhile is used instead."""
        size, prompt = self.pools.page_size, running.request.input_ids
        full, window = running.pages[FULL], running.pages[WINDOW]
        twice: dict[str, list[int]] = {FULL: [], WINDOW: []}
        added = False
        for index in range(len(running.path), len(prompt) // size):
            parent = running.path[-1] if running.path else None
            tokens = prompt[index * size : (index + 1) * size]
            node = self.cache.child(parent, tokens)
            if node is None:
                node = self.cache.add(parent, tokens, full[index], window[index])
            else:
                twice[FULL].append(full[index])
                full[index] = node.full_page
                if node.window_page is None:
                    node.window_page = window[index]
                else:
                    twice[WINDOW].append(window[index])
                    window[index] = node.window_page
            self.cache.lock_one(node)
            running.path.append(node)
            added = True
        if added:
            self.cache.touch(running.path)
        for pool, pages in twice.items():
            self.pools.free(pool, pages)

    def _slide_window(self, running: Running) -> None:
        size = self.pools.page_size
        begin = self.pools.window.first_position_read(running.length) // size
        gone = []
        for index in range(running.window_begin, begin):
            if index < len(running.path):
                self.cache.unlock_window(running.path[index])
            else:
                gone.append(running.pages[WINDOW][index])
            running.pages[WINDOW][index] = 0
        running.window_begin = max(begin, running.window_begin)
        self.pools.free(WINDOW, gone)

    def _leave(self, running: Running) -> None:
        self.running.remove(running)
        full, window = running.own_pages()
        self.cache.touch(running.path)
        self._unlock(running)
        self.pools.free(FULL, full)
        self.pools.free(WINDOW, window)

    def _unlock(self, running: Running) -> None:
        for node in running.path[running.window_begin :]:
            self.cache.unlock_window(node)
        self.cache.unlock(running.path)
