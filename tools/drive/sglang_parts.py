"""SGLang 0.5.23's cache and allocator put together on a CPU, without a model, for `drive_sglang.py`.

SGLang's own: `UnifiedKVPool` (on the meta device: sizes and views, no bytes), `UnifiedMambaTokenToKVPoolAllocator` over two
`MultiEndedAllocator`s, `UnifiedRadixCache` with its full component, `ReqToTokenPool`, `Req`, and the functions that allocate for a batch
and release a request. Standing in: the forward pass and its event, the bytes of the pools (nothing is moved), the decode kernel, the
batch object, and the configuration of a server that does not run.
"""

from __future__ import annotations

import warnings
from array import array
from dataclasses import dataclass
from typing import Any

import torch

from replayer.targets_sglang import install_cpu_stand_ins

# Kimi-K3, one rank of tensor parallelism 8, every pool's layers folded by 24: page counts are real, bytes are 1/24.
TENSOR_PARALLELISM = 8
TOTAL_BYTES = 2_552_339_200
PAGE_SIZE = 64
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
# 69 layers of (3, 4608) in bfloat16 and (12, 128, 128) in float32 are no multiple of 24 layers. The temporal state is an exact 24th of
# theirs, the convolution state is rounded down to a multiple of 512 bytes: 2,340,352 bytes a slot.
CONV_STATE_SHAPE = (39_680,)
TEMPORAL_STATE_SHAPE = (69, 64, 128)


class ForwardDone:
    """Stands in for the CUDA event at the end of a forward. A stream's wait on it orders work and tells the host nothing, so `query`
    answers False until `fire`."""

    def __init__(self) -> None:
        self._fired = False

    def query(self) -> bool:
        return self._fired

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def fire(self) -> None:
        self._fired = True


@dataclass
class Batch:
    """What SGLang's allocation functions read of a `ScheduleBatch`. Lengths are in tokens, tensors are int64 of one row a request."""

    reqs: list[Any]
    tree_cache: Any
    req_to_token_pool: Any
    model_config: Any
    prefix_lens: list[int]
    extend_lens: list[int]
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor | None = None
    device: str = "cpu"
    hisparse_coordinator: None = None

    @property
    def extend_num_tokens(self) -> int:
        return sum(self.extend_lens)

    @property
    def seq_lens_cpu(self) -> torch.Tensor:
        return self.seq_lens

    @property
    def req_pool_indices_cpu(self) -> torch.Tensor | None:
        return self.req_pool_indices

    def is_dllm(self) -> bool:
        return False

    def maybe_evict_swa(self) -> None: ...


class Parts:
    """One cache, its allocators, and the calls a scheduler makes on them.

    Args:
        max_running: rows for running requests.
        max_tokens: longest prompt with its answer.
    """

    def __init__(self, *, max_running: int, max_tokens: int) -> None:
        with warnings.catch_warnings():
            # Kernels that miss CUDA and other things that nothing here calls.
            warnings.simplefilter("ignore")
            self._import_sglang()
        self.composite = self._composite()
        self.full = self.composite.full_attn_allocator
        self.states = self.composite.mamba_allocator
        self.rows = self._rows_class(
            size=max_running, max_context_len=max_tokens, device="cpu", enable_memory_saver=False
        )
        self.tree = self._tree_class(
            self._tree_params_class(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.composite,
                page_size=PAGE_SIZE,
                tree_components=(self._full_component,),
            )
        )

    def _import_sglang(self) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
        from sglang.srt.mem_cache import allocation, common
        from sglang.srt.mem_cache.allocator import unified_sub_pool
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.server_args import ServerArgs

        install_cpu_stand_ins()
        unified_sub_pool.alloc_decode_kernel = _DecodeKernel()
        # The plain loop that fills request rows, not the Triton kernel, which needs a GPU.
        arguments = ServerArgs(
            # Of this name SGLang looks for no files.
            model_path="none",
            tp_size=TENSOR_PARALLELISM,
            page_size=PAGE_SIZE,
            device="cpu",
            attention_backend="torch_native",
        )
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
        self._allocation, self._common = allocation, common
        self._req_class, self._sampling_class, self._finish_class = Req, SamplingParams, FINISH_LENGTH
        self._tree_class, self._tree_params_class = UnifiedRadixCache, CacheInitParams
        self._full_component = ComponentType.FULL
        self._rows_class = ReqToTokenPool

    def _composite(self) -> Any:
        from sglang.srt.mem_cache.allocator.unified_mamba import UnifiedMambaTokenToKVPoolAllocator
        from sglang.srt.mem_cache.unified_memory_pool import MambaSubPoolSpec, MLASubPoolSpec, UnifiedKVPool

        full = MLASubPoolSpec(
            name="full",
            layer_num=1,
            kv_lora_rank=KV_LORA_RANK,
            qk_rope_head_dim=QK_ROPE_HEAD_DIM,
            store_dtype=torch.bfloat16,
            grow_direction="down",
        )
        states = MambaSubPoolSpec(
            name="mamba",
            layer_num=1,
            conv_state_shapes=(CONV_STATE_SHAPE,),
            conv_dtype=torch.bfloat16,
            temporal_state_shape=TEMPORAL_STATE_SHAPE,
            temporal_dtype=torch.float32,
            grow_direction="up",
        )
        buffer = UnifiedKVPool(
            total_bytes=TOTAL_BYTES,
            sub_pool_specs=[full, states],
            device="meta",
            enable_memory_saver=False,
            page_size=PAGE_SIZE,
        )
        return UnifiedMambaTokenToKVPoolAllocator(
            unified_buffer=buffer, kvcache=_NoBytes(), device="cpu", page_size=PAGE_SIZE, lazy_compaction=True
        )

    # -- what a scheduler does

    def request(self, number: int, prompt: array[int], output_length: int) -> Any:
        """A `Req` of SGLang's over ``prompt``, int64 token ids."""
        sampling = self._sampling_class(max_new_tokens=output_length)
        return self._req_class(str(number), "", prompt, sampling)

    def match(self, req: Any) -> None:
        """Match the prompt in the tree and lock what was found; ``req.prefix_len`` is the hit, in tokens."""
        req.init_next_round_input(self.tree)
        req.lock = self.tree.lock(req.last_node)
        req.kv.cache_protected_len = req.prefix_len
        req.extend_end = len(req.full_untruncated_fill_ids)

    def extend(self, req: Any) -> None:
        """Evict what is short, and allocate the prompt past the hit."""
        prompt_length = len(req.origin_input_ids)
        self._allocation.alloc_for_extend(
            self._batch([req], [req.prefix_len], [prompt_length - req.prefix_len], [prompt_length])
        )

    def decode(self, reqs: list[Any]) -> torch.Tensor:
        """Allocate one token for each request; returns their token ids, int64 of shape (requests,)."""
        batch = self._batch(reqs, [], [], [req.kv.kv_committed_len for req in reqs])
        batch.req_pool_indices = torch.tensor([req.kv.req_pool_idx for req in reqs], dtype=torch.int64)
        out: torch.Tensor = self._allocation.alloc_for_decode(batch, 1)
        return out

    def _batch(
        self, reqs: list[Any], prefix_lens: list[int], extend_lens: list[int], seq_lens: list[int]
    ) -> Batch:
        return Batch(
            reqs=reqs,
            tree_cache=self.tree,
            req_to_token_pool=self.rows,
            model_config=_NoEncoder,
            prefix_lens=prefix_lens,
            extend_lens=extend_lens,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
        )

    def finish(self, req: Any, *, split_prompt: bool) -> None:
        """Insert prompt and answer into the tree and free what it does not keep.

        Args:
            split_prompt: let the tree cut between prompt and answer, so that it can evict the answer alone. If not, it is told that all
                of it was prompt, and a request's new pages become one node.
        """
        req.finished_reason = self._finish_class(length=len(req.output_ids))
        if not split_prompt:
            req.refresh_fill_ids()
            req.origin_input_ids, req.output_ids = req.full_untruncated_fill_ids, array("q")
        # The scheduler frees in groups: duplicates that the tree returns and the tail reach the allocator as one call.
        self.composite.free_group_begin()
        self._common.release_kv_cache(req, self.tree, checkpoint=True)
        self.composite.free_group_end()


class _NoEncoder:
    is_encoder_decoder = False


class _NoBytes:
    """The KV caches of both pools: nothing is stored, so nothing has to be moved."""

    def __init__(self) -> None:
        self.full_kv_pool = self.mamba_pool = self
        self.host_transfer_translate: Any = None

    def move_physical_pages(
        self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int
    ) -> None: ...


class _DecodeKernel:
    """The decode kernel in a few tensor operations: a request whose last token ended a page gets the first token of the next free page,
    any other the token after its last."""

    def __getitem__(self, grid: Any) -> Any:
        return self._run

    @staticmethod
    def _run(
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        free_pages: torch.Tensor,
        out_indices: torch.Tensor,
        batch_power_of_2: int,
        page_size: int,
    ) -> None:
        torch.add(last_loc, 1, out=out_indices)
        starts_page = (seq_lens - 1) % page_size == 0
        new = starts_page.nonzero().flatten()
        if len(new):
            out_indices[new] = free_pages[: len(new)] * page_size
