"""Triton twin of `ref.window_admit`: one program per (request, KV head), in two launches.

The first looks pages up and pins the slots they hold; the second chooses victims one after another.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _lookup_kernel(
    rows,
    selected,
    slot_of,
    at,
    missing,
    pinned,
    num_heads,
    num_selected,
    max_pages,
    total,
    SELECTED: tl.constexpr,
):
    """Find the slots of the selected pages."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(rows + request).to(tl.int64)
    place = tl.arange(0, SELECTED)
    here = (request * num_heads + head) * num_selected + place
    page = tl.load(selected + here, mask=place < num_selected, other=-1)
    slot = tl.load(slot_of + (row * num_heads + head) * max_pages + page, mask=page >= 0, other=-1)
    tl.store(at + here, tl.where(slot >= 0, row * total + slot, -1), mask=place < num_selected)
    tl.store(missing + here, ((page >= 0) & (slot < 0)).to(tl.int8), mask=place < num_selected)
    tl.store(pinned + request.to(tl.int64) * total + slot, 1, mask=slot >= 0)


@triton.jit
def _victim_kernel(
    rows, selected, priority, slot_of, page_of, first_slot, at, missing, pinned,
    num_heads, num_selected, num_scored, max_pages, total, SELECTED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Give absent pages the slots of lowest priority; a head's slots and pages belong to this program alone."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(rows + request).to(tl.int64)
    first = tl.load(first_slot + head).to(tl.int64)
    place = tl.arange(0, SELECTED)
    here = (request * num_heads + head) * num_selected
    wanted = tl.load(selected + here + place, mask=place < num_selected, other=-1)
    absent = tl.load(missing + here + place, mask=place < num_selected, other=0).to(tl.int32)
    order = tl.where(absent > 0, tl.cumsum(absent, axis=0) - 1, -1)
    index = tl.arange(0, SLOTS)
    slot = first + index
    inside = slot < tl.load(first_slot + head + 1)
    page = tl.load(page_of + row * total + slot, mask=inside, other=-1)
    ranked = (page >= 0) & (page < num_scored)
    ranked_at = priority + (request * num_heads + head).to(tl.int64) * num_scored + page
    value = tl.load(ranked_at, mask=ranked, other=float("-inf"))
    held = tl.load(pinned + request.to(tl.int64) * total + slot, mask=inside, other=1)
    value = tl.where(held > 0, float("inf"), value)
    directory = slot_of + (row * num_heads + head) * max_pages
    for turn in range(tl.sum(absent, axis=0)):
        victim = tl.argmin(value, 0, tie_break_left=True)
        leaves = index == victim
        value = tl.where(leaves, float("inf"), value)
        leaving = tl.sum(tl.where(leaves, page, 0), axis=0)
        now = order == turn
        entering = tl.sum(tl.where(now, wanted, 0), axis=0)
        into = first + victim
        tl.store(directory + leaving, -1, mask=leaving >= 0)
        tl.store(directory + entering, into.to(tl.int32))
        tl.store(page_of + row * total + into, entering.to(tl.int32))
        tl.store(at + here + place, row * total + into, mask=now)


def window_admit(
    rows: torch.Tensor,
    selected: torch.Tensor,
    priority: torch.Tensor,
    slot_of: torch.Tensor,
    page_of: torch.Tensor,
    first_slot: torch.Tensor,
    max_slots: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look up and admit as `ref.window_admit` does; the directory is changed in place.

    Args: as there.
        max_slots: the most slots a head has, so that nobody need ask the device; None: as many as a row has.
    """
    requests, heads, num_selected = selected.shape
    total = page_of.shape[1]
    assert slot_of.is_contiguous() and page_of.is_contiguous()
    selected = selected.contiguous()
    at = torch.empty_like(selected)
    missing = torch.empty(selected.shape, dtype=torch.int8, device=selected.device)
    pinned = torch.zeros(requests, total, dtype=torch.int8, device=selected.device)
    selected_pad = triton.next_power_of_2(num_selected)
    _lookup_kernel[(requests, heads)](
        rows, selected, slot_of, at, missing, pinned, heads, num_selected, slot_of.shape[2], total,
        SELECTED=selected_pad,
    )  # fmt: skip
    _victim_kernel[(requests, heads)](
        rows, selected, priority.contiguous(), slot_of, page_of, first_slot, at, missing, pinned,
        heads, num_selected, priority.shape[2], slot_of.shape[2], total,
        SELECTED=selected_pad, SLOTS=triton.next_power_of_2(max_slots or total),
    )  # fmt: skip
    return at, missing.view(torch.bool)
