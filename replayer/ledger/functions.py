"""The table of torch functions that synchronise on a GPU, or that decide on which side a tensor lives.

One row per function object, as a ``TorchFunctionMode`` sees it. The counts are those of torch's CUDA kernels
for one call: reading back how many elements were found is one device-to-host read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from replayer.ledger import indexing, reads, transfers
from replayer.ledger.operators import SYNCHRONISING
from replayer.ledger.places import Args, Kwargs, Places, Syncs

Function = Callable[..., Any]
Classify = Callable[[Places, Args, Kwargs], Syncs]


class Rule(NamedTuple):
    """What the ledger knows about one function."""

    label: str
    classify: Classify
    #: Whether the operators below show the same reads; ``tolist``, for one, runs no operator on a CPU.
    comparable: bool = True
    #: Where the result lives in a stand-in run, if the function says; otherwise it lives with the arguments.
    result_on_host: Callable[[Places, Args, Kwargs], bool | None] | None = None


def _rules() -> dict[Function, Rule]:
    rules: dict[Function, Rule] = {}

    def methods(names: str, classify: Classify, **more: Any) -> None:
        for name in names.split():
            rules[getattr(torch.Tensor, name)] = Rule(f"Tensor.{name}", classify, **more)

    def functions(names: str, classify: Classify, **more: Any) -> None:
        for name in names.split():
            rules[getattr(torch, name)] = Rule(f"torch.{name}", classify, **more)

    def both(names: str, classify: Classify) -> None:
        methods(names, classify)
        functions(names, classify)

    # Values to Python.
    methods("item __int__ __float__ __bool__ __index__ __complex__ __contains__", reads.reads_first)
    methods("tolist numpy __array__ __repr__ __format__", reads.reads_first, comparable=False)
    both("is_nonzero allclose", reads.reads_result_size)
    both("equal", reads.equal)

    # Results whose size depends on the data, and numbers that are given as tensors.
    both("nonzero argwhere masked_select unique unique_consecutive", reads.reads_result_size)
    both("where", reads.where)
    both("bincount", reads.bincount)
    both("repeat_interleave", reads.repeat_interleave)
    functions("isin", reads.isin)
    both("masked_fill index_fill", reads.fills)
    methods("masked_fill_ index_fill_", reads.fills)
    both("narrow", reads.takes_numbers_after_first)

    methods("__getitem__", indexing.getitem)
    methods("__setitem__", indexing.setitem)
    both("index_put index_put_", indexing.index_put)

    # From one side to the other.
    methods("cpu", transfers.cpu, comparable=False, result_on_host=transfers.always_on_host)
    methods("to", transfers.to, result_on_host=transfers.to_on_host)
    methods("cuda", transfers.cuda)
    methods("copy_", transfers.copy_)
    methods("new_tensor", transfers.new_tensor, result_on_host=transfers.new_tensor_on_host)
    functions(
        "tensor as_tensor asarray",
        transfers.from_data,
        comparable=False,
        result_on_host=transfers.from_data_on_host,
    )

    # Made where they are to be.
    functions("arange full", reads.takes_numbers, result_on_host=transfers.factory_on_host)
    # Takes tensors down to its kernel and reads them there, where no operator shows it.
    functions("linspace", reads.takes_numbers, comparable=False, result_on_host=transfers.factory_on_host)
    functions(
        "empty zeros ones eye scalar_tensor rand randn randint randperm",
        transfers.makes_nothing,
        result_on_host=transfers.factory_on_host,
    )
    functions("full_like", reads.takes_numbers_after_first, result_on_host=transfers.like_on_host)
    functions(
        "empty_like zeros_like ones_like", transfers.makes_nothing, result_on_host=transfers.like_on_host
    )

    # The operators under their own names, for code that calls `torch.ops.aten` itself.
    for name, classify in SYNCHRONISING.items():
        packet = getattr(torch.ops.aten, name)
        rule = Rule(f"torch.ops.aten.{name}", classify)
        rules[packet] = rule
        for overload in packet.overloads():
            rules[getattr(packet, overload)] = rule
    return rules


RULES: Final = _rules()
