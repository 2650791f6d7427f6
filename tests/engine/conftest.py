"""SGLang's composites on a CPU, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from allocator import sglang_plugin
from replayer.targets_sglang import (
    import_sglang,
    install_cpu_stand_ins,
    install_single_rank,
    remove_cpu_stand_ins,
)
from replayer.targets_sglang_composite import WINDOW_MODULE


@pytest.fixture
def sglang_on_a_cpu() -> Iterator[None]:
    """SGLang's modules with what they need there. Afterwards they are as they were, whatever was put in place of their classes."""
    install_cpu_stand_ins()
    install_single_rank()
    for name in sglang_plugin.USERS:
        import_sglang(name)
    yield
    sglang_plugin.remove()
    remove_cpu_stand_ins()


@pytest.fixture
def set_up_server(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets a server's role, and whether it has a host tier with storage behind it: SGLang's composite of two sides reads these settings,
    and there is no server."""

    def set_up(*, role: str = "null", host_tier: bool = False, storage: str | None = None) -> None:
        window = import_sglang(WINDOW_MODULE)
        memory = SimpleNamespace(enable_hierarchical_cache=host_tier, hicache_storage_backend=storage)
        monkeypatch.setattr(window, "get_disagg", lambda: SimpleNamespace(disaggregation_mode=role))
        monkeypatch.setattr(window, "get_memory", lambda: memory)

    return set_up
