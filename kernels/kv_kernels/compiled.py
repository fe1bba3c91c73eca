"""Loops over small integers, compiled by numba: what torch does in twenty calls and these in one.

The first process compiles them (seconds) and keeps the result beside the source, or in the user's cache where that is
not writable.
"""

import numpy as np
from numba import njit

ABSENT = -1


@njit("float32(float32[::1], int64)", cache=True)
def _kth_largest(work, k):
    """Return the k-th largest of `work`, which is reordered (Hoare's selection)."""
    low, high, place = 0, len(work) - 1, k - 1
    while low < high:
        pivot = work[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while work[i] > pivot:
                i += 1
            while work[j] < pivot:
                j -= 1
            if i <= j:
                work[i], work[j] = work[j], work[i]
                i += 1
                j -= 1
        if place <= j:
            high = j
        elif place >= i:
            low = i
        else:
            break
    return work[place]


@njit("void(float32[:, ::1], int64[:, ::1])", cache=True)
def topk(scores, chosen):
    """Fill `chosen` ([row, k] int64) with the best pages of `scores` ([row, page] float32): see `ref.topk_pages`."""
    num_rows, n = scores.shape
    k = chosen.shape[1]
    work = np.empty(n, dtype=np.float32)
    for r in range(num_rows):
        row = scores[r]
        m = 0
        for i in range(n):
            if row[i] != -np.inf:
                work[m] = row[i]
                m += 1
        if m > k:
            border = _kth_largest(work[:m], k)
            num_above = 0
            for i in range(n):
                num_above += row[i] > border
            num_equal = k - num_above
        else:
            border, num_equal = np.float32(-np.inf), 0
        place = 0
        for i in range(n):
            take = row[i] > border
            if row[i] == border and num_equal > 0:
                take = True
                num_equal -= 1
            if take:
                chosen[r, place] = i
                place += 1
        for i in range(place, k):
            chosen[r, i] = -1


@njit(
    "int64(int64[::1], int64[:, :, ::1], float32[:, :, ::1], int32[:, :, ::1], int32[:, ::1], int64[::1],"
    " int64[:, ::1], int64[:, ::1], int64[:, :, ::1], int64[:, ::1])",
    cache=True,
)
def admit(rows, selected, scores, slot_of, page_of, first_slot, hits, misses, at, missing):
    """Find selected pages in the window caches and give absent ones the slot of the lowest value.

    Args:
        rows: [request] int64; selected: [request, kv_head, n] int64; scores: [request, kv_head, page] float32, pages
            beyond it have none; slot_of: [row, kv_head, page] int32; page_of: [row, slot] int32; first_slot:
            [kv_head + 1] int64, the slots of each head; hits, misses: [row, kv_head] int64, added to.
        at: [request, kv_head, n] int64, result: row * slots + slot of every selected page.
        missing: [4, request * kv_head * n] int64, result: request, head, page, row * slots + slot of what to fetch.

    Returns:
        How many columns of `missing` count.
    """
    num_requests, num_heads, n = selected.shape
    total = page_of.shape[1]
    num_scored = scores.shape[2]
    count = 0
    value = np.empty(total, dtype=np.float32)
    for r in range(num_requests):
        row = rows[r]
        for h in range(num_heads):
            first, end = first_slot[h], first_slot[h + 1]
            begin = count
            for i in range(n):
                slot = slot_of[row, h, selected[r, h, i]]
                at[r, h, i] = slot
                if slot == ABSENT:
                    missing[0, count] = r
                    missing[1, count] = h
                    missing[2, count] = selected[r, h, i]
                    missing[3, count] = i  # for now: where in the selection
                    count += 1
            num_missing = count - begin
            hits[row, h] += n - num_missing
            misses[row, h] += num_missing
            if num_missing:
                for slot in range(first, end):
                    page = page_of[row, slot]
                    scored = page != ABSENT and page < num_scored
                    value[slot] = scores[r, h, page] if scored else -np.inf
                for i in range(n):
                    if at[r, h, i] != ABSENT:
                        value[at[r, h, i]] = np.inf
                for m in range(begin, count):
                    victim = first
                    for slot in range(first, end):
                        if value[slot] < value[victim]:
                            victim = slot
                    value[victim] = np.inf
                    page = page_of[row, victim]
                    if page != ABSENT:
                        slot_of[row, h, page] = ABSENT
                    page = missing[2, m]
                    page_of[row, victim] = page
                    slot_of[row, h, page] = victim
                    at[r, h, missing[3, m]] = victim
                    missing[3, m] = row * total + victim
            for i in range(n):
                at[r, h, i] += row * total
    return count
