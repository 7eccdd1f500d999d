"""Triton kernels for samples and images other than convolutions, and what all kernels share.

`gather`: out[b] = scale * x[index[b]] + shift, the samples of a batch, cropped and normalized. `pool_forward` and
`pool_backward`: `torch.nn.MaxPool2d`. `average_forward` and `average_backward`: `torch.nn.AvgPool2d`, the sum of a
window over its size, padding included. `norm_forward` and `norm_backward`: `torch.nn.LocalResponseNorm`,
y[c] = x[c] / (k + alpha / size * sum of x[c']^2 over the `size` channels around c)^beta.

Every program works on one row (one client's model): program axis 1 indexes `order`, the rows by decreasing number of
steps. A program whose row has taken its last step exits immediately. A row's result depends on nothing but the row:
tile sizes and the order of summation follow from the net and the batch size.

Sizes are compile-time constants. The step is a counter on the device plus `ahead`, so that a graph can hold several
steps. Images are stored channels last, with a border of zeros as wide as the next convolution's padding, so that no
load needs a bounds check; the input of the linear layers is stored in PyTorch's flattened order. The strides of a
sample, a line, a pixel and a channel (`_B`, `_Y`, `_X`, `_C`) and the offset of the first pixel (`_0`) locate an image.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["ahead", "S"])
def gather(x, pick, out, step, count, order, scale, shift, ahead, S, B: tl.constexpr, C: tl.constexpr,
           H: tl.constexpr, W: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, HI: tl.constexpr,
           WI: tl.constexpr, O_B: tl.constexpr, O_Y: tl.constexpr, O_X: tl.constexpr, O_C: tl.constexpr,
           O_0: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the samples of the step's batches, cropped and normalized (scale * x + shift); missing samples are zero.

    Consecutive indices are consecutive in the output, not in the input.
    """
    r = tl.load(order + tl.program_id(1))
    t = tl.load(step) + ahead
    if t >= tl.load(count + r):
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = j // (C * HI * WI)
    if O_C == 1:
        c = j % C
        y = (j // (C * WI)) % HI
        xx = (j // C) % WI
    else:
        c = (j // (HI * WI)) % C
        y = (j // WI) % HI
        xx = j % WI
    who = tl.load(pick + (r * S + t).to(tl.int64) * B + b, mask=b < B, other=-1)
    here = who >= 0
    found = tl.load(x + who.to(tl.int64) * (C * H * W) + c * (H * W) + (y + TOP) * W + xx + LEFT, mask=here, other=0)
    found = tl.where(here, found.to(tl.float32) * tl.load(scale + c) + tl.load(shift + c), 0.0)
    at = r.to(tl.int64) * (B * O_B) + b * O_B + y * O_Y + xx * O_X + c * O_C + O_0
    tl.store(out + at, found, mask=b < B)


@triton.jit(do_not_specialize=["ahead"])
def pool_forward(x, out, arg, step, count, order, ahead, B: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
                 W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, KS: tl.constexpr, STRIDE: tl.constexpr,
                 PAD: tl.constexpr, O_B: tl.constexpr, O_Y: tl.constexpr, O_X: tl.constexpr, O_C: tl.constexpr,
                 O_0: tl.constexpr, D_B: tl.constexpr, D_Y: tl.constexpr, D_X: tl.constexpr, D_C: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Write the largest value of each window and its position in the window."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = j % C
    px = (j // C) % PW
    py = (j // (C * PW)) % PH
    b = j // (C * PW * PH)
    ok = b < B
    plane = x + r.to(tl.int64) * (B * H * W * C) + b * (H * W * C) + c
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for w in tl.static_range(KS * KS):
        y = py * STRIDE - PAD + w // KS
        xx = px * STRIDE - PAD + w % KS
        inside = ok & (y >= 0) & (y < H) & (xx >= 0) & (xx < W)
        here = tl.load(plane + (y * W + xx) * C, mask=inside, other=float("-inf")).to(tl.float32)
        place = tl.where(here > best, w, place)
        best = tl.where(here <= best, best, here)
    tl.store(out + r.to(tl.int64) * (B * O_B) + b * O_B + py * O_Y + px * O_X + c * O_C + O_0, best, mask=ok)
    at = r.to(tl.int64) * (B * D_B) + b * D_B + py * D_Y + px * D_X + c * D_C
    tl.store(arg + at, place.to(tl.int8), mask=ok)


@triton.jit(do_not_specialize=["ahead"])
def pool_backward(dy, arg, dx, step, count, order, ahead, B: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
                  W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, KS: tl.constexpr, STRIDE: tl.constexpr,
                  PAD: tl.constexpr, REACH: tl.constexpr, D_B: tl.constexpr, D_Y: tl.constexpr, D_X: tl.constexpr,
                  D_C: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Propagate each window's gradient to its largest value: every position checks the windows that contain it."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = j % C
    xx = (j // C) % W + PAD
    y = (j // (C * W)) % H + PAD
    b = j // (C * W * H)
    ok = b < B
    plane = r.to(tl.int64) * (B * D_B) + b * D_B + c * D_C
    total = tl.zeros([BLOCK], tl.float32)
    for w in tl.static_range(REACH * REACH):
        py = y // STRIDE - w // REACH
        px = xx // STRIDE - w % REACH
        ky = y - py * STRIDE
        kx = xx - px * STRIDE
        inside = ok & (py >= 0) & (py < PH) & (px >= 0) & (px < PW) & (ky < KS) & (kx < KS)
        place = tl.load(arg + plane + py * D_Y + px * D_X, mask=inside, other=-1)
        d = tl.load(dy + plane + py * D_Y + px * D_X, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(place == ky * KS + kx, d, 0.0)
    tl.store(dx + r.to(tl.int64) * (B * H * W * C) + j, total, mask=ok)


@triton.jit(do_not_specialize=["ahead"])
def average_forward(x, out, step, count, order, ahead, B: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
                    W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, KS: tl.constexpr, STRIDE: tl.constexpr,
                    PAD: tl.constexpr, O_B: tl.constexpr, O_Y: tl.constexpr, O_X: tl.constexpr, O_C: tl.constexpr,
                    O_0: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the mean of each window."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = j % C
    px = (j // C) % PW
    py = (j // (C * PW)) % PH
    b = j // (C * PW * PH)
    ok = b < B
    plane = x + r.to(tl.int64) * (B * H * W * C) + b * (H * W * C) + c
    total = tl.zeros([BLOCK], tl.float32)
    for w in range(KS * KS):
        y = py * STRIDE - PAD + w // KS
        xx = px * STRIDE - PAD + w % KS
        inside = ok & (y >= 0) & (y < H) & (xx >= 0) & (xx < W)
        total += tl.load(plane + (y * W + xx) * C, mask=inside, other=0.0).to(tl.float32)
    at = r.to(tl.int64) * (B * O_B) + b * O_B + py * O_Y + px * O_X + c * O_C + O_0
    tl.store(out + at, total / (KS * KS), mask=ok)


@triton.jit(do_not_specialize=["ahead"])
def average_backward(dy, dx, step, count, order, ahead, B: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
                     W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, KS: tl.constexpr, STRIDE: tl.constexpr,
                     PAD: tl.constexpr, REACH: tl.constexpr, D_B: tl.constexpr, D_Y: tl.constexpr, D_X: tl.constexpr,
                     D_C: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Propagate each window's gradient to its values: every position sums over the windows that contain it."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = j % C
    xx = (j // C) % W + PAD
    y = (j // (C * W)) % H + PAD
    b = j // (C * W * H)
    ok = b < B
    plane = dy + r.to(tl.int64) * (B * D_B) + b * D_B + c * D_C
    total = tl.zeros([BLOCK], tl.float32)
    for w in range(REACH * REACH):
        py = y // STRIDE - w // REACH
        px = xx // STRIDE - w % REACH
        inside = ok & (py >= 0) & (py < PH) & (px >= 0) & (px < PW)
        inside &= (y - py * STRIDE < KS) & (xx - px * STRIDE < KS)
        total += tl.load(plane + py * D_Y + px * D_X, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + r.to(tl.int64) * (B * H * W * C) + j, total / (KS * KS), mask=ok)


@triton.jit
def _around(values, C: tl.constexpr, SIZE: tl.constexpr, AHEAD: tl.constexpr):
    """Return the sums over `SIZE` neighboring channels, the last of which is `AHEAD` channels ahead."""
    line = tl.arange(0, values.shape[1])
    total = tl.zeros(values.shape, tl.float32)
    for near in tl.static_range(SIZE):
        other = line + AHEAD - near
        at = tl.minimum(tl.maximum(other, 0), C - 1)
        found = tl.gather(values, tl.broadcast_to(at[None, :], values.shape), 1)
        total += tl.where(((other >= 0) & (other < C))[None, :], found, 0.0)
    return total


@triton.jit(do_not_specialize=["ahead"])
def norm_forward(x, out, step, count, order, ahead, alpha, beta, k, B: tl.constexpr, C: tl.constexpr,
                 H: tl.constexpr, W: tl.constexpr, SIZE: tl.constexpr, O_B: tl.constexpr, O_Y: tl.constexpr,
                 O_X: tl.constexpr, O_C: tl.constexpr, O_0: tl.constexpr, BC: tl.constexpr,
                 BX: tl.constexpr):  # fmt: skip
    """Divide every value by (k + alpha / size * sum of squares over neighboring channels) ** beta."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    m = tl.program_id(0) * BX + tl.arange(0, BX)
    c = tl.arange(0, BC)
    keep = (c < C)[None, :] & (m < B * H * W)[:, None]
    at = r.to(tl.int64) * (B * H * W * C) + m[:, None] * C + c[None, :]
    v = tl.load(x + at, mask=keep, other=0.0).to(tl.float32)
    d = k + (alpha / SIZE) * _around(v * v, C, SIZE, SIZE - 1 - SIZE // 2)
    at = ((m // (H * W)) * O_B + ((m // W) % H) * O_Y + (m % W) * O_X + O_0)[:, None] + c[None, :] * O_C
    tl.store(out + r.to(tl.int64) * (B * O_B) + at, v * tl.exp(-beta * tl.log(d)), mask=keep)


@triton.jit(do_not_specialize=["ahead"])
def norm_backward(x, dy, dx, step, count, order, ahead, alpha, beta, k, B: tl.constexpr, C: tl.constexpr,
                  H: tl.constexpr, W: tl.constexpr, SIZE: tl.constexpr, D_B: tl.constexpr, D_Y: tl.constexpr,
                  D_X: tl.constexpr, D_C: tl.constexpr, BC: tl.constexpr, BX: tl.constexpr):  # fmt: skip
    """Propagate the gradient: dx = dy den^-beta - 2 alpha beta / size x (sum of dy x den^(-beta - 1) within reach)."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    m = tl.program_id(0) * BX + tl.arange(0, BX)
    c = tl.arange(0, BC)
    keep = (c < C)[None, :] & (m < B * H * W)[:, None]
    at = r.to(tl.int64) * (B * H * W * C) + m[:, None] * C + c[None, :]
    v = tl.load(x + at, mask=keep, other=0.0).to(tl.float32)
    from_ = r.to(tl.int64) * (B * D_B) + (m // (H * W)) * D_B + ((m // W) % H) * D_Y + (m % W) * D_X
    d = tl.load(dy + from_[:, None] + c[None, :] * D_C, mask=keep, other=0.0).to(tl.float32)
    den = k + (alpha / SIZE) * _around(v * v, C, SIZE, SIZE - 1 - SIZE // 2)
    scaled = d * tl.exp(-beta * tl.log(den))
    spread = _around(scaled * v / den, C, SIZE, SIZE // 2)
    tl.store(dx + at, scaled - (2 * alpha * beta / SIZE) * v * spread, mask=keep)
