"""Triton twins of `ref.sparse_decode_attention` and `ref.merge_states`.

Decode attention is split into tiles at fixed positions, a function of the position alone, and the partial results
are merged in ascending order: neither the batch nor the machine changes a number.
"""

import torch
import triton
import triton.language as tl

from kv_kernels.triton_kernels.common import dot_precision, padded, warps_for

SPLIT_POSITIONS = 64  # positions per program
STEP_POSITIONS = 64  # positions per product


@triton.jit
def _split_kernel(
    query, k_pool, v_pool, table, lengths, parts, part_lse, scale, num_selected, num_splits,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend over one split with a running softmax; write its normalised out and its lse."""
    split = tl.program_id(0)
    row = tl.program_id(1)  # request * num_heads + kv_head
    length = tl.load(lengths + row)
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HEAD_DIM)
    q_at = query + (row * GROUP + member[:, None]) * HEAD_DIM + dim[None, :]
    q = tl.load(q_at, mask=member[:, None] < GROUP, other=0.0).to(tl.float32)
    top = tl.full([GROUP_PAD], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_PAD], dtype=tl.float32)
    out = tl.zeros([GROUP_PAD, HEAD_DIM], dtype=tl.float32)
    for begin in range(0, SPLIT, STEP):
        position = split * SPLIT + begin + tl.arange(0, STEP)
        valid = (position < length) & (position < num_selected * PAGE_SIZE)
        place = tl.load(table + row * num_selected + position // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
        at = (place * PAGE_SIZE + position % PAGE_SIZE)[:, None] * HEAD_DIM + dim[None, :]
        keys = tl.load(k_pool + at, mask=valid[:, None], other=0.0).to(tl.float32)
        values = tl.load(v_pool + at, mask=valid[:, None], other=0.0).to(tl.float32)
        logit = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        logit = tl.where(valid[None, :], logit, float("-inf"))
        new_top = tl.maximum(top, tl.max(logit, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(logit - shift[:, None])
        fade = tl.exp(top - shift)
        total = total * fade + tl.sum(weight, axis=1)
        # tf32 keeps 11 bits of a weight, bf16 keeps 8 of the result
        out = out * fade[:, None] + tl.dot(weight, values, input_precision=PRECISION)
        top = new_top
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), top + tl.log(divisor))
    part = (row * num_splits + split) * GROUP + member
    tl.store(part_lse + part, lse, mask=member < GROUP)
    tl.store(
        parts + part.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :],
        out / divisor[:, None],
        mask=member[:, None] < GROUP,
    )


@triton.jit
def _merge_splits_kernel(parts, part_lse, out, lse, num_splits, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Merge the splits of one (request, KV head, query head) in ascending order."""
    row = tl.program_id(0)
    member = tl.program_id(1)
    dim = tl.arange(0, HEAD_DIM)
    top = float("-inf")
    total = 0.0
    merged = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for split in range(num_splits):
        part = (row * num_splits + split) * GROUP + member
        here = tl.load(part_lse + part)
        new_top = tl.maximum(top, here)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp(top - shift)
        weight = tl.exp(here - shift)
        merged = merged * fade + tl.load(parts + part.to(tl.int64) * HEAD_DIM + dim) * weight
        total = total * fade + weight
        top = new_top
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(lse + row * GROUP + member, tl.where(total == 0.0, float("-inf"), top + tl.log(divisor)))
    tl.store(out + (row * GROUP + member) * HEAD_DIM + dim, merged / divisor)


@triton.jit
def _merge_kernel(out_a, lse_a, out_b, lse_b, out, lse, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr):
    """Merge one row of two attention states."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM_PAD)
    a = tl.load(lse_a + row)
    b = tl.load(lse_b + row)
    top = tl.maximum(a, b)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight_a = tl.exp(a - shift)
    weight_b = tl.exp(b - shift)
    total = weight_a + weight_b
    divisor = tl.where(total == 0.0, 1.0, total)
    at = row * HEAD_DIM + dim
    values_a = tl.load(out_a + at, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    values_b = tl.load(out_b + at, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    tl.store(out + at, (values_a * weight_a + values_b * weight_b) / divisor, mask=dim < HEAD_DIM)
    tl.store(lse + row, tl.where(total == 0.0, float("-inf"), top + tl.log(divisor)))


def sparse_decode_attention(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    *,
    split_positions: int = SPLIT_POSITIONS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend over the pages of a table, as `ref.sparse_decode_attention` does.

    Args: as there, the pools contiguous, page_size a power of two.
        split_positions: positions per program; a constant of the caller, or results would depend on its choice.
    """
    requests, heads, group, head_dim = query.shape
    page_size, num_selected, rows = k_pool.shape[1], table.shape[2], requests * heads
    assert k_pool.is_contiguous() and v_pool.is_contiguous(), (k_pool.stride(), v_pool.stride())
    num_splits = triton.cdiv(num_selected * page_size, split_positions)
    parts = torch.empty(rows, num_splits, group, head_dim, dtype=torch.float32, device=query.device)
    part_lse = torch.empty(rows, num_splits, group, dtype=torch.float32, device=query.device)
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    precision = dot_precision(query, k_pool, v_pool)
    _split_kernel[(num_splits, rows)](
        query.contiguous(), k_pool, v_pool, table.contiguous(), lengths.contiguous(), parts, part_lse,
        scale, num_selected, num_splits,
        GROUP=group, GROUP_PAD=padded(group), HEAD_DIM=head_dim, PAGE_SIZE=page_size,
        SPLIT=split_positions, STEP=STEP_POSITIONS, PRECISION=precision, num_warps=warps_for(precision),
    )  # fmt: skip
    _merge_splits_kernel[(rows, group)](parts, part_lse, out, lse, num_splits, GROUP=group, HEAD_DIM=head_dim)
    return out.to(query.dtype), lse


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of positions, as `ref.merge_states` does."""
    head_dim = out_a.shape[-1]
    out = torch.empty(out_a.shape, dtype=torch.float32, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=torch.float32, device=out_a.device)
    _merge_kernel[(lse_a.numel(),)](
        out_a.contiguous(), lse_a.contiguous(), out_b.contiguous(), lse_b.contiguous(), out, lse,
        HEAD_DIM=head_dim, HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return out.to(out_a.dtype), lse
