"""Compile every Triton kernel for a CUDA architecture, on a machine that need not have one.

    python tests/kv_kernels/compile_for_cuda.py 90 bfloat16 float32

Runs the host functions of `triton_kernels` on CPU tensors with a launcher that compiles to machine code instead of
launching. What the compiler refuses, or what needs more shared memory than a multiprocessor has, is an error here.
"""

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kv_kernels import triton_kernels

SHARED_BYTES = 99 << 10  # what a kernel may have on every architecture from 8.0 on
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


def compile_kernels(capability: int, dtypes: list[torch.dtype]) -> dict[str, int]:
    """Compile for a compute capability and types of keys; return kernel name -> times compiled.

    Raises:
        triton.CompilationError, subprocess.CalledProcessError: a kernel does not compile.
    """
    compiled: dict[str, int] = {}

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = self.arg_names
        values = dict(zip(names, args, strict=False)) | {k: v for k, v in options.items() if k in names}
        signature, constants = {}, {}
        for param in self.params:
            value = values[param.name]
            if param.is_constexpr:
                signature[param.name], constants[param.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[param.name] = TYPES[value.dtype]
            else:
                signature[param.name] = "fp32" if isinstance(value, float) else "i32"
        source = ASTSource(
            self, signature, {(names.index(name),): value for name, value in constants.items()}
        )
        warps = options.get("num_warps", 4)
        kernel = triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}
        )
        name = self.fn.__name__
        assert kernel.asm["cubin"], name
        assert kernel.metadata.shared <= SHARED_BYTES, (name, kernel.metadata.shared)
        compiled[name] = compiled.get(name, 0) + 1

    JITFunction.run = launch
    for dtype in dtypes:
        call_all(dtype, heads=2, group=4, dim=128)
    return compiled


def call_all(dtype: torch.dtype, heads: int, group: int, dim: int) -> None:
    """Call every function of `triton_kernels` once."""
    scale, pages, entries = dim**-0.5, 300, 2400
    query, means = (
        torch.zeros(3, heads, group, dim, dtype=dtype),
        torch.zeros(3, heads, pages, dim, dtype=dtype),
    )
    lengths = torch.full((3,), pages, dtype=torch.int32)
    triton_kernels.page_score(query, means, scale, lengths)
    maps, offset = torch.zeros(heads, dim, 32), torch.zeros(heads, 32)
    sketch = triton_kernels.sketch_build(torch.zeros(3, heads, entries, dim, dtype=dtype), maps, offset)
    triton_kernels.sketch_score(query, sketch, maps, scale, 8, lengths)
    cluster_of = torch.zeros(3, heads, pages, dtype=torch.int32)
    triton_kernels.two_level_score(query, means[:, :, :70], cluster_of, means, scale, 50)
    scores = torch.zeros(3, heads, 16384)
    selected = triton_kernels.topk_pages(scores, 128)
    triton_kernels.window_admit(
        torch.arange(3), selected, scores, torch.zeros(3, heads, 16384, dtype=torch.int32),
        torch.zeros(3, heads * 256, dtype=torch.int32), torch.arange(heads + 1) * 256, max_slots=256,
    )  # fmt: skip
    pool = torch.zeros(50, 8, dim, dtype=dtype)
    triton_kernels.fetch_pages(pool, pool, pool, pool, selected, selected)
    token = torch.zeros(3, heads, dim, dtype=dtype)
    triton_kernels.append_tokens(pool, pool, token, token, selected[:, :, 0], torch.arange(3))
    counts = torch.full((3, heads), 1000, dtype=torch.int32)
    out, lse = triton_kernels.sparse_decode_attention(query, pool, pool, selected, counts, scale)
    triton_kernels.merge_states(out, lse, out, lse)
    assignment = triton_kernels.cluster_assign(means[0], means[0, :, :64])
    triton_kernels.cluster_sums(means[0], assignment, 64)


if __name__ == "__main__":
    for name, count in compile_kernels(int(sys.argv[1]), [getattr(torch, t) for t in sys.argv[2:]]).items():
        print(name, count)
