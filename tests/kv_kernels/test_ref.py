"""The definitions against arithmetic done by hand, and the CPU formulations against the definitions."""

import math

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_gather_on_cpu_equals_the_definition(dtype: torch.dtype) -> None:
    pool = torch.randn(3, 11, 24).mul(100).to(dtype)
    index = torch.tensor([[0, 10, 3, -1], [5, 5, 1, 2], [9, -1, -1, 0]])
    gathered = ref.gather_pages(pool, index)
    assert (gathered[0, 1] == pool[0, 10]).all()
    assert (gathered[2, 1] == pool[2, 0]).all()
    assert torch.equal(cpu.gather_pages(pool, index), gathered)
    view = pool[:, :, 8:16]  # not contiguous
    assert torch.equal(dispatch.gather_pages(view, index), gathered[:, :, 8:16])


def test_attention_is_torch_attention() -> None:
    query, k, v = torch.randn(3, 4, 16), torch.randn(3, 20, 16), torch.randn(3, 20, 16)
    out, lse = ref.sparse_decode_attention(query, k, v, 13, 0.25)
    expected = torch.nn.functional.scaled_dot_product_attention(query, k[:, :13], v[:, :13], scale=0.25)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, (query @ k[:, :13].mT * 0.25).exp().sum(-1).log())


def test_attention_over_nothing_is_empty() -> None:
    query, k, v = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    out, lse = ref.sparse_decode_attention(query, k, v, torch.tensor([0, 5]), 1.0)
    assert (out[0] == 0).all()
    assert (lse[0] == -INF).all()
    assert lse[1].isfinite().all()


@pytest.mark.parametrize("cut", [0, 1, 9, 20])
def test_merging_the_parts_gives_the_whole(cut: int) -> None:
    query, k, v = torch.randn(3, 4, 16), torch.randn(3, 20, 16), torch.randn(3, 20, 16)
    left = ref.sparse_decode_attention(query, k[:, :cut], v[:, :cut], cut, 0.25)
    right = ref.sparse_decode_attention(query, k[:, cut:], v[:, cut:], 20 - cut, 0.25)
    merged = ref.merge_states(*left, *right)
    whole = ref.sparse_decode_attention(query, k, v, 20, 0.25)
    torch.testing.assert_close(merged, whole)


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


def test_sketch_build_by_hand() -> None:
    keys = torch.tensor([[[1.0, 0.0], [-0.1, 3.0], [100.0, -100.0]]])
    key_map = torch.tensor([[[1.0, 0.0, 2.0, 0.0], [0.0, 1.0, 0.0, -1.0]]])
    offset = torch.tensor([[8.0, 8.0, 7.5, 0.0]])
    # coordinates: 9 8 9.5 0; 7.9 11 7.3 -3; 108 -92 207.5 100
    expected = [[[9, 8, 9, 0], [7, 11, 7, 0], [15, 0, 15, 15]]]
    assert ref.unpack_codes(ref.sketch_build(keys, key_map, offset)).tolist() == expected


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


def test_a_code_does_not_depend_on_how_many_keys_share_a_call() -> None:
    keys, key_map = torch.randn(2, 100, 64).bfloat16(), torch.randn(2, 64, 32)
    offset = torch.full((2, 32), ref.CODE_CENTRE)
    whole = ref.sketch_build(keys, key_map, offset)
    parts = [ref.sketch_build(keys[:, i : i + 7], key_map, offset) for i in range(0, 100, 7)]
    assert torch.equal(torch.cat(parts, 1), whole)
