"""Definition of the window cache's directory: look selected pages up, and choose who leaves for those absent."""

import torch


def window_admit(
    rows: torch.Tensor,
    selected: torch.Tensor,
    priority: torch.Tensor,
    slot_of: torch.Tensor,
    page_of: torch.Tensor,
    first_slot: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give every selected page that is absent the slot of lowest priority, empty slots first; update the directory.

    A page selected now never leaves. Pages get slots in the order of the selection, ties go to the lower slot. With the
    step's scores as priority this is lookahead eviction (paper 5.1).

    Args:
        rows: [request] int64, distinct rows of the directory.
        selected: [request, kv_head, n] int64 page ordinals, -1 after the last one; n at most the head's slots.
        priority: [request, kv_head, page] float32; pages beyond it have the lowest.
        slot_of: [row, kv_head, page] int32, slot that holds a page, or -1; changed in place.
        page_of: [row, slot] int32, the other way round; changed in place.
        first_slot: [kv_head + 1] int64: the slots of head h are first_slot[h] .. first_slot[h + 1].

    Returns:
        (at [request, kv_head, n] int64: row * slots + slot of every selected page, -1 where selected is;
        missing [request, kv_head, n] bool: what must be fetched there).
    """
    at, missing = torch.full_like(selected, -1), torch.zeros_like(selected, dtype=torch.bool)
    bounds = first_slot.tolist()
    for request, row in enumerate(rows.tolist()):
        for head in range(selected.shape[1]):
            slots = torch.arange(bounds[head], bounds[head + 1], device=rows.device)
            pages = selected[request, head][selected[request, head] >= 0]
            held = slot_of[row, head, pages]
            value = _value(page_of[row, slots].long(), priority[request, head])
            value[held[held >= 0].long() - bounds[head]] = float("inf")
            absent = pages[held < 0]
            victims = slots[value.sort(stable=True).indices[: len(absent)]]
            leaving = page_of[row, victims].long()
            slot_of[row, head, leaving[leaving >= 0]] = -1
            slot_of[row, head, absent] = victims.int()
            page_of[row, victims] = absent.int()
            at[request, head, : len(pages)] = row * page_of.shape[1] + slot_of[row, head, pages].long()
            missing[request, head, : len(pages)] = held < 0
    return at, missing


def _value(page_of: torch.Tensor, priority: torch.Tensor) -> torch.Tensor:
    """Return the priority of what each slot holds; -inf for nothing and for pages without one."""
    known = (page_of >= 0) & (page_of < len(priority))
    value = priority.new_full(page_of.shape, float("-inf"))
    value[known] = priority[page_of[known]]
    return value
