"""The sync ledger: how often, and on which lines, allocator calls make the host wait for the device."""

from __future__ import annotations

from replayer.ledger.cuda import CudaCrossCheck
from replayer.ledger.records import CallRecord, Disagreement, KindOfCallCounts, SyncCounts, SyncKind, SyncSite
from replayer.ledger.sync_ledger import SyncLedger, SyncRecord

__all__ = [
    "CallRecord",
    "CudaCrossCheck",
    "Disagreement",
    "KindOfCallCounts",
    "SyncCounts",
    "SyncKind",
    "SyncLedger",
    "SyncRecord",
    "SyncSite",
]
