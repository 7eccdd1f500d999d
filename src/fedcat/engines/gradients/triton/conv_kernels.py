"""Triton kernels for convolutions; `image_kernels` describes what all kernels share.

Forward, out[b, o, y, x] = relu(max over a pooling window of (bias[o] + sum over c, i, j of
w[o, c, i, j] x[b, c, s y + i - pad, s x + j - pad])), with stride s. Backward, for the gradient d of the convolution
before pooling: dw[o, c, i, j] = sum over b, y, x of d[b, o, y, x] x[b, c, s y + i - pad, s x + j - pad], dbias[o] = sum
of d[:, o], and dx is the convolution of d, spread to stride 1 and padded (`unpool`), with the flipped kernel. All
are products with a matrix of patches [positions, (i, j, c)], which is never stored.

A convolution with 2 x 2 pooling and few channels computes the four positions of a window as four sets of output
channels over the window's larger patch (`WIN` = 4, column = 4 * channel + position), so that the patch is loaded once.
`lay_out` arranges the weights accordingly, and `fold` sums the gradient. The backward pass needs to know which position
of the window had the largest value (`arg`), or `DEAD` if ReLU gave zero.
"""

import triton
import triton.language as tl

from fedcat.engines.gradients.triton.products import mul

DEAD = tl.constexpr(4)


@triton.jit(do_not_specialize=["ahead"])
def lay_out(p, to, step, count, order, ahead, P_ROW: tl.constexpr, W_AT: tl.constexpr, C: tl.constexpr,
            OUT: tl.constexpr, KS: tl.constexpr, SPAN: tl.constexpr, WIN: tl.constexpr,
            BACK: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, TURNED: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Write a convolution's weights as the matrix [KP, BN] by which patches are multiplied, padded with zeros.

    With `TURNED`, the matrix is stored in column-major order.

    Forward, the first index is (ky, kx, channel) and the second an output channel (or four of them, one per position
    of a window). With `BACK`, they are (ky, kx, output channel) of the flipped kernel and an input channel.
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
                 PW: tl.constexpr, POOL: tl.constexpr, WIN: tl.constexpr, STRIDE: tl.constexpr, RELU: tl.constexpr,
                 BIAS: tl.constexpr, ARG: tl.constexpr,
                 X_B: tl.constexpr, X_Y: tl.constexpr, O_B: tl.constexpr, O_Y: tl.constexpr, O_X: tl.constexpr,
                 O_C: tl.constexpr, O_0: tl.constexpr, D_B: tl.constexpr, D_Y: tl.constexpr, D_X: tl.constexpr,
                 D_C: tl.constexpr, MODE: tl.constexpr, TURNED: tl.constexpr, KP: tl.constexpr, BO: tl.constexpr,
                 BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Convolve, pool, add the bias and apply ReLU, for one tile of (pooled) positions and all channels.

    Writes out = relu(max over a window of (x * w) + b), and with `ARG` which position of the window won.
    """
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
    base = b * X_B + py * (POOL * STRIDE * X_Y) + px * (POOL * STRIDE * C)
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
        places = k[:, None] + n[None, :] * KP if TURNED else k[:, None] * BN + n[None, :]
        weights = tl.load(w_row + places, mask=(k < KP)[:, None], other=0.0)
        a0 = mul(tl.load(x_row + at, mask=keep, other=0.0), weights, a0, MODE)
        if POOL == 2 and WIN == 1:
            right: tl.constexpr = STRIDE * C
            below: tl.constexpr = STRIDE * X_Y
            a1 = mul(tl.load(x_row + at + right, mask=keep, other=0.0), weights, a1, MODE)
            a2 = mul(tl.load(x_row + at + below, mask=keep, other=0.0), weights, a2, MODE)
            a3 = mul(tl.load(x_row + at + below + right, mask=keep, other=0.0), weights, a3, MODE)
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
    if ARG:
        at = (b * D_B + py * D_Y + px * D_X)[:, None] + o[None, :] * D_C
        tl.store(arg + r.to(tl.int64) * (B * D_B) + at, place.to(tl.int8), mask=keep)


@triton.jit(do_not_specialize=["ahead"])
def conv_weight_gradient(x, dy, arg, part, step, count, order, ahead, B: tl.constexpr, C: tl.constexpr,
                         SPAN: tl.constexpr, OUT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
                         POOL: tl.constexpr, WIN: tl.constexpr, STRIDE: tl.constexpr, DENSE: tl.constexpr,
                         X_B: tl.constexpr,
                         X_Y: tl.constexpr, D_B: tl.constexpr, D_Y: tl.constexpr, D_X: tl.constexpr,
                         D_C: tl.constexpr, D_0: tl.constexpr, MODE: tl.constexpr, SPLITS: tl.constexpr,
                         BS: tl.constexpr, KP: tl.constexpr, BO: tl.constexpr, BM: tl.constexpr,
                         BK: tl.constexpr):  # fmt: skip
    """Sum the gradient of a convolution's laid-out weights over the `BS` samples of one split.

    With `DENSE`, `dy` is the gradient at every position, as `unpool` writes it. The last program of a split sums the
    bias gradient.
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
    ky = k // (SPAN * C)
    koff = k + ky * (X_Y - SPAN * C)
    kin = k < SPAN * SPAN * C
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
        at = (b * X_B + py * (POOL * STRIDE * X_Y) + px * (POOL * STRIDE * C))[None, :] + koff[:, None]
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
                right: tl.constexpr = STRIDE * C
                below: tl.constexpr = STRIDE * X_Y
                x1 = tl.load(x_row + at + right, mask=live, other=0.0)
                acc = mul(x1, tl.where(place == 1, d, 0.0), acc, MODE, True)
                x2 = tl.load(x_row + at + below, mask=live, other=0.0)
                acc = mul(x2, tl.where(place == 2, d, 0.0), acc, MODE, True)
                x3 = tl.load(x_row + at + below + right, mask=live, other=0.0)
                acc = mul(x3, tl.where(place == 3, d, 0.0), acc, MODE, True)
    n = tl.arange(0, BN)
    tl.store(to + k[:, None] * BN + n[None, :], acc, mask=(k < KP)[:, None])


@triton.jit(do_not_specialize=["ahead"])
def fold(part, g, step, count, order, ahead, G_ROW: tl.constexpr, W_AT: tl.constexpr, B_AT: tl.constexpr,
         C: tl.constexpr, OUT: tl.constexpr, KS: tl.constexpr, SPAN: tl.constexpr,
         WIN: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr, KP: tl.constexpr,
         BO: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sum a convolution's gradient over the splits and the positions of a window, and write it into the rows."""
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
        k = ((ky + w // 2) * SPAN + kx + w % 2) * C + c
        found += tl.load(of + (k * (BO * WIN) + o * WIN + w)[None, :], mask=there & weight[None, :], other=0.0)
    total = tl.sum(found, 0)
    to = g + r.to(tl.int64) * G_ROW
    tl.store(to + W_AT + ((o * C + c) * KS + ky) * KS + kx, total, mask=weight)
    if BIAS:
        tl.store(to + B_AT + o, total, mask=for_bias)


@triton.jit(do_not_specialize=["ahead"])
def unpool(dy, arg, full, step, count, order, ahead, B: tl.constexpr, OUT: tl.constexpr, OH: tl.constexpr,
           OW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, POOL: tl.constexpr, STRIDE: tl.constexpr,
           D_B: tl.constexpr,
           D_Y: tl.constexpr, D_X: tl.constexpr, D_C: tl.constexpr, F_B: tl.constexpr, F_Y: tl.constexpr,
           F_0: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write a convolution's gradient at every position of its input that a kernel of stride 1 would have.

    It is zero between the positions of a stride, and where a window's largest value was not.
    """
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = j % OUT
    xx = (j // OUT) % OW
    y = (j // (OUT * OW)) % OH
    b = j // (OUT * OW * OH)
    cy = y // STRIDE
    cx = xx // STRIDE
    inside = (b < B) & (y % STRIDE == 0) & (xx % STRIDE == 0) & (cy // POOL < PH) & (cx // POOL < PW)
    at = r.to(tl.int64) * (B * D_B) + b * D_B + (cy // POOL) * D_Y + (cx // POOL) * D_X + o * D_C
    place = tl.load(arg + at, mask=inside, other=4)
    d = tl.load(dy + at, mask=inside, other=0.0)
    d = tl.where(place == (cy % POOL) * POOL + cx % POOL, d, 0.0)
    tl.store(full + r.to(tl.int64) * (B * F_B) + b * F_B + y * F_Y + xx * OUT + o + F_0, d, mask=b < B)


@triton.jit(do_not_specialize=["ahead"])
def conv_input_gradient(full, w, dx, step, count, order, ahead, B: tl.constexpr, C: tl.constexpr, HI: tl.constexpr,
                        WI: tl.constexpr, KS: tl.constexpr, OUT: tl.constexpr, F_B: tl.constexpr, F_Y: tl.constexpr,
                        D_B: tl.constexpr, D_Y: tl.constexpr, D_X: tl.constexpr, D_C: tl.constexpr,
                        MODE: tl.constexpr, TURNED: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr,
                        BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Propagate a convolution's gradient to one tile of its input positions, for all channels."""
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
