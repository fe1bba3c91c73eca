"""Every Triton kernel against its definition: odd lengths, both head sizes, all group sizes, fp32 and bf16."""

import os

import pytest
import torch

from kv_kernels import ref, triton_kernels

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
SHAPES = [  # kv_heads, group, head_dim
    (3, 3, 64),
    (2, 1, 128),
    (1, 4, 128),
    (2, 8, 64),
]
LENGTHS = [1, 63, 100, 1000]
DTYPES = [torch.float32, torch.bfloat16]
# Both sides compute in float32 from the same inputs; what differs is the order of sums and bf16's last rounding.
TOLERANCE = {torch.float32: (2e-5, 2e-6), torch.bfloat16: (8e-3, 1e-5)}  # relative, absolute


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    relative, absolute = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_pages", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_page_score(shape: tuple[int, int, int], num_pages: int, dtype: torch.dtype) -> None:
    heads, group, dim = shape
    query, means = random(heads, group, dim, dtype=dtype), random(heads, num_pages, dim, dtype=dtype)
    expected = ref.page_score(query, means, dim**-0.5)
    scores = triton_kernels.page_score(query, means, dim**-0.5)
    assert_close(scores, expected)
    num = min(16, num_pages)
    chosen, wanted = ref.topk_pages(scores, num), ref.topk_pages(expected, num)
    # selections are compared by what they score: equal scores may swap pages
    assert_close(expected.gather(1, chosen).sum(1), expected.gather(1, wanted).sum(1))


def test_page_score_of_a_batch_with_lengths_and_means_in_float32() -> None:
    query, means = random(3, 2, 3, 64, dtype=torch.bfloat16), random(3, 2, 300, 64, dtype=torch.float32)
    lengths = torch.tensor([300, 1, 129], dtype=torch.int32, device=DEVICE)
    expected = ref.page_score(query, means, 0.125, lengths)
    assert_close(triton_kernels.page_score(query, means, 0.125, lengths), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [63, 8 * 64, 2 * 8 * 128])
def test_gather_pages(width: int, dtype: torch.dtype) -> None:
    pool = random(3, 37, width, dtype=dtype)
    index = torch.randint(-1, 37, (3, 13), device=DEVICE)
    assert torch.equal(triton_kernels.gather_pages(pool, index), ref.gather_pages(pool, index))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sparse_decode_attention(shape: tuple[int, int, int], length: int, dtype: torch.dtype) -> None:
    heads, group, dim = shape
    query = random(heads, group, dim, dtype=dtype)
    k, v = random(heads, length + 5, dim, dtype=dtype), random(heads, length + 5, dim, dtype=dtype)
    k[:, length:], v[:, length:] = float("nan"), float("nan")  # what lies beyond the length must not matter
    out, lse = triton_kernels.sparse_decode_attention(query, k, v, length, dim**-0.5)
    wanted, wanted_lse = ref.sparse_decode_attention(query, k[:, :length], v[:, :length], length, dim**-0.5)
    assert out.dtype == dtype
    assert_close(out, wanted, dtype)
    assert_close(lse, wanted_lse)


def test_sparse_decode_attention_of_a_batch_is_that_of_its_requests() -> None:
    query = random(3, 2, 3, 64, dtype=torch.float32)
    k, v = random(3, 2, 520, 64, dtype=torch.float32), random(3, 2, 520, 64, dtype=torch.float32)
    lengths = torch.tensor([0, 520, 257], dtype=torch.int32, device=DEVICE)
    out, lse = triton_kernels.sparse_decode_attention(query, k, v, lengths, 0.125)
    wanted, wanted_lse = ref.sparse_decode_attention(query, k, v, lengths, 0.125)
    assert_close(out, wanted)
    assert_close(lse, wanted_lse)
    alone, alone_lse = triton_kernels.sparse_decode_attention(query[2], k[2], v[2], 257, 0.125)
    assert torch.equal(alone, out[2])
    assert torch.equal(alone_lse, lse[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 100, 128])
def test_merge_states(dim: int, dtype: torch.dtype) -> None:
    out_a, out_b = random(3, 7, dim, dtype=dtype), random(3, 7, dim, dtype=dtype)
    lse_a, lse_b = random(3, 7, dtype=torch.float32) * 20, random(3, 7, dtype=torch.float32) * 20
    lse_a[0], lse_b[0, :3] = float("-inf"), float("-inf")
    out, lse = triton_kernels.merge_states(out_a, lse_a, out_b, lse_b)
    wanted, wanted_lse = ref.merge_states(out_a, lse_a, out_b, lse_b)
    assert out.dtype == dtype
    assert_close(out, wanted, dtype)
    assert_close(lse, wanted_lse)
