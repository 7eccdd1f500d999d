"""Products of matrices in a kernel, in the precision that is wanted."""

import triton
import triton.language as tl


@triton.jit
def mul(a, b, acc, MODE: tl.constexpr):
    """Return acc + a @ b with the products in the wanted precision."""
    if MODE == "bf16":
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=MODE)
    return acc
