"""The two levels at which torch is watched: functions, always, and the operators below them, in an audit."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from replayer.ledger.functions import RULES, Function, Rule
from replayer.ledger.operators import synchronisations
from replayer.ledger.places import NONE, Args, Kwargs, Places, Syncs


class Counter(Protocol):
    """Who is told what the modes see: the ledger."""

    def counted(self, operation: str, syncs: Syncs) -> None:
        """A function synchronised, and how often."""

    def disagreed(self, function: str, counted: int, observed: int, operators: tuple[str, ...]) -> None:
        """The operators below a function read the device another number of times than its row says."""


class OperatorMode(TorchDispatchMode):
    """Sees operators, among them those that run inside functions, and notes what each would cost on a GPU."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do not go through torch's compiler: nothing is compiled here, and importing it takes seconds."""
        return False

    def __init__(self, places: Places, counter: Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paused = False
        self._places = places
        self._counter = counter
        self._inside = 0
        self._seen: list[tuple[str, Syncs | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if not self.paused:
            syncs = synchronisations(self._places, func, args, kwargs)
            if self._inside:
                self._seen.append((str(func), syncs))
            elif syncs is not None and syncs[0]:
                self._counter.disagreed("", 0, syncs[0], (str(func),))
        with torch._C.DisableTorchFunction():  # the operator under its own name must not be counted once more
            return func(*args, **kwargs)

    def observe(
        self, function: Function, args: Args, kwargs: Kwargs
    ) -> tuple[Any, int | None, tuple[str, ...]]:
        """Call ``function``; give its result, its operators' reads (None if not known), and their names."""
        start = len(self._seen)
        self._inside += 1
        try:
            result = function(*args, **kwargs)
            seen = self._seen[start:]
        finally:
            self._inside -= 1
            del self._seen[start:]
        reads: int | None = 0
        for _, syncs in seen:
            reads = None if reads is None or syncs is None else reads + syncs[0]
        return result, reads, tuple(name for name, _ in seen)


class FunctionMode(TorchFunctionMode):
    """Sees every torch function called from Python and counts those that synchronise.

    A function's inner calls are not seen, since a mode is off while it handles one: nothing counts twice.
    """

    def __init__(self, places: Places, counter: Counter) -> None:
        super().__init__()
        self.operators: OperatorMode | None = None  # set while a call is audited
        self._hosts = places.hosts
        self._places = places
        self._counter = counter

    def __torch_function__(
        self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        rule = RULES.get(func)
        if rule is None and self.operators is None:  # nearly always: keep this path short
            result = func(*args, **kwargs) if kwargs else func(*args)
            return self._follow(args, kwargs or {}, result) if self._hosts else result
        return self._examine(rule, func, args, kwargs or {})

    def _examine(self, rule: Rule | None, func: Function, args: Args, kwargs: Kwargs) -> Any:
        places = self._places
        syncs = rule.classify(places, args, kwargs) if rule is not None else NONE
        if self.operators is not None:
            result = self._audit(self.operators, rule, syncs, func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if rule is not None and syncs != NONE:
            self._counter.counted(rule.label, syncs)
        if places.stand_in and (self._hosts or (rule is not None and rule.result_on_host is not None)):
            return self._settle(rule, args, kwargs, result)
        return result

    def _audit(
        self,
        operators: OperatorMode,
        rule: Rule | None,
        syncs: Syncs,
        func: Function,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        on_host = self._places.only_hosts(args, kwargs)
        result, observed, names = operators.observe(func, args, kwargs)
        comparable = not on_host and (rule is None or rule.comparable)
        if comparable and observed is not None and observed != syncs[0]:
            name = rule.label if rule is not None else _name(func)
            self._counter.disagreed(name, syncs[0], observed, names)
        return result

    def _settle(self, rule: Rule | None, args: Args, kwargs: Kwargs, result: Any) -> Any:
        """In a stand-in run, note on which side the result lives.

        Where a GPU run would make a copy on the other side and the stand-in hands back the same tensor, the
        result is replaced by a view of it: one Python object cannot be on both sides.
        """
        places = self._places
        decide = rule.result_on_host if rule is not None else None
        on_host = decide(places, args, kwargs) if decide is not None else None
        if on_host is None:
            return self._follow(args, kwargs, result)
        if (
            isinstance(result, torch.Tensor)
            and args
            and result is args[0]
            and places.is_host(result) != on_host
        ):
            result = result.view_as(result)
        if on_host:
            places.mark_host(result)
        return result

    def _follow(self, args: Args, kwargs: Kwargs, result: Any) -> Any:
        """What was computed from host tensors only is on the host."""
        if args and isinstance(args[0], torch.Tensor) and id(args[0]) not in self._hosts:
            return result  # decided quickly: most functions are of device tensors
        if self._places.only_hosts(args, kwargs):
            self._places.mark_host(result)
        return result


def _name(func: Function) -> str:
    """A function as code calls it; ``torch.overrides.resolve_name`` takes a second to answer the first time."""
    name = str(getattr(func, "__qualname__", func))
    return name.replace("_VariableFunctionsClass.", "torch.").replace("TensorBase.", "Tensor.")
