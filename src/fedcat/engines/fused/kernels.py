"""Triton kernels for one training step of many small nets at once.

Every program works on one row (one device's model): program axis 1 counts through `order`, the rows by decreasing
number of steps. A program whose row has taken its last step ends at once. What a row becomes depends on nothing but
the row: tiles and the order of additions follow from the net and the batch size.

Sizes are compile-time constants. The step is a counter on the device plus `ahead`, so that a graph can hold several
steps. Images lie channels last, with a border of zeros as wide as the next convolution's padding, so that no load
needs a check; what the linear layers see lies as PyTorch flattens it. An image's place is described by the sizes of a
sample, a line, a place and a channel (`_B`, `_Y`, `_X`, `_C`) and the offset of the first pixel (`_0`).

A convolution that is pooled 2 x 2 and has few channels computes the four places of a window as four sets of output
channels over the window's larger patch (`WIN` = 4, column = 4 channel + place): the patch is loaded once. Its weights
are laid out for that by `lay_out`, and `fold` adds the gradient up again. The backward pass wants to know which place
of the window won (`arg`), or `DEAD` where ReLU gave zero.
"""

import triton
import triton.language as tl

DEAD = tl.constexpr(4)


@triton.jit
def _mul(a, b, acc, MODE: tl.constexpr):
    """Return acc + a @ b with the products in the wanted precision."""
    if MODE == "bf16":
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=MODE)
    return acc


@triton.jit(do_not_specialize=["ahead", "S"])
def gather(x, pick, out, step, count, order, scale, shift, ahead, S, B: tl.constexpr, C: tl.constexpr,
           H: tl.constexpr, W: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, HI: tl.constexpr,
           WI: tl.constexpr, O_B: tl.constexpr, O_Y: tl.constexpr, O_X: tl.constexpr, O_C: tl.constexpr,
           O_0: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the samples of the step's batches, cut out and normalised (scale x + shift), zeros where there is none."""
    r = tl.load(order + tl.program_id(1))
    t = tl.load(step) + ahead
    if t >= tl.load(count + r):
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = j // (C * HI * WI)
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
def lay_out(p, to, step, count, order, ahead, P_ROW: tl.constexpr, W_AT: tl.constexpr, C: tl.constexpr,
            OUT: tl.constexpr, KS: tl.constexpr, SPAN: tl.constexpr, WIN: tl.constexpr, BACK: tl.constexpr,
            KP: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write a convolution's weights as the matrix [KP, BN] by which patches are multiplied; zeros fill it up.

    Forward a line is (ky, kx, channel), a column an output channel (or four of them, one for each place of a window).
    With `BACK` a line is (ky, kx, output channel) of the turned kernel and a column an input channel.
    """
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = j // BN
    n = j % BN
    if BACK:
        ky = KS - 1 - k // (KS * OUT)
        kx = KS - 1 - (k // OUT) % KS
        o = k % OUT
        c = n
    else:
        ky = k // (SPAN * C)
        kx = (k // C) % SPAN
        c = k % C
        o = n
        if WIN == 4:
            o = n // 4
            ky -= (n % 4) // 2
            kx -= n % 2
    here = (
        (k < SPAN * SPAN * (OUT if BACK else C)) & (o < OUT) & (c < C) & (ky >= 0) & (ky < KS) & (kx >= 0) & (kx < KS)
    )
    w = tl.load(p + r.to(tl.int64) * P_ROW + W_AT + ((o * C + c) * KS + ky) * KS + kx, mask=here, other=0.0)
    tl.store(to + r.to(tl.int64) * (KP * BN) + j, w, mask=j < KP * BN)


@triton.jit(do_not_specialize=["ahead"])
def conv_forward(x, w, p, out, arg, step, count, order, ahead, P_ROW: tl.constexpr, B_AT: tl.constexpr,
                 B: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr, OUT: tl.constexpr, PH: tl.constexpr,
                 PW: tl.constexpr, POOL: tl.constexpr, WIN: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr,
                 X_B: tl.constexpr, X_Y: tl.constexpr, O_B: tl.constexpr, O_Y: tl.constexpr, O_X: tl.constexpr,
                 O_C: tl.constexpr, O_0: tl.constexpr, D_B: tl.constexpr, D_Y: tl.constexpr, D_X: tl.constexpr,
                 D_C: tl.constexpr, MODE: tl.constexpr, KP: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr,
                 BK: tl.constexpr):  # fmt: skip
    """Convolve, pool, add the bias and ReLU: one tile of (pooled) places, all channels."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    b = m // (PH * PW)
    py = (m // PW) % PH
    px = m % PW
    ok = m < B * PH * PW
    BN: tl.constexpr = BO * WIN
    n = tl.arange(0, BN)
    base = b * X_B + py * (POOL * X_Y) + px * (POOL * C)
    x_row = x + r.to(tl.int64) * (B * X_B)
    w_row = w + r.to(tl.int64) * (KP * BN)
    a0 = tl.zeros([BM, BN], tl.float32)
    a1 = tl.zeros([BM, BN], tl.float32)
    a2 = tl.zeros([BM, BN], tl.float32)
    a3 = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, KP, BK):
        k = k0 + tl.arange(0, BK)
        ky = k // (SPAN * C)
        at = base[:, None] + (k + ky * (X_Y - SPAN * C))[None, :]
        keep = ok[:, None] & (k < SPAN * SPAN * C)[None, :]
        weights = tl.load(w_row + k[:, None] * BN + n[None, :], mask=(k < KP)[:, None], other=0.0)
        a0 = _mul(tl.load(x_row + at, mask=keep, other=0.0), weights, a0, MODE)
        if POOL == 2 and WIN == 1:
            a1 = _mul(tl.load(x_row + at + C, mask=keep, other=0.0), weights, a1, MODE)
            a2 = _mul(tl.load(x_row + at + X_Y, mask=keep, other=0.0), weights, a2, MODE)
            a3 = _mul(tl.load(x_row + at + X_Y + C, mask=keep, other=0.0), weights, a3, MODE)
    o = tl.arange(0, BO)
    if WIN == 4:
        best, place = tl.max(tl.reshape(a0, [BM, BO, 4]), 2, return_indices=True)
    else:
        best = a0
        place = tl.zeros([BM, BN], tl.int32)
        if POOL == 2:
            place = tl.where(a1 > best, 1, place)
            best = tl.where(a1 > best, a1, best)
            place = tl.where(a2 > best, 2, place)
            best = tl.where(a2 > best, a2, best)
            place = tl.where(a3 > best, 3, place)
            best = tl.where(a3 > best, a3, best)
    if BIAS:
        best += tl.load(p + r.to(tl.int64) * P_ROW + B_AT + o, mask=o < OUT, other=0.0)[None, :]
    if RELU:
        place = tl.where(best <= 0, DEAD, place)
        best = tl.where(best <= 0, 0.0, best)
    keep = ok[:, None] & (o < OUT)[None, :]
    at = (b * O_B + py * O_Y + px * O_X + O_0)[:, None] + o[None, :] * O_C
    tl.store(out + r.to(tl.int64) * (B * O_B) + at, best, mask=keep)
    at = (b * D_B + py * D_Y + px * D_X)[:, None] + o[None, :] * D_C
    tl.store(arg + r.to(tl.int64) * (B * D_B) + at, place.to(tl.int8), mask=keep)


@triton.jit(do_not_specialize=["ahead"])
def conv_weight_gradient(x, dy, arg, part, step, count, order, ahead, B: tl.constexpr, C: tl.constexpr,
                         SPAN: tl.constexpr, OUT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
                         POOL: tl.constexpr, WIN: tl.constexpr, X_B: tl.constexpr, X_Y: tl.constexpr,
                         D_B: tl.constexpr, D_Y: tl.constexpr, D_X: tl.constexpr, D_C: tl.constexpr,
                         MODE: tl.constexpr, SPLITS: tl.constexpr, BS: tl.constexpr, KP: tl.constexpr,
                         BO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Add up the gradient of a convolution's laid-out weights, and of its bias, over the `BS` samples of one split."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    k = tile * BK + tl.arange(0, BK)
    o = tl.arange(0, BO)
    BN: tl.constexpr = BO * WIN
    ky = k // (SPAN * C)
    koff = k + ky * (X_Y - SPAN * C)
    kin = k < SPAN * SPAN * C
    x_row = x + r.to(tl.int64) * (B * X_B)
    d_row = r.to(tl.int64) * (B * D_B)
    acc = tl.zeros([BK, BN], tl.float32)
    bias = tl.zeros([BO], tl.float32)
    for m0 in range(0, BS * PH * PW, BM):
        m = m0 + tl.arange(0, BM)
        b = split * BS + m // (PH * PW)
        py = (m // PW) % PH
        px = m % PW
        ok = (m < BS * PH * PW) & (b < B)
        at = (b * D_B + py * D_Y + px * D_X)[:, None] + o[None, :] * D_C
        keep = ok[:, None] & (o < OUT)[None, :]
        d = tl.load(dy + d_row + at, mask=keep, other=0.0).to(tl.float32)
        place = tl.load(arg + d_row + at, mask=keep, other=4).to(tl.int32)
        at = (b * X_B + py * (POOL * X_Y) + px * (POOL * C))[None, :] + koff[:, None]
        live = ok[None, :] & kin[:, None]
        if WIN == 4:
            window = tl.arange(0, 4)
            won = place[:, :, None] == window[None, None, :]
            spread = tl.reshape(tl.where(won, d[:, :, None], 0.0), [BM, BN])
            acc = _mul(tl.load(x_row + at, mask=live, other=0.0), spread, acc, MODE)
        else:
            acc = _mul(tl.load(x_row + at, mask=live, other=0.0), tl.where(place == 0, d, 0.0), acc, MODE)
            if POOL == 2:
                acc = _mul(tl.load(x_row + at + C, mask=live, other=0.0), tl.where(place == 1, d, 0.0), acc, MODE)
                acc = _mul(tl.load(x_row + at + X_Y, mask=live, other=0.0), tl.where(place == 2, d, 0.0), acc, MODE)
                acc = _mul(tl.load(x_row + at + X_Y + C, mask=live, other=0.0), tl.where(place == 3, d, 0.0), acc, MODE)
        bias += tl.sum(tl.where(place < 4, d, 0.0), 0)
    n = tl.arange(0, BN)
    to = part + (r * SPLITS + split).to(tl.int64) * (KP * BN + BO)
    tl.store(to + k[:, None] * BN + n[None, :], acc, mask=(k < KP)[:, None])
    if tile == 0:
        tl.store(to + KP * BN + o, bias)


@triton.jit(do_not_specialize=["ahead"])
def fold(part, g, step, count, order, ahead, G_ROW: tl.constexpr, W_AT: tl.constexpr, B_AT: tl.constexpr,
         C: tl.constexpr, OUT: tl.constexpr, KS: tl.constexpr, SPAN: tl.constexpr, WIN: tl.constexpr,
         BIAS: tl.constexpr, SPLITS: tl.constexpr, KP: tl.constexpr, BO: tl.constexpr,
         BLOCK: tl.constexpr):  # fmt: skip
    """Add up the splits, and the places of a window, of a convolution's gradient into the rows."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = j // (C * KS * KS)
    c = (j // (KS * KS)) % C
    ky = (j // KS) % KS
    kx = j % KS
    weight = j < OUT * C * KS * KS
    for_bias = (j >= OUT * C * KS * KS) & (j < OUT * C * KS * KS + OUT)
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(SPLITS):
        of = part + (r * SPLITS + split).to(tl.int64) * (KP * BO * WIN + BO)
        for w in tl.static_range(WIN):
            k = ((ky + w // 2) * SPAN + kx + w % 2) * C + c
            total += tl.load(of + k * (BO * WIN) + o * WIN + w, mask=weight, other=0.0)
        total += tl.load(of + KP * BO * WIN + j - OUT * C * KS * KS, mask=for_bias, other=0.0)
    to = g + r.to(tl.int64) * G_ROW
    tl.store(to + W_AT + j, total, mask=weight)
    if BIAS:
        tl.store(to + B_AT + j - OUT * C * KS * KS, total, mask=for_bias)


@triton.jit(do_not_specialize=["ahead"])
def unpool(dy, arg, full, step, count, order, ahead, B: tl.constexpr, OUT: tl.constexpr, OH: tl.constexpr,
           OW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, POOL: tl.constexpr, D_B: tl.constexpr,
           D_Y: tl.constexpr, D_X: tl.constexpr, D_C: tl.constexpr, F_B: tl.constexpr, F_Y: tl.constexpr,
           F_0: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write a pooled convolution's gradient at every place: zero but where the window's largest value was."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = j % OUT
    xx = (j // OUT) % OW
    y = (j // (OUT * OW)) % OH
    b = j // (OUT * OW * OH)
    inside = (b < B) & (y // POOL < PH) & (xx // POOL < PW)
    at = r.to(tl.int64) * (B * D_B) + b * D_B + (y // POOL) * D_Y + (xx // POOL) * D_X + o * D_C
    place = tl.load(arg + at, mask=inside, other=4)
    d = tl.load(dy + at, mask=inside, other=0.0)
    d = tl.where(place == (y % POOL) * POOL + xx % POOL, d, 0.0)
    tl.store(full + r.to(tl.int64) * (B * F_B) + b * F_B + y * F_Y + xx * OUT + o + F_0, d, mask=b < B)


@triton.jit(do_not_specialize=["ahead"])
def conv_input_gradient(full, w, dx, step, count, order, ahead, B: tl.constexpr, C: tl.constexpr, HI: tl.constexpr,
                        WI: tl.constexpr, KS: tl.constexpr, OUT: tl.constexpr, F_B: tl.constexpr, F_Y: tl.constexpr,
                        D_B: tl.constexpr, D_Y: tl.constexpr, D_X: tl.constexpr, D_C: tl.constexpr,
                        MODE: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
                        BK: tl.constexpr):  # fmt: skip
    """Carry a convolution's gradient back to one tile of its input's places, all channels."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    b = m // (HI * WI)
    y = (m // WI) % HI
    xx = m % WI
    ok = m < B * HI * WI
    base = b * F_B + y * F_Y + xx * OUT
    f_row = full + r.to(tl.int64) * (B * F_B)
    w_row = w + r.to(tl.int64) * (KP * BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, KP, BK):
        k = k0 + tl.arange(0, BK)
        at = base[:, None] + (k + (k // (KS * OUT)) * (F_Y - KS * OUT))[None, :]
        d = tl.load(f_row + at, mask=ok[:, None] & (k < KS * KS * OUT)[None, :], other=0.0)
        weights = tl.load(w_row + k[:, None] * BN + n[None, :], mask=(k < KP)[:, None], other=0.0)
        acc = _mul(d, weights, acc, MODE)
    at = (b * D_B + y * D_Y + xx * D_X)[:, None] + n[None, :] * D_C
    tl.store(dx + r.to(tl.int64) * (B * D_B) + at, acc, mask=ok[:, None] & (n < C)[None, :])


@triton.jit(do_not_specialize=["ahead"])
def pool_forward(x, out, arg, step, count, order, ahead, B: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
                 W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, KS: tl.constexpr, STRIDE: tl.constexpr,
                 PAD: tl.constexpr, O_B: tl.constexpr, O_Y: tl.constexpr, O_X: tl.constexpr, O_C: tl.constexpr,
                 O_0: tl.constexpr, D_B: tl.constexpr, D_Y: tl.constexpr, D_X: tl.constexpr, D_C: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Take the largest value of each window and note where in the window it was."""
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
    """Carry each window's gradient to the place that won it: every place asks the windows that hold it."""
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
def norm_forward(x, out, den, step, count, order, ahead, alpha, beta, k, B: tl.constexpr, C: tl.constexpr,
                 H: tl.constexpr, W: tl.constexpr, SIZE: tl.constexpr, O_B: tl.constexpr, O_Y: tl.constexpr,
                 O_X: tl.constexpr, O_C: tl.constexpr, O_0: tl.constexpr, BC: tl.constexpr,
                 BX: tl.constexpr):  # fmt: skip
    """Divide every value by a power of `den`, k plus the weighted squares of neighbouring channels."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    m = tl.program_id(0) * BX + tl.arange(0, BX)
    ok = m < B * H * W
    base = r.to(tl.int64) * (B * H * W * C) + m * C
    c = tl.arange(0, BC)
    squares = tl.zeros([BX, BC], tl.float32)
    for near in tl.static_range(SIZE):
        other = c + near - SIZE // 2
        keep = ((other >= 0) & (other < C))[None, :] & ok[:, None]
        v = tl.load(x + base[:, None] + other[None, :], mask=keep, other=0.0).to(tl.float32)
        squares += v * v
    keep = (c < C)[None, :] & ok[:, None]
    d = k + (alpha / SIZE) * squares
    tl.store(den + base[:, None] + c[None, :], d, mask=keep)
    v = tl.load(x + base[:, None] + c[None, :], mask=keep, other=0.0).to(tl.float32) * tl.exp(-beta * tl.log(d))
    at = ((m // (H * W)) * O_B + ((m // W) % H) * O_Y + (m % W) * O_X + O_0)[:, None] + c[None, :] * O_C
    tl.store(out + r.to(tl.int64) * (B * O_B) + at, v, mask=keep)


@triton.jit(do_not_specialize=["ahead"])
def norm_backward(x, den, dy, dx, step, count, order, ahead, alpha, beta, B: tl.constexpr, C: tl.constexpr,
                  H: tl.constexpr, W: tl.constexpr, SIZE: tl.constexpr, D_B: tl.constexpr, D_Y: tl.constexpr,
                  D_X: tl.constexpr, D_C: tl.constexpr, BC: tl.constexpr, BX: tl.constexpr):  # fmt: skip
    """Carry the gradient back: dx = dy den^-beta - 2 alpha beta / size x (sum of dy x den^(-beta - 1) within reach)."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    m = tl.program_id(0) * BX + tl.arange(0, BX)
    ok = m < B * H * W
    base = r.to(tl.int64) * (B * H * W * C) + m * C
    dbase = r.to(tl.int64) * (B * D_B) + (m // (H * W)) * D_B + ((m // W) % H) * D_Y + (m % W) * D_X
    c = tl.arange(0, BC)
    spread = tl.zeros([BX, BC], tl.float32)
    for near in tl.static_range(SIZE):
        other = c + SIZE // 2 - near
        keep = ((other >= 0) & (other < C))[None, :] & ok[:, None]
        v = tl.load(x + base[:, None] + other[None, :], mask=keep, other=0.0).to(tl.float32)
        d = tl.load(dy + dbase[:, None] + other[None, :] * D_C, mask=keep, other=0.0).to(tl.float32)
        q = tl.load(den + base[:, None] + other[None, :], mask=keep, other=1.0)
        spread += d * v * tl.exp((-beta - 1) * tl.log(q))
    keep = (c < C)[None, :] & ok[:, None]
    v = tl.load(x + base[:, None] + c[None, :], mask=keep, other=0.0).to(tl.float32)
    d = tl.load(dy + dbase[:, None] + c[None, :] * D_C, mask=keep, other=0.0).to(tl.float32)
    power = tl.exp(-beta * tl.log(tl.load(den + base[:, None] + c[None, :], mask=keep, other=1.0)))
    tl.store(dx + base[:, None] + c[None, :], d * power - (2 * alpha * beta / SIZE) * v * spread, mask=keep)


@triton.jit(do_not_specialize=["ahead"])
def linear_forward(x, p, h, step, count, order, ahead, P_ROW: tl.constexpr, W_AT: tl.constexpr, B_AT: tl.constexpr,
                   B: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr,
                   MODE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Return one tile of relu(x W' + b)."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    tiles: tl.constexpr = (OUT + BN - 1) // BN
    b = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    w_row = p + r.to(tl.int64) * P_ROW
    x_row = x + (r * B + b).to(tl.int64) * IN
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, IN, BK):
        k = k0 + tl.arange(0, BK)
        xk = tl.load(x_row[:, None] + k[None, :], mask=(b < B)[:, None] & (k < IN)[None, :], other=0.0)
        w = tl.load(w_row + W_AT + n[None, :] * IN + k[:, None], mask=(n < OUT)[None, :] & (k < IN)[:, None], other=0.0)
        acc = _mul(xk, w, acc, MODE)
    if BIAS:
        acc += tl.load(w_row + B_AT + n, mask=n < OUT, other=0.0)[None, :]
    if RELU:
        acc = tl.where(acc <= 0, 0.0, acc)
    tl.store(h + (r * B + b).to(tl.int64)[:, None] * OUT + n[None, :], acc, mask=(b < B)[:, None] & (n < OUT)[None, :])


@triton.jit(do_not_specialize=["ahead"])
def linear_input_gradient(dy, h, p, dx, step, count, order, ahead, P_ROW: tl.constexpr, W_AT: tl.constexpr,
                          B: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, RELU: tl.constexpr,
                          MODE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Return one tile of dy W, where `dy` counts only where the layer's output `h` was not cut off."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    tiles: tl.constexpr = (IN + BN - 1) // BN
    b = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    w_row = p + r.to(tl.int64) * P_ROW + W_AT
    row = (r * B + b).to(tl.int64)
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, OUT, BK):
        k = k0 + tl.arange(0, BK)
        keep = (b < B)[:, None] & (k < OUT)[None, :]
        d = tl.load(dy + row[:, None] * OUT + k[None, :], mask=keep, other=0.0).to(tl.float32)
        if RELU:
            d = tl.where(tl.load(h + row[:, None] * OUT + k[None, :], mask=keep, other=0.0) > 0, d, 0.0)
        w = tl.load(w_row + k[:, None] * IN + n[None, :], mask=(k < OUT)[:, None] & (n < IN)[None, :], other=0.0)
        acc = _mul(d, w, acc, MODE)
    tl.store(dx + row[:, None] * IN + n[None, :], acc, mask=(b < B)[:, None] & (n < IN)[None, :])


@triton.jit(do_not_specialize=["ahead"])
def linear_weight_gradient(x, dy, h, g, step, count, order, ahead, G_ROW: tl.constexpr, W_AT: tl.constexpr,
                           B_AT: tl.constexpr, B: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
                           RELU: tl.constexpr, BIAS: tl.constexpr, MODE: tl.constexpr, BB: tl.constexpr,
                           BO: tl.constexpr, BI: tl.constexpr):  # fmt: skip
    """Write one tile of a linear layer's gradient dy' x into the rows, and the bias's."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    tiles: tl.constexpr = (IN + BI - 1) // BI
    i = (tl.program_id(0) % tiles) * BI + tl.arange(0, BI)
    o = (tl.program_id(0) // tiles) * BO + tl.arange(0, BO)
    acc = tl.zeros([BO, BI], tl.float32)
    bias = tl.zeros([BO], tl.float32)
    for b0 in range(0, B, BB):
        b = b0 + tl.arange(0, BB)
        row = (r * B + b).to(tl.int64)
        keep = (b < B)[None, :] & (o < OUT)[:, None]
        d = tl.load(dy + row[None, :] * OUT + o[:, None], mask=keep, other=0.0).to(tl.float32)
        if RELU:
            d = tl.where(tl.load(h + row[None, :] * OUT + o[:, None], mask=keep, other=0.0) > 0, d, 0.0)
        xb = tl.load(x + row[:, None] * IN + i[None, :], mask=(b < B)[:, None] & (i < IN)[None, :], other=0.0)
        acc = _mul(d, xb, acc, MODE)
        bias += tl.sum(d, 1)
    to = g + r.to(tl.int64) * G_ROW
    tl.store(to + W_AT + o[:, None] * IN + i[None, :], acc, mask=(o < OUT)[:, None] & (i < IN)[None, :])
    if BIAS and tl.program_id(0) % tiles == 0:
        tl.store(to + B_AT + o, bias, mask=o < OUT)


@triton.jit
def _layer(h, p, W_AT: tl.constexpr, B_AT: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, PI: tl.constexpr,
           PO: tl.constexpr, BIAS: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    """Return h W' + b for a tile of samples that holds all inputs."""
    i = tl.arange(0, PI)
    o = tl.arange(0, PO)
    w = tl.load(p + W_AT + o[None, :] * IN + i[:, None], mask=(o < OUT)[None, :] & (i < IN)[:, None], other=0.0)
    z = _mul(h, w, tl.zeros([h.shape[0], PO], tl.float32), MODE)
    if BIAS:
        z += tl.load(p + B_AT + o, mask=o < OUT, other=0.0)[None, :]
    return z


@triton.jit
def _back(e, p, W_AT: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, PI: tl.constexpr, PO: tl.constexpr,
          MODE: tl.constexpr):  # fmt: skip
    """Return e W for a tile of samples."""
    i = tl.arange(0, PI)
    o = tl.arange(0, PO)
    w = tl.load(p + W_AT + o[:, None] * IN + i[None, :], mask=(o < OUT)[:, None] & (i < IN)[None, :], other=0.0)
    return _mul(e, w, tl.zeros([e.shape[0], PI], tl.float32), MODE)


@triton.jit(do_not_specialize=["ahead", "S"])
def tail(x, pick, y, p, dx, h1, h2, e1, e2, e3, loss, step, count, order, ahead, S, P_ROW: tl.constexpr,
         w1: tl.constexpr, c1: tl.constexpr, w2: tl.constexpr, c2: tl.constexpr, w3: tl.constexpr, c3: tl.constexpr,
         B: tl.constexpr, LAYERS: tl.constexpr, BIAS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
         D2: tl.constexpr, D3: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, PB: tl.constexpr,
         MODE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Run the last one to three linear layers, the cross entropy and the way back, for one tile of samples.

    Writes hidden values h and the gradients e of the layers' outputs, from which weights' gradients follow, the
    gradient `dx` of the input, and adds the tile's share of the mean loss to its own place.
    """
    r = tl.load(order + tl.program_id(1))
    t = tl.load(step) + ahead
    if t >= tl.load(count + r):
        return
    b = tl.program_id(0) * BM + tl.arange(0, BM)
    every = tl.arange(0, PB)
    picked = pick + (r * S + t).to(tl.int64) * B
    real = tl.sum((tl.load(picked + every, mask=every < B, other=-1) >= 0).to(tl.float32))
    who = tl.load(picked + b, mask=b < B, other=-1)
    label = tl.load(y + who, mask=who >= 0, other=0)
    row = (r * B + b).to(tl.int64)
    inside = (b < B)[:, None]
    p_r = p + r.to(tl.int64) * P_ROW
    n1 = tl.arange(0, P1)
    z = tl.zeros([BM, P1], tl.float32)
    for k0 in range(0, D0, BK):
        k = k0 + tl.arange(0, BK)
        xk = tl.load(x + row[:, None] * D0 + k[None, :], mask=inside & (k < D0)[None, :], other=0.0)
        w = tl.load(p_r + w1 + n1[None, :] * D0 + k[:, None], mask=(n1 < D1)[None, :] & (k < D0)[:, None], other=0.0)
        z = _mul(xk, w, z, MODE)
    if BIAS:
        z += tl.load(p_r + c1 + n1, mask=n1 < D1, other=0.0)[None, :]
    if LAYERS == 1:
        e = _softmax_gradient(z, label, who >= 0, real, loss, r, D1, P1)
        tl.store(e1 + row[:, None] * D1 + n1[None, :], e, mask=inside & (n1 < D1)[None, :])
    else:
        a1 = tl.where(z <= 0, 0.0, z)
        tl.store(h1 + row[:, None] * D1 + n1[None, :], a1, mask=inside & (n1 < D1)[None, :])
        n2 = tl.arange(0, P2)
        z2 = _layer(a1, p_r, w2, c2, D1, D2, P1, P2, BIAS, MODE)
        if LAYERS == 2:
            d2 = _softmax_gradient(z2, label, who >= 0, real, loss, r, D2, P2)
        else:
            a2 = tl.where(z2 <= 0, 0.0, z2)
            tl.store(h2 + row[:, None] * D2 + n2[None, :], a2, mask=inside & (n2 < D2)[None, :])
            n3 = tl.arange(0, P3)
            z3 = _layer(a2, p_r, w3, c3, D2, D3, P2, P3, BIAS, MODE)
            d3 = _softmax_gradient(z3, label, who >= 0, real, loss, r, D3, P3)
            tl.store(e3 + row[:, None] * D3 + n3[None, :], d3, mask=inside & (n3 < D3)[None, :])
            d2 = tl.where(a2 > 0, _back(d3, p_r, w3, D2, D3, P2, P3, MODE), 0.0)
        tl.store(e2 + row[:, None] * D2 + n2[None, :], d2, mask=inside & (n2 < D2)[None, :])
        e = tl.where(a1 > 0, _back(d2, p_r, w2, D1, D2, P1, P2, MODE), 0.0)
        tl.store(e1 + row[:, None] * D1 + n1[None, :], e, mask=inside & (n1 < D1)[None, :])
    for k0 in range(0, D0, BK):
        k = k0 + tl.arange(0, BK)
        w = tl.load(p_r + w1 + n1[:, None] * D0 + k[None, :], mask=(n1 < D1)[:, None] & (k < D0)[None, :], other=0.0)
        d = _mul(e, w, tl.zeros([BM, BK], tl.float32), MODE)
        tl.store(dx + row[:, None] * D0 + k[None, :], d, mask=inside & (k < D0)[None, :])


@triton.jit
def _softmax_gradient(z, label, here, real, loss, r, CLASSES: tl.constexpr, PC: tl.constexpr):
    """Return the gradient of the mean cross entropy over the real samples; add its value to the tile's place."""
    n = tl.arange(0, PC)
    z = tl.where((n < CLASSES)[None, :], z, float("-inf"))
    z = z - tl.max(z, 1)[:, None]
    powers = tl.exp(z)
    total = tl.sum(powers, 1)
    mine = n[None, :] == label[:, None]
    losses = tl.log(total) - tl.sum(tl.where(mine, z, 0.0), 1)
    at = loss + r * tl.num_programs(0) + tl.program_id(0)
    tl.store(at, tl.load(at) + tl.sum(tl.where(here, losses, 0.0)) / real)
    return tl.where(here[:, None], (powers / total[:, None] - mine.to(tl.float32)) / real, 0.0)


@triton.jit(do_not_specialize=["ahead"])
def descend(p, v, g, lr, momentum, decay, step, count, order, ahead, SIZE: tl.constexpr, ROW: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Take a step of SGD with momentum and weight decay."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = r.to(tl.int64) * ROW + j
    keep = j < SIZE
    now = tl.load(p + at, mask=keep)
    moved = tl.load(v + at, mask=keep) * tl.load(momentum + r) + (tl.load(g + at, mask=keep) + tl.load(decay + r) * now)
    tl.store(v + at, moved, mask=keep)
    tl.store(p + at, now - tl.load(lr + r) * moved, mask=keep)
