"""Matrix products in a kernel, in a given precision."""

import os

import triton
import triton.language as tl

COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")
"""Whether kernels are compiled. Triton's interpreter cannot multiply bfloat16 values."""


@triton.jit
def mul(a, b, acc, MODE: tl.constexpr, TURNED: tl.constexpr = False):
    """Return acc + a @ b, computed in the given precision.

    TF32 favors factors that are contiguous along the summed dimension. If they are not (`TURNED`), three bfloat16
    products are faster: each factor is the sum of two bfloat16 values, which keep 16 bits of it; TF32 keeps 10.
    """
    if MODE == "bf16":
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    elif MODE == "tf32" and TURNED and COMPILED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
        a_high = a.to(tl.bfloat16)
        b_high = b.to(tl.bfloat16)
        acc = tl.dot((a - a_high.to(tl.float32)).to(tl.bfloat16), b_high, acc)
        acc = tl.dot(a_high, (b - b_high.to(tl.float32)).to(tl.bfloat16), acc)
        acc = tl.dot(a_high, b_high, acc)
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=MODE)
    return acc
