"""Run Triton kernels through Triton's interpreter, which must be chosen before Triton is imported.

That is why these tests have a process of their own: `pytest tests/kv_kernels`. TRITON_INTERPRET=0 compiles instead.
"""

import os
import sys

import pytest

if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
    raise pytest.UsageError(
        "Triton is already imported without its interpreter: run `pytest tests/kv_kernels` by itself"
    )
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
