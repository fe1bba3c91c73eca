"""Decode attention over a table of pages by FlashInfer; importing this module imports FlashInfer.

FlashInfer's requests share one selection among their KV heads. Here selections may differ, and so every (request, KV head)
is a request of its own, with one KV head and the group as query heads. Splits have a fixed size, which its planner offers
so that a request alone gives the bits that it gives in a batch.

It needs a GPU: `benchmarks/gpu_check.py` compares it with the definition where one is there.
"""

import math

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper

WORKSPACE_BYTES = 128 << 20
SPLIT_POSITIONS = 512


class FlashInferDecode:
    """Attention planned once per step and run in every layer: a `dispatch.DecodeAttention`."""

    def __init__(
        self,
        page_size: int,
        group: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float,
    ) -> None:
        """Take what does not change between steps; arguments as for `dispatch.decode_attention`."""
        self._page_size, self._group, self._head_dim = page_size, group, head_dim
        self._dtype, self._device, self._scale = dtype, device, scale
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend="fa2"
        )

    def plan(self, lengths: torch.Tensor) -> None:
        """Take the lengths of a step, [request, kv_head] int32 on the host, each at least 1."""
        flat = lengths.flatten()
        num_pages = (flat + self._page_size - 1) // self._page_size
        request = torch.arange(len(flat)).repeat_interleave(num_pages)
        first = num_pages.cumsum(0) - num_pages
        place = torch.arange(len(request)) - first[request]
        self._request, self._place = request.to(self._device), place.to(self._device)
        self._indices = torch.zeros(len(request), dtype=torch.int32, device=self._device)
        self._wrapper.plan(
            torch.nn.functional.pad(num_pages.cumsum(0), (1, 0)).to(torch.int32),
            self._indices,  # kept by reference: every layer fills in its own
            (flat - (num_pages - 1) * self._page_size).to(torch.int32),
            self._group,
            1,
            self._head_dim,
            self._page_size,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=self._scale,
            fixed_split_size=max(1, SPLIT_POSITIONS // self._page_size),
        )

    def run(
        self, query: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend as `ref.sparse_decode_attention` does, over the lengths of the last plan."""
        self._indices.copy_(table.flatten(0, 1)[self._request, self._place])
        pools = (k_pool[:, :, None], v_pool[:, :, None])
        out, lse2 = self._wrapper.run(query.flatten(0, 1), pools, return_lse=True)
        return out.view_as(query), lse2.view(query.shape[:3]) * math.log(2)  # its log-sum-exp has base 2
