"""Triton kernels for linear layers, the loss and the SGD step; `image_kernels` describes what all kernels share.

Forward, h = relu(x W' + b) as in `torch.nn.Linear`; backward, with dz = dh where h > 0: dx = dz W, dW = dz' x, db = sum
of dz over the batch. `tail` does the last one to three layers at once, with the mean cross entropy over the n
real samples of a batch, whose gradient is (softmax(z) - onehot(y)) / n. `descend` is `torch.optim.SGD`:
v = momentum v + g + decay p, p = p - lr v.
"""

import triton
import triton.language as tl

from fedcat.engines.gradients.triton.products import mul


@triton.jit(do_not_specialize=["ahead"])
def linear_forward(x, p, h, step, count, order, ahead, P_ROW: tl.constexpr, W_AT: tl.constexpr, B_AT: tl.constexpr,
                   B: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr,
                   MODE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Write one tile of relu(x W' + b)."""
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
        acc = mul(xk, w, acc, MODE)
    if BIAS:
        acc += tl.load(w_row + B_AT + n, mask=n < OUT, other=0.0)[None, :]
    if RELU:
        acc = tl.where(acc <= 0, 0.0, acc)
    tl.store(h + (r * B + b).to(tl.int64)[:, None] * OUT + n[None, :], acc, mask=(b < B)[:, None] & (n < OUT)[None, :])


@triton.jit(do_not_specialize=["ahead"])
def linear_input_gradient(dy, h, p, dx, step, count, order, ahead, P_ROW: tl.constexpr, W_AT: tl.constexpr,
                          B: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, RELU: tl.constexpr,
                          MODE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Write one tile of dy W; with `RELU`, `dy` counts only where the layer's output `h` is positive."""
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
        acc = mul(d, w, acc, MODE, True)
    tl.store(dx + row[:, None] * IN + n[None, :], acc, mask=(b < B)[:, None] & (n < IN)[None, :])


@triton.jit(do_not_specialize=["ahead"])
def linear_weight_gradient(x, dy, h, g, step, count, order, ahead, G_ROW: tl.constexpr, W_AT: tl.constexpr,
                           B_AT: tl.constexpr, B: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
                           RELU: tl.constexpr, BIAS: tl.constexpr, MODE: tl.constexpr, BB: tl.constexpr,
                           BO: tl.constexpr, BI: tl.constexpr):  # fmt: skip
    """Write one tile of a linear layer's weight gradient dy' x, and the bias gradient, into the rows."""
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
        acc = mul(d, xb, acc, MODE, True)
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
    z = mul(h, w, tl.zeros([h.shape[0], PO], tl.float32), MODE)
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
    return mul(e, w, tl.zeros([e.shape[0], PI], tl.float32), MODE, True)


@triton.jit(do_not_specialize=["ahead", "S"])
def tail(x, pick, y, p, dx, h1, h2, e1, e2, e3, loss, step, count, order, ahead, S, P_ROW: tl.constexpr,
         w1: tl.constexpr, c1: tl.constexpr, w2: tl.constexpr, c2: tl.constexpr, w3: tl.constexpr, c3: tl.constexpr,
         B: tl.constexpr, LAYERS: tl.constexpr, BIAS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
         D2: tl.constexpr, D3: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, PB: tl.constexpr,
         MODE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Run the last one to three linear layers, the cross entropy and the backward pass, for one tile of samples.

    Writes the hidden values h, the gradients e of the layers' outputs, from which the weight gradients follow, and the
    gradient `dx` of the input. Adds the tile's share of the mean loss to the tile's entry.
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
        z = mul(xk, w, z, MODE)
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
        d = mul(e, w, tl.zeros([BM, BK], tl.float32), MODE)
        tl.store(dx + row[:, None] * D0 + k[None, :], d, mask=inside & (k < D0)[None, :])


@triton.jit
def _softmax_gradient(z, label, here, real, loss, r, CLASSES: tl.constexpr, PC: tl.constexpr):
    """Return the gradient of the mean cross entropy over the real samples; add the loss to the tile's entry."""
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
def descend(p, v, g, lr, lr_decay, momentum, decay, step, count, order, ahead, SIZE: tl.constexpr, ROW: tl.constexpr,
            LR_DECAYS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Take an SGD step with momentum and weight decay."""
    r = tl.load(order + tl.program_id(1))
    if tl.load(step) + ahead >= tl.load(count + r):
        return
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = r.to(tl.int64) * ROW + j
    keep = j < SIZE
    now = tl.load(p + at, mask=keep)
    moved = tl.load(v + at, mask=keep) * tl.load(momentum + r) + (tl.load(g + at, mask=keep) + tl.load(decay + r) * now)
    tl.store(v + at, moved, mask=keep)
    rate = tl.load(lr + r)
    if LR_DECAYS:
        rate = rate / (1 + tl.load(lr_decay + r) * (tl.load(step) + ahead))
    tl.store(p + at, now - rate * moved, mask=keep)
