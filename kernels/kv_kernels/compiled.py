"""Loops over small integers, compiled by numba: what torch does in twenty calls and these in one.

The first process compiles them (seconds) and keeps the result beside the source, or in the user's cache where that is
not writable.
"""

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

ABSENT = -1
SKETCH_LANES = 32  # pages that a sketch's block holds side by side: two registers of float32


@njit("int32(int32[::1], int64, int64, int64)", cache=True)
def _kth_largest(keys, k, low, high):
    """Return the k-th largest key, which lies in [low, high]: halve the range and count what is above, which takes vector
    instructions and no branch that could be guessed wrong."""
    while low < high:
        middle = (low + high + 1) >> 1
        least, count = np.int32(middle), np.int32(0)
        for i in range(len(keys)):
            count = np.int32(count + np.int32(keys[i] >= least))
        if count >= k:
            low = middle
        else:
            high = middle - 1
    return np.int32(low)


@njit("void(float32[:, ::1], int64[:, ::1])", cache=True)
def topk(scores, chosen):
    """Fill `chosen` ([row, k] int64) with the best pages of `scores` ([row, page] float32): see `ref.topk_pages`.

    A float's bits are an integer that grows with it, once those of negative ones are turned around: its key.
    """
    num_rows, n = scores.shape
    k = chosen.shape[1]
    bits = scores.view(np.int32)
    keys = np.empty(n, dtype=np.int32)
    places = np.empty(n + 1, dtype=np.int64)
    minus_zero, absent = np.int32(-0x80000000), np.int32(-0x7F800001)  # bits of -0.0, key of -inf
    for r in range(num_rows):
        row = bits[r]
        low, high, num_scored = np.int32(0x7FFFFFFF), absent, np.int32(0)
        for i in range(n):
            b = row[i] if row[i] != minus_zero else np.int32(0)
            key = np.int32(b ^ ((b >> np.int32(31)) & np.int32(0x7FFFFFFF)))
            keys[i] = key
            num_scored = np.int32(num_scored + np.int32(key > absent))
            low, high = min(low, key), max(high, key)
        border, num_equal = absent, 0
        if num_scored > k:
            border = _kth_largest(keys, k, max(np.int64(low), np.int64(absent) + 1), np.int64(high))
            num_above = np.int32(0)
            for i in range(n):
                num_above = np.int32(num_above + np.int32(keys[i] > border))
            num_equal = k - num_above
        place = 0
        for i in range(n):  # a page that is not taken is overwritten by the next one
            places[place] = i
            place += keys[i] > border or (keys[i] == border and num_equal > 0)
            num_equal -= keys[i] == border
        for i in range(place):
            chosen[r, i] = places[i]
        for i in range(place, k):
            chosen[r, i] = -1


@njit(
    "int64(int64[::1], int64[:, :, ::1], float32[:, :, ::1], int64[::1], float32, int32[:, :, ::1],"
    " int32[:, ::1], int64[::1], int64[:, ::1], int64[:, ::1], int64[:, :, ::1], int64[:, ::1])",
    cache=True,
)
def admit(rows, selected, priority, places, margin, slot_of, page_of, first_slot, hits, misses, at, missing):
    """Find selected pages in the window caches and give absent ones the slot of the lowest priority.

    Args:
        rows: [request] int64; selected: [request, kv_head, n] int64; priority: [place, kv_head, page] float32, pages
            beyond it have none; places: [request] int64, where in priority a request stands; margin: float32, a page whose
            priority does not exceed its victim's by so much gets no slot, -inf gives one to all; slot_of: [row, kv_head,
            page] int32; page_of: [row, slot] int32; first_slot: [kv_head + 1] int64, the slots of each head; hits,
            misses: [row, kv_head] int64, added to.
        at: [request, kv_head, n] int64, result: row * slots + slot of every selected page.
        missing: [5, request * kv_head * n] int64, result: request, head, page, row * slots + slot of what to fetch, and the
            page that left the slot or ABSENT.

    Returns:
        How many columns of `missing` count.
    """
    num_requests, num_heads, n = selected.shape
    total = page_of.shape[1]
    num_scored = priority.shape[2]
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
                    value[slot] = priority[places[r], h, page] if scored else -np.inf
                for i in range(n):
                    if at[r, h, i] != ABSENT:
                        value[at[r, h, i]] = np.inf
                kept = begin
                for m in range(begin, count):
                    victim = first
                    for slot in range(first, end):
                        if value[slot] < value[victim]:
                            victim = slot
                    page, i = missing[2, m], missing[3, m]
                    if page < num_scored and priority[places[r], h, page] < value[victim] + margin:
                        continue
                    value[victim] = np.inf
                    gone = page_of[row, victim]
                    if gone != ABSENT:
                        slot_of[row, h, gone] = ABSENT
                    page_of[row, victim] = page
                    slot_of[row, h, page] = victim
                    at[r, h, i] = victim
                    missing[0, kept] = r
                    missing[1, kept] = h
                    missing[2, kept] = page
                    missing[3, kept] = row * total + victim
                    missing[4, kept] = gone
                    kept += 1
                count = kept
            for i in range(n):
                at[r, h, i] += row * total
    return count


@njit("int64(int64[::1], int64[:, :, ::1], int32[:, :, ::1], int64[:, ::1])", cache=True)
def absent(rows, selected, slot_of, missing):
    """List what `admit` of the same pages will give a slot: request, head and page in `missing` ([3, request * kv_head * n]
    int64); return how many columns count. Arguments as for `admit`."""
    num_requests, num_heads, n = selected.shape
    count = 0
    for r in range(num_requests):
        for h in range(num_heads):
            slots = slot_of[rows[r], h]
            for i in range(n):
                page = selected[r, h, i]
                if slots[page] == ABSENT:
                    missing[0, count], missing[1, count], missing[2, count] = r, h, page
                    count += 1
    return count


@njit("int64(int64[::1], int64[::1], int64, int64, int64[::1], int64[::1], int64, int64[::1])", cache=True)
def frame_rows(heads, pages, first_pair, num_frames, frame_of, stamp, clock, rows):
    """Fill `rows` ([n] int64) with where the frame arena holds pages ([n] int64 KV head, logical page), ABSENT for no frame, and
    note in `stamp` that they are used now; return how many have no frame."""
    away = 0
    for i in range(len(pages)):
        frame = frame_of[pages[i]]
        stamp[pages[i]] = clock
        if frame == ABSENT:
            rows[i] = ABSENT
            away += 1
        else:
            rows[i] = (first_pair + heads[i]) * num_frames + frame
    return away


@njit("void(int64[::1], int64[:, :, ::1], float32[:, :, ::1], int64[::1])", cache=True)
def mark_used(rows, selected, last, clock):
    """Count a step in `clock` ([row] int64) and note it in `last` ([row, kv_head, page] float32) for every page that is
    selected ([request, kv_head, n] int64)."""
    num_requests, num_heads, n = selected.shape
    for r in range(num_requests):
        clock[rows[r]] += 1
        for h in range(num_heads):
            for i in range(n):
                last[rows[r], h, selected[r, h, i]] = clock[rows[r]]


@njit("void(int64[::1], int64[:, :, ::1], float32[:, :, ::1])", cache=True)
def count_used(rows, selected, uses):
    """Add one to `uses` ([row, kv_head, page] float32) where a page is selected ([request, kv_head, n] int64)."""
    num_requests, num_heads, n = selected.shape
    for r in range(num_requests):
        for h in range(num_heads):
            for i in range(n):
                uses[rows[r], h, selected[r, h, i]] += np.float32(1)


@njit(
    "void(int64[::1], int64[:, :, ::1], int32[:, :, ::1], float32[:, :, ::1], float32[:, :, ::1], float32[:, :, ::1],"
    " float32[::1])",
    cache=True,
    fastmath=True,
)
def smooth_scores(rows, selected, bits, average, uses, priority, weights):
    """Rank pages by the average of their log scores over the steps, their left neighbour's, and how often they were used.

    A float's bits, read as an integer, are its logarithm but for a linear piece between powers of two: good enough to
    rank, and forty times cheaper.

    Args:
        rows: [request] int64; selected: [request, kv_head, n] int64; bits: [request, kv_head, page] int32, the scores.
        average, uses: [row, kv_head, page] float32, what is remembered.
        priority: [request, kv_head, page] float32, result.
        weights: [6] float32: decay of the average, lowest and highest log score (over the last selected one's),
            weight of the neighbour, decay of the uses, weight of the uses.
    """
    num_requests, num_heads, n = selected.shape
    num_pages = bits.shape[2]
    decay, lowest, highest, neighbour, use_decay, use_weight = weights
    per_bit = np.float32(np.log(2.0) / (1 << 23))
    new = np.float32(1) - decay
    for r in range(num_requests):
        row = rows[r]
        for h in range(num_heads):
            border = bits[r, h, selected[r, h, 0]]
            for i in range(1, n):
                border = min(border, bits[r, h, selected[r, h, i]])
            zero = np.float32(border)
            mean, used, seen, out = average[row, h], uses[row, h], bits[r, h], priority[r, h]
            for p in range(num_pages):
                score = (np.float32(seen[p]) - zero) * per_bit
                score = min(max(score, lowest), highest)
                mean[p] = decay * mean[p] + new * score
                used[p] = use_decay * used[p] + np.float32(score >= np.float32(0))
                out[p] = mean[p] + use_weight * used[p]
            for p in range(1, num_pages):
                out[p] += neighbour * mean[p - 1]


@njit(
    "void(uint16[:, ::1], uint32[:, ::1], int64[:], int64[:], int64, int64, int64[::1], uint32[::1])",
    cache=True,
)
def page_places(place_of, page_crcs, heads, ordinals, begin, page_bytes, offsets, crcs):
    """Look up where pages of one layer of a span lie.

    Args:
        place_of: [kv_head, page] uint16, the place of each page ordinal; page_crcs: [kv_head, place] uint32.
        heads, ordinals: [n] int64; begin: where the layer begins in the file; page_bytes: between two places.
        offsets: [n] int64, crcs: [n] uint32, results.
    """
    num_pages = place_of.shape[1]
    for i in range(len(heads)):
        place = np.int64(place_of[heads[i], ordinals[i]])
        offsets[i] = begin + (heads[i] * num_pages + place) * page_bytes
        crcs[i] = page_crcs[heads[i], place]


@njit(
    "int64(int64[::1], int64[::1], int64[::1], int64, int64, int64, int64, int64[::1], int64[:, ::1])",
    cache=True,
)
def plan_reads(owner, begins, ends, gap, most, grid, alignment, read_of, reads):
    """Join pages that lie near each other in a file into reads.

    Args:
        owner: [page] int64, the file, ascending; begins, ends: [page] int64, where a page lies in it, ascending per file.
        gap: bytes between pages that are read too; most: bytes of a read, if it is not one page.
        grid: reads begin and end at its multiples; alignment: of every read in the buffer.
        read_of: [page] int64, result: which read brings a page.
        reads: [4, page + 1] int64, result: file, offset, length, place in the buffer; after the last one the buffer's size.

    Returns:
        How many reads there are.
    """
    count, at, i = 0, 0, 0
    while i < len(owner):
        first, last = i, i
        while (
            last + 1 < len(owner)
            and owner[last + 1] == owner[i]
            and begins[last + 1] - ends[last] <= gap
            and ends[last + 1] - begins[first] <= most
        ):
            last += 1
        start = begins[first] // grid * grid
        length = -(-ends[last] // grid) * grid - start
        reads[0, count], reads[1, count], reads[2, count], reads[3, count] = owner[i], start, length, at
        at += -(-length // alignment) * alignment
        for page in range(first, last + 1):
            read_of[page] = count
        count += 1
        i = last + 1
    reads[3, count] = at
    return count


@njit(
    [
        "void(uint8[:, :], uint8[:, :], uint8[:, ::1], uint8[:, ::1], int64[::1], int64[::1])",
        "void(int64[:, :], int64[:, :], int64[:, ::1], int64[:, ::1], int64[::1], int64[::1])",
    ],
    cache=True,
)
def move_pages(k_source, v_source, k_pool, v_pool, source, target):
    """Copy row `source[i]` of the sources to row `target[i]` of the pools ([row, byte] uint8, or eight bytes as int64, which
    is ten times faster), -1 copies nothing."""
    for i in range(len(source)):
        here, there = source[i], target[i]
        if here >= 0:
            for j in range(k_pool.shape[1]):
                k_pool[there, j] = k_source[here, j]
            for j in range(v_pool.shape[1]):
                v_pool[there, j] = v_source[here, j]


@njit(
    "void(float32[:, :, ::1], float32[:, :, ::1], float32[:, ::1], uint8[:, :, ::1])",
    cache=True,
    error_model="numpy",
)
def sketch_build(keys, key_map, offset, packed):
    """Fill `packed` ([kv_head, entry, direction / 2] uint8) with the codes of keys: see `ref.sketch_build`.

    Args:
        keys: [kv_head, entry, head_dim] float32; key_map: [kv_head, head_dim, direction] float32; offset: [kv_head,
            direction] float32.
    """
    num_heads, num_entries, dim = keys.shape
    half = packed.shape[2]
    sums = np.empty(2 * half, dtype=np.float64)
    for h in range(num_heads):
        wide = key_map[h].astype(np.float64)
        for e in range(num_entries):
            sums[:] = 0.0
            for d in range(dim):
                value, row = np.float64(keys[h, e, d]), wide[d]
                for r in range(2 * half):
                    sums[r] += value * row[r]
            for r in range(2 * half):
                code = np.floor(sums[r] + np.float64(offset[h, r]))
                sums[r] = min(max(code, 0.0), 15.0)
            for r in range(half):
                packed[h, e, r] = np.uint8(sums[r]) | np.uint8(np.uint8(sums[half + r]) << 4)


@njit(fastmath={"contract"}, error_model="numpy")
def _read_codes(packed, weights, logits):
    """Add to `logits` ([row, column] float32) what the codes of `packed` ([byte, column] uint8) give by `weights` ([row,
    direction] float32, byte j's low nibble at j and its high one at byte + j).

    Two bytes and three rows at a time, so that most of the work is multiplication; numba's integers have 64 bits unless told
    otherwise.
    """
    half, width = packed.shape
    num_rows = logits.shape[0]
    for j in range(0, half, 2):
        other = min(j + 1, half - 1)
        share = np.float32(other - j)  # 0 where there is no second byte
        first, second = packed[j], packed[other]
        for g in range(0, num_rows - 2, 3):
            w, x, y = weights[g], weights[g + 1], weights[g + 2]
            a0, b0, c0, d0 = w[j], w[half + j], w[other] * share, w[half + other] * share
            a1, b1, c1, d1 = x[j], x[half + j], x[other] * share, x[half + other] * share
            a2, b2, c2, d2 = y[j], y[half + j], y[other] * share, y[half + other] * share
            out0, out1, out2 = logits[g], logits[g + 1], logits[g + 2]
            for c in range(width):
                low, high = np.float32(np.uint8(first[c] & 15)), np.float32(np.uint8(first[c] >> 4))
                more, most = np.float32(np.uint8(second[c] & 15)), np.float32(np.uint8(second[c] >> 4))
                out0[c] = out0[c] + a0 * low + b0 * high + c0 * more + d0 * most
                out1[c] = out1[c] + a1 * low + b1 * high + c1 * more + d1 * most
                out2[c] = out2[c] + a2 * low + b2 * high + c2 * more + d2 * most
        for g in range(num_rows - num_rows % 3, num_rows):
            w, out = weights[g], logits[g]
            a, b, e, f = w[j], w[half + j], w[other] * share, w[half + other] * share
            for c in range(width):
                low, high = np.float32(np.uint8(first[c] & 15)), np.float32(np.uint8(first[c] >> 4))
                more, most = np.float32(np.uint8(second[c] & 15)), np.float32(np.uint8(second[c] >> 4))
                out[c] = out[c] + a * low + b * high + e * more + f * most


@intrinsic
def _as_float(context, bits):
    """Return the float32 that has the bits of an int32, or, of a uint16, of a bfloat16."""

    def generate(context, builder, signature, args):
        (wide,) = args
        if bits == types.uint16:  # bfloat16 is the upper half of float32
            int32 = context.get_value_type(types.int32)
            wide = builder.shl(builder.zext(wide, int32), int32(16))
        return builder.bitcast(wide, context.get_value_type(types.float32))

    return types.float32(bits), generate


@njit(fastmath={"contract"}, error_model="numpy")
def _power(x):
    """Return 2 ** x for an exponent that is not above 0: a power of two, made from its bits, times a polynomial of the rest."""
    x = x if x > np.float32(-125) else np.float32(-125)
    k = np.int32(x - np.float32(0.5))
    f = x - np.float32(k)
    y = np.float32(1.5403530e-4) * f + np.float32(1.3333558e-3)
    y = y * f + np.float32(9.6181291e-3)
    y = y * f + np.float32(5.5504109e-2)
    y = y * f + np.float32(2.4022651e-1)
    y = y * f + np.float32(6.9314718e-1)
    return (y * f + np.float32(1)) * _as_float(np.int32((k + np.int32(127)) << np.int32(23)))


@njit(fastmath={"contract"}, error_model="numpy")
def _largest(logits, g, best):
    """Return the largest of `logits[:, g]` ([block, row, column] float32); `best` ([column]) is overwritten."""
    best[:] = np.float32(-np.inf)
    for b in range(len(logits)):
        for c in range(len(best)):
            value = logits[b, g, c]
            best[c] = value if value > best[c] else best[c]
    return best.max()


@njit(
    "void(float32[:, :, ::1], float32[:, :, ::1], float32, uint8[:, :, :, ::1], float32[:, ::1])",
    cache=True,
    fastmath={"contract"},
    error_model="numpy",
)
def sketch_score(query, query_map, scale, blocks, scores):
    """Fill `scores` ([kv_head, page] float32) with sums of softmaxes to the base 2; every page of `scores` counts.

    A block holds `SKETCH_LANES` pages: loops run over them, become vector instructions, and no sum depends on how many pages
    follow.

    Args:
        query: [kv_head, group, head_dim] float32; query_map: [kv_head, head_dim, direction] float32; scale: float32, of the
            logits to the base 2; blocks: [kv_head, block, direction / 2, entry of a page * lane] uint8 of
            `cpu.sketch_blocks`.
    """
    num_heads, _, _, width = blocks.shape
    group, num_pages = query.shape[1], scores.shape[1]
    # what a code adds to a logit
    weights = np.zeros((num_heads, group, query_map.shape[2]), dtype=np.float32)
    for h in range(num_heads):
        for g in range(group):
            out = weights[h, g]
            for d in range(query.shape[2]):
                value, row = query[h, g, d] * scale, query_map[h, d]
                for r in range(len(out)):
                    out[r] += value * row[r]
    num_blocks = (num_pages + SKETCH_LANES - 1) // SKETCH_LANES
    chunk = min(group, 9)
    logits = np.empty((num_blocks, chunk, width), dtype=np.float32)
    sums = np.empty((num_blocks, SKETCH_LANES), dtype=np.float32)
    masses = np.empty((num_blocks, SKETCH_LANES), dtype=np.float32)
    powers = np.empty(width, dtype=np.float32)
    best = np.empty(width, dtype=np.float32)
    lanes = np.empty(SKETCH_LANES, dtype=np.float32)
    for h in range(num_heads):
        masses[:] = np.float32(0)
        for begin in range(0, group, chunk):
            rows = min(chunk, group - begin)
            for b in range(num_blocks):
                logits[b] = np.float32(0)
                _read_codes(blocks[h, b], weights[h, begin : begin + rows], logits[b, :rows])
            for g in range(rows):
                last = logits[num_blocks - 1, g]
                for c in range(width):  # pages of the last block that do not count
                    if c % SKETCH_LANES > (num_pages - 1) % SKETCH_LANES:
                        last[c] = np.float32(-np.inf)
                top = _largest(logits, g, best)
                lanes[:] = np.float32(0)
                for b in range(num_blocks):
                    row = logits[b, g]
                    for c in range(width):
                        powers[c] = _power(row[c] - top)
                    sums[b] = np.float32(0)
                    for i in range(0, width, SKETCH_LANES):
                        for c in range(SKETCH_LANES):
                            sums[b, c] += powers[i + c]
                    for c in range(SKETCH_LANES):
                        lanes[c] += sums[b, c]
                total = np.float32(0)
                for c in range(SKETCH_LANES):
                    total += lanes[c]
                share = np.float32(1) / total
                for b in range(num_blocks):
                    for c in range(SKETCH_LANES):
                        masses[b, c] += sums[b, c] * share
        whole = masses.reshape(num_blocks * SKETCH_LANES)
        for p in range(num_pages):
            scores[h, p] = whole[p]


@njit(fastmath={"contract"}, error_model="numpy")
def _read_means(block, weights, first, logits):
    """Fill `logits` ([4, column] float32) with the products of `block` ([dim, column]) and the rows of `weights` ([row, dim]
    float32) from `first` on; rows past the last one repeat it.

    Four dimensions by four rows at a time: what is loaded and widened is used four times, so that most of the work is
    multiplication.
    """
    dim, width = block.shape
    last = len(weights) - 1
    a, b, c, d = (
        weights[first],
        weights[min(first + 1, last)],
        weights[min(first + 2, last)],
        weights[min(first + 3, last)],
    )
    out0, out1, out2, out3 = logits[0], logits[1], logits[2], logits[3]
    logits[:] = np.float32(0)
    for i in range(0, dim, 4):
        bits0, bits1, bits2, bits3 = block[i], block[i + 1], block[i + 2], block[i + 3]
        a0, a1, a2, a3 = a[i], a[i + 1], a[i + 2], a[i + 3]
        b0, b1, b2, b3 = b[i], b[i + 1], b[i + 2], b[i + 3]
        c0, c1, c2, c3 = c[i], c[i + 1], c[i + 2], c[i + 3]
        d0, d1, d2, d3 = d[i], d[i + 1], d[i + 2], d[i + 3]
        for p in range(width):
            m0 = _as_float(bits0[p])
            m1 = _as_float(bits1[p])
            m2 = _as_float(bits2[p])
            m3 = _as_float(bits3[p])
            out0[p] = out0[p] + a0 * m0 + a1 * m1 + a2 * m2 + a3 * m3
            out1[p] = out1[p] + b0 * m0 + b1 * m1 + b2 * m2 + b3 * m3
            out2[p] = out2[p] + c0 * m0 + c1 * m1 + c2 * m2 + c3 * m3
            out3[p] = out3[p] + d0 * m0 + d1 * m1 + d2 * m2 + d3 * m3


@njit(
    [
        "void(float32[:, :, ::1], float32, uint16[:, :, :, ::1], float32[:, ::1])",
        "void(float32[:, :, ::1], float32, int32[:, :, :, ::1], float32[:, ::1])",
    ],
    cache=True,
    fastmath={"contract"},
    error_model="numpy",
)
def mean_score(query, scale, blocks, scores):
    """Fill `scores` ([kv_head, page] float32) with sums of softmaxes to the base 2; every page of `scores` counts.

    Args:
        query: [kv_head, group, head_dim] float32; scale: float32, of the logits to the base 2; blocks: [kv_head, block,
            head_dim, page of a block] of `cpu.mean_blocks`, the bits of bfloat16 (uint16) or of float32 (int32).
    """
    num_heads, _, dim, width = blocks.shape
    group, num_pages = query.shape[1], scores.shape[1]
    weights = np.zeros((num_heads, group, dim), dtype=np.float32)
    weights[:, :, : query.shape[2]] = query * scale
    num_blocks = (num_pages + width - 1) // width
    logits = np.empty((num_blocks, 4, width), dtype=np.float32)
    masses = np.empty((num_blocks, width), dtype=np.float32)
    powers = np.empty((num_blocks, width), dtype=np.float32)
    best = np.empty(width, dtype=np.float32)
    lanes = np.empty(width, dtype=np.float32)
    for h in range(num_heads):
        masses[:] = np.float32(0)
        for begin in range(0, group, 4):
            for b in range(num_blocks):
                _read_means(blocks[h, b], weights[h], begin, logits[b])
            for g in range(min(4, group - begin)):
                last = logits[num_blocks - 1, g]
                for c in range(
                    (num_pages - 1) % width + 1, width
                ):  # pages of the last block that do not count
                    last[c] = np.float32(-np.inf)
                top = _largest(logits, g, best)
                lanes[:] = np.float32(0)
                for b in range(num_blocks):
                    row, out = logits[b, g], powers[b]
                    for c in range(width):
                        power = _power(row[c] - top)
                        out[c] = power
                        lanes[c] += power
                total = np.float32(0)
                for c in range(width):
                    total += lanes[c]
                share = np.float32(1) / total
                for b in range(num_blocks):
                    for c in range(width):
                        masses[b, c] += powers[b, c] * share
        whole = masses.reshape(num_blocks * width)
        for p in range(num_pages):
            scores[h, p] = whole[p]


@njit("void(float32[:, :, ::1], int64[:, :], float32[:, ::1])", cache=True, error_model="numpy")
def cluster_score(logits, cluster_of, scores):
    """Fill `scores` ([kv_head, page] float32): see `ref.cluster_score`; an exponential per cluster, not per page.

    Args:
        logits: [kv_head, group, cluster] float32; cluster_of: [kv_head, page] int64, -1 for pages that do not count.
    """
    num_heads, group, num_clusters = logits.shape
    num_pages = cluster_of.shape[1]
    weights = np.empty(num_clusters, dtype=np.float32)
    masses = np.empty(num_clusters, dtype=np.float32)
    for h in range(num_heads):
        masses[:] = np.float32(0)
        for g in range(group):
            top = logits[h, g].max()
            for r in range(num_clusters):
                weights[r] = np.exp(logits[h, g, r] - top)
            total = np.float32(0)
            for p in range(num_pages):
                if cluster_of[h, p] >= 0:
                    total += weights[cluster_of[h, p]]
            share = np.float32(1) / total
            for r in range(num_clusters):
                masses[r] += weights[r] * share
        for p in range(num_pages):
            scores[h, p] = masses[cluster_of[h, p]] if cluster_of[h, p] >= 0 else np.float32(-np.inf)
