"""What the caller of the allocators holds: which ids it was given, and what it may therefore ask for next.

The model never looks into an allocator. It keeps a random program legal: nothing is freed twice, grown from a token that is gone, or bound
to an id that lives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from replayer.fuzz.shapes import Setting, Shape


@dataclass
class Grant:
    """Tokens of one request in one pool, in order. ``length`` counts positions, freed ones too; ``grows``: its last token is live."""

    pool: str
    page_size: int
    tokens: list[int]
    length: int
    grows: bool = True

    def pages(self) -> list[int]:
        """Pages of the tokens, each once, in the request's order."""
        return list(dict.fromkeys(token // self.page_size for token in self.tokens))

    def append(self, tokens: list[int]) -> None:
        """The request has grown by these."""
        self.tokens += tokens
        self.length += len(tokens)

    def take_out(self, pages: set[int]) -> list[int]:
        """Forget these pages; returns their tokens."""
        gone = [token for token in self.tokens if token // self.page_size in pages]
        if self.tokens and self.tokens[-1] // self.page_size in pages:
            self.grows = False
        self.tokens = [token for token in self.tokens if token // self.page_size not in pages]
        return gone


@dataclass
class Model:
    setting: Setting
    #: Whether ``alloc_decode`` may be called at page size 1. SGLang never does, and 0.5.23's answers an id without taking a page for it.
    decodes_single_tokens: bool = True
    grants: list[Grant] = field(default_factory=list)
    #: By pool that is indexed by another's ids: the pages that are bound in it.
    bound: dict[str, set[int]] = field(default_factory=dict)
    #: By pool with an open free group.
    groups: set[str] = field(default_factory=set)
    #: ``alloc_physical`` answers that were neither bound nor given back: (pool, token ids).
    reservations: list[tuple[str, list[int]]] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    forwards: int = 0

    def __post_init__(self) -> None:
        self.shapes: dict[str, Shape] = {shape.name: shape for shape in self.setting.chain.shapes}
        self.page_size = {name: self.setting.page_size_of(shape) for name, shape in self.shapes.items()}
        self.owners = [name for name, shape in self.shapes.items() if shape.owner is None]
        self.token_owners = [name for name in self.owners if not self.shapes[name].states]
        self.decoding_owners = [
            name for name in self.token_owners if self.page_size[name] > 1 or self.decodes_single_tokens
        ]
        self.guests = [name for name, shape in self.shapes.items() if shape.owner is not None]
        self.floats = [name for name, shape in self.shapes.items() if shape.grow_direction == "float"]
        self.lazy = [name for name in self.shapes if self.setting.lazy and name not in self.floats]
        self.bound = {name: set() for name in self.guests}

    def guests_of(self, pool: str) -> list[str]:
        return [name for name in self.guests if self.shapes[name].owner == pool]

    def live_pages(self, pool: str) -> list[int]:
        """Pages of an id owner that are live and in no open group, ascending."""
        return sorted({page for grant in self.grants if grant.pool == pool for page in grant.pages()})

    def unbound(self, guest: str) -> list[int]:
        """Pages of the owner that could be bound in ``guest``."""
        owner = self.shapes[guest].owner
        assert owner is not None
        return [page for page in self.live_pages(owner) if page not in self.bound[guest]]

    def tokens_to_write(self, pool: str) -> list[int]:
        """Tokens a forward could write: the last of each grant; of a guest, the first of each bound page."""
        if pool in self.bound:
            return [page * self.page_size[pool] for page in sorted(self.bound[pool])]
        return [grant.tokens[-1] for grant in self.grants if grant.pool == pool and grant.tokens]

    def forget_empty(self) -> None:
        self.grants = [grant for grant in self.grants if grant.tokens]

    def clear(self) -> None:
        """All pools were emptied; forwards go on."""
        self.grants.clear()
        self.groups.clear()
        self.reservations.clear()
        self.bound = {name: set() for name in self.guests}


def consecutive(tokens: list[int], pages: list[int], size: int) -> bool:
    """Whether the tokens are a request's run from a page border on: every page in it but the last has all its tokens."""
    runs = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    if len(runs) != len(pages) or tokens[0] % size:
        return False
    return all({token // size for token in run} == {page} for run, page in zip(runs, pages, strict=True))
