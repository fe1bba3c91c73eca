"""The definitions against arithmetic done by hand, and the CPU formulations against the definitions."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_kernels import cpu, dispatch, ref

INF = float("inf")


def test_page_score_by_hand() -> None:
    query = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])  # 1 KV head, group 2
    means = torch.tensor([[[math.log(2), 0.0], [0.0, 0.0], [0.0, math.log(3) / 2]]])
    # logits of member 0: log 2, 0, 0 -> 2/4 1/4 1/4; of member 1: 0, 0, log 3 -> 1/5 1/5 3/5
    expected = torch.tensor([[0.5 + 0.2, 0.25 + 0.2, 0.25 + 0.6]])
    torch.testing.assert_close(ref.page_score(query, means, scale=1.0), expected)


def test_page_score_of_a_request_ignores_what_lies_beyond_its_length() -> None:
    query, means = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 10, 8)
    scores = ref.page_score(query, means, 0.3, torch.tensor([7, 10]))
    torch.testing.assert_close(scores[0, :, :7], ref.page_score(query[0], means[0, :, :7], 0.3))
    torch.testing.assert_close(scores[1], ref.page_score(query[1], means[1], 0.3))
    assert (scores[0, :, 7:] == -INF).all()


@pytest.mark.parametrize("select", [ref.topk_pages, cpu.topk_pages, dispatch.topk_pages])
def test_topk_breaks_ties_to_the_lower_page_and_pads(select) -> None:  # type: ignore[no-untyped-def]
    scores = torch.tensor(
        [[1.0, 5.0, 3.0, 3.0, 3.0], [INF, -INF, -INF, 0.0, -INF], [2.0, 2.0, 2.0, 2.0, 2.0]]
    )
    assert select(scores, 3).tolist() == [[1, 2, 3], [0, 3, -1], [0, 1, 2]]
    assert select(scores, 5).tolist() == [[0, 1, 2, 3, 4], [0, 3, -1, -1, -1], [0, 1, 2, 3, 4]]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.data())
def test_topk_against_python(values: list[int], data: st.DataObject) -> None:
    num = data.draw(st.integers(1, len(values)))
    expected = sorted(sorted(range(len(values)), key=lambda page: (-values[page], page))[:num])
    scores = torch.tensor(values, dtype=torch.float32)
    assert ref.topk_pages(scores, num).tolist() == expected
    assert cpu.topk_pages(scores, num).tolist() == expected


@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=60), st.data())
def test_topk_of_any_floats(values: list[float], data: st.DataObject) -> None:
    scores, num = torch.tensor([values, values[::-1]]), data.draw(st.integers(1, len(values)))
    assert torch.equal(cpu.topk_pages(scores, num), ref.topk_pages(scores, num))


def test_topk_with_a_budget_per_row() -> None:
    scores = torch.tensor(
        [[[1.0, 5.0, 3.0, 3.0], [4.0, -INF, 2.0, 3.0]], [[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 2.0, 3.0]]]
    )
    chosen = dispatch.topk_pages(scores, 3, torch.tensor([[2, 3], [0, 1]]))
    assert chosen.tolist() == [[[1, 2, -1], [0, 2, 3]], [[-1, -1, -1], [3, -1, -1]]]


def test_cluster_score_is_the_page_score_of_centroids() -> None:
    query, centroids = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8)
    cluster_of = torch.randint(0, 5, (2, 3, 11))
    spread = centroids.gather(2, cluster_of[..., None].expand(-1, -1, -1, 8))
    expected = ref.page_score(query, spread, 0.3)
    torch.testing.assert_close(ref.cluster_score(query, centroids, cluster_of, 0.3), expected)
    cluster_of[0, 1, 7:] = -1
    scores = ref.cluster_score(query, centroids, cluster_of, 0.3)
    torch.testing.assert_close(scores[0, 1, :7], ref.page_score(query[0, 1:2], spread[0, 1:2, :7], 0.3)[0])
    assert (scores[0, 1, 7:] == -INF).all()


@pytest.mark.parametrize(("group", "num_clusters", "num_pages"), [(1, 1, 1), (3, 7, 40), (8, 33, 20)])
def test_clusters_score_alike_on_the_cpu(group: int, num_clusters: int, num_pages: int) -> None:
    query, rows = torch.randn(2, group, 8).bfloat16(), torch.randn(2, num_clusters + 3, 8)[:, :num_clusters]
    cluster_of = torch.randint(0, num_clusters, (2, num_pages + 9))[:, :num_pages]
    cluster_of[1, 1:] -= torch.randint(0, 2, (num_pages - 1,)) * num_clusters
    cluster_of.clamp_(min=-1)
    expected = ref.cluster_score(query, rows, cluster_of, 0.3)
    torch.testing.assert_close(dispatch.cluster_score(query, rows, cluster_of, 0.3), expected)


def test_two_levels_rank_candidates_by_their_means_and_nothing_else() -> None:
    query = torch.tensor([[[[1.0, 0.0]]]])
    means = torch.tensor([[[[0.0, 1.0], [3.0, 0.0], [9.0, 0.0], [1.0, 0.0], [2.0, 5.0]]]])
    centroids = torch.tensor([[[[2.0, 0.0], [1.0, 0.0]]]])
    cluster_of = torch.tensor([[[0, 0, 1, 1, 0]]])  # page 2 is the best, but its cluster is not
    scores = dispatch.two_level_score(query, centroids, cluster_of, means, 1.0, num_candidates=3)
    assert scores[0, 0, 2:4].tolist() == [-INF, -INF]
    torch.testing.assert_close(scores[0, 0, [0, 1, 4]], torch.tensor([0.0, 3.0, 2.0]).softmax(0))
    everything = dispatch.two_level_score(query, centroids, cluster_of, means, 1.0, num_candidates=5)
    torch.testing.assert_close(everything, ref.page_score(query, means, 1.0))


def test_a_window_gives_up_what_scores_lowest_and_never_what_is_selected() -> None:
    slot_of, page_of = torch.full((1, 1, 9), -1, dtype=torch.int32), torch.full((1, 3), -1, dtype=torch.int32)

    def admit(pages: list[int], scores: list[float]) -> tuple[list[int], list[bool]]:
        at, missing = dispatch.window_admit(
            torch.tensor([0]),
            torch.tensor([[pages]]),
            torch.tensor([[scores]]),
            slot_of,
            page_of,
            torch.tensor([0, 3]),
        )
        return at[0, 0].tolist(), missing[0, 0].tolist()

    assert admit([4, 7], [0.0] * 9) == ([0, 1], [True, True])  # empty slots, the lower first
    assert admit([2, 7], [0.0] * 9) == ([2, 1], [True, False])
    scores = [0.0, 0.0, 0.1, 0.0, 0.5, 0.0, 0.0, 0.2]
    assert admit([0, 2], scores) == ([1, 2], [True, False])  # 7 leaves: 2 scores less, but is selected now
    assert admit([8, -1], scores) == ([1, -1], [True, False])  # 0 leaves; 8 has no score yet
    assert admit([5, 6], scores) == ([1, 2], [True, True])  # 8 first, which has none, then 2
    assert page_of.tolist() == [[4, 5, 6]]
    assert slot_of[0, 0].tolist() == [-1, -1, -1, -1, 0, 1, 2, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fetch_and_append_move_bytes_and_nothing_else(dtype: torch.dtype) -> None:
    k_source, v_source = torch.randn(2, 11, 4, 6).to(dtype)
    k_pool, v_pool = torch.zeros(2, 9, 4, 6, dtype=dtype)
    dispatch.fetch_pages(
        k_source, v_source, k_pool, v_pool, torch.tensor([3, -1, 10]), torch.tensor([8, 2, 0])
    )
    assert torch.equal(k_pool[[8, 0]], k_source[[3, 10]])
    assert torch.equal(v_pool[[8, 0]], v_source[[3, 10]])
    assert (k_pool[1:8] == 0).all()
    k, v = torch.randn(2, 2, 1, 6).to(dtype)
    dispatch.append_tokens(k_pool, v_pool, k, v, torch.tensor([[8], [-1]]), torch.tensor([2, 1]))
    assert torch.equal(k_pool[8, 2], k[0, 0])
    assert torch.equal(v_pool[8, [0, 1, 3]], v_source[3, [0, 1, 3]])


def test_one_k_means_step_by_hand() -> None:
    rows = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.8, 0.6], [0.6, 0.8]]])
    centroids = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    assignment = dispatch.cluster_assign(rows, centroids)
    assert assignment.tolist() == [[0, 1, 0, 1]]  # the third centroid ties with the first and gets nothing
    sums, counts = dispatch.cluster_sums(rows, assignment, 3)
    torch.testing.assert_close(sums, torch.tensor([[[1.8, 0.6], [0.6, 1.8], [0.0, 0.0]]]))
    assert counts.tolist() == [[2, 2, 0]]


def paged(tokens: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut [kv_head, position, head_dim] into pages: a pool with them in descending order, and its table."""
    heads, positions, dim = tokens.shape
    padding = torch.full((heads, -positions % page_size, dim), float("nan"))
    pool = torch.cat([tokens, padding], 1).view(-1, page_size, dim).flip(0)
    return pool, torch.arange(len(pool)).flip(0).view(1, heads, -1)


def test_attention_is_torch_attention() -> None:
    query, k, v = torch.randn(3, 4, 16), torch.randn(3, 13, 16), torch.randn(3, 13, 16)
    k_pool, table = paged(k, 4)
    lengths = torch.full((1, 3), 13)
    out, lse = dispatch.sparse_decode_attention(query[None], k_pool, paged(v, 4)[0], table, lengths, 0.25)
    expected = torch.nn.functional.scaled_dot_product_attention(query, k, v, scale=0.25)
    torch.testing.assert_close(out[0], expected)
    torch.testing.assert_close(lse[0], (query @ k.mT * 0.25).exp().sum(-1).log())
    planned = dispatch.decode_attention(4, 4, 16, torch.float32, query.device, 0.25)
    planned.plan(lengths.int())
    assert torch.equal(planned.run(query[None], k_pool, paged(v, 4)[0], table)[0], out)


def test_attention_over_nothing_is_empty() -> None:
    query, pool = torch.randn(2, 2, 3, 8), torch.randn(5, 4, 8)
    table, lengths = torch.full((2, 2, 2), -1), torch.tensor([[0, 0], [8, 3]])
    table[1] = torch.tensor([[4, 2], [1, -1]])
    out, lse = ref.sparse_decode_attention(query, pool, pool, table, lengths, 1.0)
    assert (out[0] == 0).all()
    assert (lse[0] == -INF).all()
    assert lse[1].isfinite().all()


@pytest.mark.parametrize("cut", [0, 1, 9, 20])
def test_merging_the_parts_gives_the_whole(cut: int) -> None:
    query, k, v = torch.randn(3, 4, 16), torch.randn(3, 20, 16), torch.randn(3, 20, 16)

    def attend(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        k_pool, table = paged(k[:, begin:end], 1)
        lengths = torch.full((1, 3), end - begin)
        if begin == end:
            k_pool, table = torch.zeros(1, 1, 16), torch.full((1, 3, 1), -1)
        v_pool = paged(v[:, begin:end], 1)[0] if begin < end else k_pool
        return ref.sparse_decode_attention(query[None], k_pool, v_pool, table, lengths, 0.25)

    torch.testing.assert_close(ref.merge_states(*attend(0, cut), *attend(cut, 20)), attend(0, 20))


def test_merging_two_empty_states_is_empty() -> None:
    empty, none = torch.zeros(2, 8), torch.full((2,), -INF)
    out, lse = ref.merge_states(empty, none, empty, none)
    assert (out == 0).all()
    assert (lse == -INF).all()


def test_codes_pack_and_unpack() -> None:
    codes = torch.tensor([[0, 15, 1, 7], [8, 2, 15, 0]])
    assert ref.pack_codes(codes).tolist() == [[0x10, 0x7F], [0xF8, 0x02]]
    assert ref.unpack_codes(ref.pack_codes(codes)).tolist() == codes.tolist()
    every = torch.arange(16).expand(2, 16)
    assert torch.equal(ref.unpack_codes(ref.pack_codes(every)), every)


SKETCH_BUILDS = [ref.sketch_build, cpu.sketch_build, dispatch.sketch_build]


@pytest.mark.parametrize("build", SKETCH_BUILDS)
def test_sketch_build_by_hand(build: Callable[..., torch.Tensor]) -> None:
    keys = torch.tensor([[[1.0, 0.0], [-0.1, 3.0], [100.0, -100.0]]])
    key_map = torch.tensor([[[1.0, 0.0, 2.0, 0.0], [0.0, 1.0, 0.0, -1.0]]])
    offset = torch.tensor([[8.0, 8.0, 7.5, 0.0]])
    # coordinates: 9 8 9.5 0; 7.9 11 7.3 -3; 108 -92 207.5 100
    expected = [[[9, 8, 9, 0], [7, 11, 7, 0], [15, 0, 15, 15]]]
    assert ref.unpack_codes(build(keys, key_map, offset)).tolist() == expected


def test_a_fine_sketch_scores_pages_by_their_attention_mass() -> None:
    heads, group, dim = 2, 3, 16
    query, keys = torch.randn(heads, group, dim), torch.randint(0, 16, (heads, 21, dim)) - 7.5
    offset = torch.full((heads, dim), 7.5)
    identity = torch.eye(dim).expand(heads, dim, dim)
    sketch = ref.sketch_build(keys, identity, offset)
    assert sketch.dtype == torch.uint8
    mass = (query @ keys.mT * 0.25).softmax(-1).sum(1)
    scores = ref.sketch_score(query, sketch, identity, 0.25, page_entries=8)
    expected = torch.stack([mass[:, :8].sum(1), mass[:, 8:16].sum(1), mass[:, 16:].sum(1)], dim=1)
    torch.testing.assert_close(scores, expected)


def test_sketch_score_of_a_request_ignores_what_lies_beyond_its_length() -> None:
    query, query_map = torch.randn(2, 3, 4, 8), torch.randn(3, 8, 6)
    sketch = torch.randint(0, 256, (2, 3, 21, 3), dtype=torch.uint8)
    scores = ref.sketch_score(query, sketch, query_map, 0.3, 4, torch.tensor([9, 21]))
    alone = ref.sketch_score(query[0], sketch[0, :, :9], query_map, 0.3, 4)
    torch.testing.assert_close(scores[0, :, :3], alone)
    torch.testing.assert_close(scores[1], ref.sketch_score(query[1], sketch[1], query_map, 0.3, 4))
    assert (scores[0, :, 3:] == -INF).all()


@pytest.mark.parametrize("build", SKETCH_BUILDS)
def test_a_code_does_not_depend_on_how_many_keys_share_a_call(build: Callable[..., torch.Tensor]) -> None:
    keys, key_map = torch.randn(2, 100, 64).bfloat16(), torch.randn(2, 64, 32).half().float()
    offset = torch.full((2, 32), ref.CODE_CENTRE)
    whole = ref.sketch_build(keys, key_map, offset)
    parts = [build(keys[:, i : i + 7], key_map, offset) for i in range(0, 100, 7)]
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("page_entries", [1, 4, 8])
@pytest.mark.parametrize(
    ("num_pages", "group", "directions"), [(1, 1, 2), (31, 3, 6), (32, 4, 8), (33, 1, 32), (80, 9, 10)]
)
def test_blocks_score_as_sketches_do(page_entries: int, num_pages: int, group: int, directions: int) -> None:
    heads, dim = 2, 12
    query, query_map = 2 * torch.randn(heads, group, dim), torch.randn(heads, dim, directions) / 4
    sketch = torch.randint(0, 256, (num_pages, heads, page_entries, directions // 2), dtype=torch.uint8)
    blocks = cpu.sketch_blocks(heads, num_pages + 5, page_entries, directions // 2)
    blocks += 255  # what lies beyond the pages that count
    first = num_pages // 2
    cpu.sketch_put(blocks, 0, sketch[:first])
    cpu.sketch_put(blocks, first, sketch[first:])
    by_entry = sketch.transpose(0, 1).flatten(1, 2)
    expected = ref.sketch_score(query, by_entry, query_map, 0.3, page_entries)
    scores = dispatch.sketch_block_score(query, blocks, query_map, 0.3, num_pages)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)


def test_scores_of_blocks_depend_on_the_pages_that_count_alone() -> None:
    query, query_map = torch.randn(3, 3, 64).bfloat16(), torch.randn(3, 64, 32) / 8
    sketch = torch.randint(0, 256, (50, 3, 8, 16), dtype=torch.uint8)
    scores = []
    for room in (33, 50, 200):
        blocks = cpu.sketch_blocks(3, room, 8, 16)
        cpu.sketch_put(blocks, 0, sketch[:room])
        scores.append(dispatch.sketch_block_score(query, blocks, query_map, 0.125, 33))
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], scores[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_pages", "group", "dim"), [(1, 1, 2), (63, 3, 64), (64, 4, 64), (65, 9, 33), (300, 10, 128)]
)
def test_blocks_of_means_score_as_means_do(dtype: torch.dtype, num_pages: int, group: int, dim: int) -> None:
    heads = 2
    query, means = 2 * torch.randn(heads, group, dim), torch.randn(num_pages, heads, dim).to(dtype)
    blocks = cpu.mean_blocks(heads, num_pages + 5, dim, dtype)
    blocks[:, :, :dim] += 100  # what lies beyond the pages that count
    first = num_pages // 2
    cpu.mean_put(blocks, 0, means[:first])
    cpu.mean_put(blocks, first, means[first:])
    expected = ref.page_score(query, means.transpose(0, 1), 0.3)
    scores = dispatch.mean_block_score(query, blocks, 0.3, num_pages)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)


def test_scores_of_blocks_of_means_depend_on_the_pages_that_count_alone() -> None:
    query, means = torch.randn(3, 3, 64).bfloat16(), torch.randn(200, 3, 64).bfloat16()
    scores = []
    for room in (70, 128, 200):
        blocks = cpu.mean_blocks(3, room, 64, means.dtype)
        cpu.mean_put(blocks, 0, means[:room])
        scores.append(dispatch.mean_block_score(query, blocks, 0.125, 70))
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], scores[2])


def test_far_apart_logits_leave_nothing_infinite() -> None:
    query, query_map = torch.full((1, 1, 2), 100.0), torch.eye(2)[None]
    blocks = cpu.sketch_blocks(1, 2, 1, 1)
    cpu.sketch_put(blocks, 0, torch.tensor([0x00, 0xFF], dtype=torch.uint8).view(2, 1, 1, 1))
    scores = dispatch.sketch_block_score(query, blocks, query_map, 1.0, 2)
    torch.testing.assert_close(scores, torch.tensor([[0.0, 1.0]]))
