"""What the Triton kernels share."""

import torch
import triton


def padded_group(group: int) -> int:
    """Return the rows that a product of `group` query heads takes: a power of two, 16 at least (tl.dot's limit)."""
    padded: int = triton.next_power_of_2(group)
    return max(16, padded)


def dot_precision(*operands: torch.Tensor) -> str:
    """Return tl.dot's input precision: tf32 holds every bf16 and fp16 value exactly, float32 needs ieee."""
    return "tf32" if all(operand.dtype in (torch.bfloat16, torch.float16) for operand in operands) else "ieee"
