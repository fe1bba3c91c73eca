"""What the Triton kernels share."""

import torch
import triton

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def padded(count: int) -> int:
    """Return the rows or columns that `count` take in a product: a power of two, 16 at least (tl.dot's limit)."""
    power: int = triton.next_power_of_2(count)
    return max(16, power)


def is_half(*operands: torch.Tensor) -> bool:
    """Return whether all operands have 16 bits a value."""
    return all(operand.dtype in (torch.bfloat16, torch.float16) for operand in operands)


def dot_precision(*operands: torch.Tensor) -> str:
    """Return tl.dot's input precision: tf32 holds every bf16 and fp16 value exactly, float32 takes three of them.

    "ieee" would do without tensor cores, and spills its registers at these tile sizes.
    """
    return "tf32" if is_half(*operands) else "tf32x3"


def warps_for(precision: str) -> int:
    """Return the warps of a kernel whose products have this input precision: three parts need twice the registers."""
    return 4 if precision == "tf32" else 8


def as_bits(pool: torch.Tensor) -> torch.Tensor:
    """Return a view of `pool` as integers, so that a copy rounds nothing."""
    return pool.view(_INTEGERS[pool.element_size()])
