"""Triton kernels for what a training step does with images: gathering, convolution, pooling, local response norm.

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

from fedcat.engines.fused.products import mul

DEAD = tl.constexpr(4)


@triton.jit(do_not_specialize=["ahead", "S"])
def gather(x, pick, out, step, count, order, scale, shift, ahead, S, B: tl.constexpr, C: tl.constexpr,
           H: tl.constexpr, W: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, HI: tl.constexpr,
           WI: tl.constexpr, O_B: tl.constexpr, O_Y: tl.constexpr, O_X: tl.constexpr, O_C: tl.constexpr,
           O_0: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the samples of the step's batches, cut out and normalised (scale x + shift), zeros where there is none.

    Neighbours are those of what is written.
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
def lay_out(p, to, step, count, order, ahead, P_ROW: tl.constexpr, W_AT: tl.constexpr, C: tl.constexpr,
            LANES: tl.constexpr, OUT: tl.constexpr, KS: tl.constexpr, SPAN: tl.constexpr, WIN: tl.constexpr,
            BACK: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, TURNED: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Write a convolution's weights as the matrix [KP, BN] by which patches are multiplied; zeros fill it up.

    With `TURNED` its columns lie side by side, not its lines.

    Forward a line is (ky, kx, channel), a column an output channel (or four of them, one for each place of a window).
    With `BACK` a line is (ky, kx, output channel) of the turned kernel and a column an input channel.
    """
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = j % KP if TURNED else j // BN
    n = j // KP if TURNED else j % BN
    if BACK:
        ky = KS - 1 - k // (KS * OUT)
        kx = KS - 1 - (k // OUT) % KS
        o = k % OUT
        c = n
    else:
        ky = k // (SPAN * LANES)
        kx = (k // LANES) % SPAN
        c = k % LANES
        o = n
        if WIN == 4:
            o = n // 4
            ky -= (n % 4) // 2
            kx -= n % 2
    here = (
        (k < SPAN * SPAN * (OUT if BACK else LANES))
        & (o < OUT)
        & (c < C)
        & (ky >= 0)
        & (ky < KS)
        & (kx >= 0)
        & (kx < KS)
    )
    w = tl.load(p + r.to(tl.int64) * P_ROW + W_AT + ((o * C + c) * KS + ky) * KS + kx, mask=here, other=0.0)
    tl.store(to + r.to(tl.int64) * (KP * BN) + j, w, mask=j < KP * BN)


@triton.jit(do_not_specialize=["ahead"])
def conv_forward(x, w, p, out, arg, step, count, order, ahead, P_ROW: tl.constexpr, B_AT: tl.constexpr,
                 B: tl.constexpr, LANES: tl.constexpr, SPAN: tl.constexpr, OUT: tl.constexpr, PH: tl.constexpr,
                 PW: tl.constexpr, POOL: tl.constexpr, WIN: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr,
                 X_B: tl.constexpr, X_Y: tl.constexpr, O_B: tl.constexpr, O_Y: tl.constexpr, O_X: tl.constexpr,
                 O_C: tl.constexpr, O_0: tl.constexpr, D_B: tl.constexpr, D_Y: tl.constexpr, D_X: tl.constexpr,
                 D_C: tl.constexpr, MODE: tl.constexpr, TURNED: tl.constexpr, KP: tl.constexpr, BO: tl.constexpr,
                 BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
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
    base = b * X_B + py * (POOL * X_Y) + px * (POOL * LANES)
    x_row = x + r.to(tl.int64) * (B * X_B)
    w_row = w + r.to(tl.int64) * (KP * BN)
    a0 = tl.zeros([BM, BN], tl.float32)
    a1 = tl.zeros([BM, BN], tl.float32)
    a2 = tl.zeros([BM, BN], tl.float32)
    a3 = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, KP, BK):
        k = k0 + tl.arange(0, BK)
        ky = k // (SPAN * LANES)
        at = base[:, None] + (k + ky * (X_Y - SPAN * LANES))[None, :]
        keep = ok[:, None] & (k < SPAN * SPAN * LANES)[None, :]
        places = k[:, None] + n[None, :] * KP if TURNED else k[:, None] * BN + n[None, :]
        weights = tl.load(w_row + places, mask=(k < KP)[:, None], other=0.0)
        a0 = mul(tl.load(x_row + at, mask=keep, other=0.0), weights, a0, MODE)
        if POOL == 2 and WIN == 1:
            a1 = mul(tl.load(x_row + at + LANES, mask=keep, other=0.0), weights, a1, MODE)
            a2 = mul(tl.load(x_row + at + X_Y, mask=keep, other=0.0), weights, a2, MODE)
            a3 = mul(tl.load(x_row + at + X_Y + LANES, mask=keep, other=0.0), weights, a3, MODE)
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
def conv_weight_gradient(x, dy, arg, part, step, count, order, ahead, B: tl.constexpr, LANES: tl.constexpr,
                         SPAN: tl.constexpr, OUT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
                         POOL: tl.constexpr, WIN: tl.constexpr, DENSE: tl.constexpr, X_B: tl.constexpr,
                         X_Y: tl.constexpr, D_B: tl.constexpr, D_Y: tl.constexpr, D_X: tl.constexpr,
                         D_C: tl.constexpr, D_0: tl.constexpr, MODE: tl.constexpr, SPLITS: tl.constexpr,
                         BS: tl.constexpr, KP: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr,
                         BK: tl.constexpr):  # fmt: skip
    """Add up the gradient of a convolution's laid-out weights over the `BS` samples of one split.

    With `DENSE` the gradient `dy` is that of every place, as `unpool` writes it. The last program of a split adds up
    the bias's gradient.
    """
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    o = tl.arange(0, BO)
    BN: tl.constexpr = BO * WIN
    d_row = r.to(tl.int64) * (B * D_B)
    to = part + (r * SPLITS + split).to(tl.int64) * (KP * BN + BO)
    if tile == (KP + BK - 1) // BK:
        bias = tl.zeros([BO], tl.float32)
        for m0 in range(0, BS * PH * PW, BM):
            m = m0 + tl.arange(0, BM)
            b = split * BS + m // (PH * PW)
            at = (b * D_B + ((m // PW) % PH) * D_Y + (m % PW) * D_X + D_0)[:, None] + o[None, :] * D_C
            keep = ((m < BS * PH * PW) & (b < B))[:, None] & (o < OUT)[None, :]
            d = tl.load(dy + d_row + at, mask=keep, other=0.0).to(tl.float32)
            if not DENSE:
                d = tl.where(tl.load(arg + d_row + at, mask=keep, other=4) < 4, d, 0.0)
            bias += tl.sum(d, 0)
        tl.store(to + KP * BN + o, bias)
        return
    k = tile * BK + tl.arange(0, BK)
    ky = k // (SPAN * LANES)
    koff = k + ky * (X_Y - SPAN * LANES)
    kin = k < SPAN * SPAN * LANES
    x_row = x + r.to(tl.int64) * (B * X_B)
    acc = tl.zeros([BK, BN], tl.float32)
    for m0 in range(0, BS * PH * PW, BM):
        m = m0 + tl.arange(0, BM)
        b = split * BS + m // (PH * PW)
        py = (m // PW) % PH
        px = m % PW
        ok = (m < BS * PH * PW) & (b < B)
        at = (b * D_B + py * D_Y + px * D_X + D_0)[:, None] + o[None, :] * D_C
        keep = ok[:, None] & (o < OUT)[None, :]
        d = tl.load(dy + d_row + at, mask=keep, other=0.0)
        place = tl.zeros([BM, BO], tl.int32)
        if not DENSE:
            place = tl.load(arg + d_row + at, mask=keep, other=4).to(tl.int32)
        at = (b * X_B + py * (POOL * X_Y) + px * (POOL * LANES))[None, :] + koff[:, None]
        live = ok[None, :] & kin[:, None]
        if DENSE:
            acc = mul(tl.load(x_row + at, mask=live, other=0.0), d, acc, MODE, True)
        elif WIN == 4:
            window = tl.arange(0, 4)
            won = place[:, :, None] == window[None, None, :]
            spread = tl.reshape(tl.where(won, d[:, :, None], 0.0), [BM, BN])
            acc = mul(tl.load(x_row + at, mask=live, other=0.0), spread, acc, MODE, True)
        else:
            acc = mul(tl.load(x_row + at, mask=live, other=0.0), tl.where(place == 0, d, 0.0), acc, MODE, True)
            if POOL == 2:
                acc = mul(
                    tl.load(x_row + at + LANES, mask=live, other=0.0), tl.where(place == 1, d, 0.0), acc, MODE, True
                )
                acc = mul(
                    tl.load(x_row + at + X_Y, mask=live, other=0.0), tl.where(place == 2, d, 0.0), acc, MODE, True
                )
                x3 = tl.load(x_row + at + X_Y + LANES, mask=live, other=0.0)
                acc = mul(x3, tl.where(place == 3, d, 0.0), acc, MODE, True)
    n = tl.arange(0, BN)
    tl.store(to + k[:, None] * BN + n[None, :], acc, mask=(k < KP)[:, None])


@triton.jit(do_not_specialize=["ahead"])
def fold(part, g, step, count, order, ahead, G_ROW: tl.constexpr, W_AT: tl.constexpr, B_AT: tl.constexpr,
         C: tl.constexpr, LANES: tl.constexpr, OUT: tl.constexpr, KS: tl.constexpr, SPAN: tl.constexpr,
         WIN: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr, KP: tl.constexpr,
         BO: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Add up the splits, and the places of a window, of a convolution's gradient into the rows."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = j % OUT
    c = (j // OUT) % C
    kx = (j // (OUT * C)) % KS
    ky = j // (OUT * C * KS)
    weight = j < OUT * C * KS * KS
    for_bias = (j >= OUT * C * KS * KS) & (j < OUT * C * KS * KS + OUT)
    split = tl.arange(0, SP)[:, None]
    there = split < SPLITS
    of = part + (r * SPLITS + split).to(tl.int64) * (KP * BO * WIN + BO)
    found = tl.load(of + KP * BO * WIN + o[None, :], mask=there & for_bias[None, :], other=0.0)
    for w in tl.static_range(WIN):
        k = ((ky + w // 2) * SPAN + kx + w % 2) * LANES + c
        found += tl.load(of + (k * (BO * WIN) + o * WIN + w)[None, :], mask=there & weight[None, :], other=0.0)
    total = tl.sum(found, 0)
    to = g + r.to(tl.int64) * G_ROW
    tl.store(to + W_AT + ((o * C + c) * KS + ky) * KS + kx, total, mask=weight)
    if BIAS:
        tl.store(to + B_AT + o, total, mask=for_bias)


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
                        MODE: tl.constexpr, TURNED: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr,
                        BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
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
        places = k[:, None] + n[None, :] * KP if TURNED else k[:, None] * BN + n[None, :]
        weights = tl.load(w_row + places, mask=(k < KP)[:, None], other=0.0)
        acc = mul(d, weights, acc, MODE)
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


@triton.jit
def _around(values, C: tl.constexpr, SIZE: tl.constexpr, AHEAD: tl.constexpr):
    """Return the sum of `SIZE` neighbours in a line, the last of which is `AHEAD` places further on."""
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
    """Divide every value by a power of k plus the weighted squares of neighbouring channels."""
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
    """Carry the gradient back: dx = dy den^-beta - 2 alpha beta / size x (sum of dy x den^(-beta - 1) within reach)."""
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
