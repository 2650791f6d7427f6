"""Wrapping functions and giving them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from recorder.hooks import Hooks

pytestmark = pytest.mark.cpu


class Base:
    def inherited(self) -> str:
        return "base"


class Engine(Base):
    def alloc(self) -> str:
        return "alloc"


def counting(calls: list[str]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def wrapper(self: Engine) -> Any:
            calls.append("seen")
            return original(self)

        return wrapper

    return make


def test_wrapped_and_given_back_twice() -> None:
    before = dict(vars(Engine))
    for _ in range(2):
        hooks, calls = Hooks(), []
        assert hooks.wrap(Engine, "alloc", counting(calls))
        assert Engine().alloc() == "alloc"
        assert calls == ["seen"]
        assert len(hooks) == 1
        hooks.restore()
        assert len(hooks) == 0
        assert dict(vars(Engine)) == before


def test_what_a_class_does_not_define_itself_is_left_alone() -> None:
    hooks = Hooks()
    assert not hooks.wrap(Engine, "inherited", counting([]))
    assert not hooks.wrap(Engine, "missing", counting([]))
    assert "inherited" not in vars(Engine)
    assert len(hooks) == 0


def test_a_wrapper_of_somebody_else_around_ours_stays() -> None:
    original = Engine.alloc
    hooks, calls = Hooks(), []
    hooks.wrap(Engine, "alloc", counting(calls))
    ours = Engine.alloc

    def theirs(self: Engine) -> str:
        return "theirs " + ours(self)

    try:
        Engine.alloc = theirs  # type: ignore[method-assign]
        hooks.restore()
        assert Engine().alloc() == "theirs alloc"
    finally:
        Engine.alloc = original  # type: ignore[method-assign]
