"""Definition of the key sketch: every key in a few calibrated directions, four bits each, and the score it gives.

A direction is a constant of the model, of one (layer, KV head). Logits live in the space in which the queries are white:
with S the square root of the query covariance and E the leading eigenvectors of S Ck S, a key becomes k S E and a query
q S^-1 E. The quantiser's step of a direction is a constant too, and is folded into both maps, so that a sketch holds
codes and nothing else: 32 directions take 16 bytes a key. Scales per page and direction would add half of that again; in a
first trial by attention mass, constant steps of 0.4 standard deviations came close to them (benchmarks/NOTES.md).

Packed layout, uint8 [..., entry, direction / 2]: byte j holds direction j in its low nibble and direction j + direction / 2
in its high nibble. A code c in 0..15 stands for the coordinate c - 7.5 steps from the calibration's mean key; the 7.5 and
the mean move every logit of a query alike, softmax does not see them, and so nobody adds them.
"""

import torch

CODE_MAX = 15  # four bits
CODE_CENTRE = 8.0  # what floor() must see at a direction's mean: half of the codes lie below


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes [..., direction] in 0..15, an even number of directions, into uint8 [..., direction / 2]."""
    low, high = codes.to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes, uint8 [..., direction], of packed ones, uint8 [..., direction / 2]."""
    return torch.cat([packed & CODE_MAX, packed >> 4], dim=-1)


def sketch_build(keys: torch.Tensor, key_map: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return the packed sketch of keys: floor(key . key_map + offset), clamped to 0..15.

    In float64, so that a code does not depend on how many keys share a call.

    Args:
        keys: [..., kv_head, entry, head_dim] float: keys after RoPE, or means of neighbouring keys for a coarser sketch.
        key_map: [kv_head, head_dim, direction] float32: S E, each direction divided by its step.
        offset: [kv_head, direction] float32: `CODE_CENTRE` minus the calibration's mean key . key_map.

    Returns:
        [..., kv_head, entry, direction / 2] uint8, laid out as the module says.
    """
    coordinates = keys.double() @ key_map.double() + offset.double()[:, None]
    return pack_codes(coordinates.floor().clamp(0, CODE_MAX))


def sketch_score(
    query: torch.Tensor,
    sketch: torch.Tensor,
    query_map: torch.Tensor,
    scale: float,
    page_entries: int,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score every page: sum over the group, and over the page's entries, of the softmax over all entries.

    Args:
        query: [..., kv_head, group, head_dim] float; several query tokens count as a larger group.
        sketch: [..., kv_head, entry, direction / 2] uint8 of `sketch_build`.
        query_map: [kv_head, head_dim, direction] float32: S^-1 E, each direction multiplied by its step.
        scale: the model's attention scale, usually head_dim ** -0.5.
        page_entries: entries per page, page_size for one entry a token; the last page may hold fewer.
        lengths: [request] integer, entries that count per request, at least 1; the leading axis must then be the
            only one. None: all entries count.

    Returns:
        [..., kv_head, ceil(entry / page_entries)] float32; -inf for pages none of whose entries count.
    """
    num_entries = sketch.shape[-2]
    projected = query.float() @ query_map * scale  # [..., kv_head, group, direction]
    logits = projected @ unpack_codes(sketch).float().transpose(-1, -2)  # [..., kv_head, group, entry]
    beyond = torch.zeros(num_entries, dtype=torch.bool, device=sketch.device)
    if lengths is not None:
        beyond = torch.arange(num_entries, device=sketch.device) >= lengths[:, None, None, None]
    weights = logits.masked_fill(beyond, float("-inf")).softmax(-1).sum(-2)  # [..., kv_head, entry]
    pages = torch.nn.functional.pad(weights, (0, -num_entries % page_entries)).unflatten(
        -1, (-1, page_entries)
    )
    scores: torch.Tensor = pages.sum(-1)
    if lengths is None:
        return scores
    first = torch.arange(0, num_entries, page_entries, device=sketch.device)
    return scores.masked_fill(first >= lengths[:, None, None], float("-inf"))
