"""Which operators read the device: the level below the functions, used to audit what the functions say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from replayer.ledger import indexing, reads, transfers
from replayer.ledger.places import Args, Kwargs, Places, Syncs

#: By the name of the operator's overload packet in ``torch.ops.aten``.
SYNCHRONISING: Final[dict[str, Callable[[Places, Args, Kwargs], Syncs]]] = {
    "_local_scalar_dense": reads.reads_first,
    "item": reads.reads_first,
    "is_nonzero": reads.reads_first,
    "nonzero": reads.reads_result_size,
    "argwhere": reads.reads_result_size,
    "masked_select": reads.reads_result_size,
    "_unique": reads.reads_result_size,
    "_unique2": reads.reads_result_size,
    "unique_dim": reads.reads_result_size,
    "unique_consecutive": reads.reads_result_size,
    "unique_dim_consecutive": reads.reads_result_size,
    "allclose": reads.reads_result_size,
    "equal": reads.equal,
    "bincount": reads.bincount,
    "repeat_interleave": reads.repeat_interleave,
    "isin": reads.isin,
    "masked_fill": reads.fills,
    "masked_fill_": reads.fills,
    "index_fill": reads.fills,
    "index_fill_": reads.fills,
    "index": indexing.index,
    "_unsafe_index": indexing.index,
    "index_put": indexing.index_put,
    "index_put_": indexing.index_put,
    "_index_put_impl_": indexing.index_put,
    "copy_": transfers.copy_,
    "_to_copy": transfers.to,
}

_PUTS: Final = ("index_put", "index_put_", "_index_put_impl_")

_classify: Final = {getattr(torch.ops.aten, name): classify for name, classify in SYNCHRONISING.items()}


def synchronisations(places: Places, operator: Any, args: Args, kwargs: Kwargs) -> Syncs | None:
    """What one operator costs on a GPU; ``None`` where its arguments do not tell.

    That is so in a stand-in run for ``index_put`` of one element, since below the functions a Python number is
    a tensor on the CPU like every device tensor, and for copies while there are host tensors, since views that
    are made inside a function are not known to be on their tensor's side.
    """
    classify = _classify.get(operator.overloadpacket)
    if classify is None:
        return 0, 0
    if places.stand_in:
        name = operator.overloadpacket.__name__
        if (name in _PUTS and args[2].numel() == 1) or (name == "copy_" and places.hosts):
            return None
    return classify(places, args, kwargs)
