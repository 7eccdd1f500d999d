"""Triton kernels for a step of stacked LSTMs, in the notation of `torch.nn.LSTM`.

Forward, with i, f, g, o = x + U h + d: c' = sigmoid(f) c + sigmoid(i) tanh(g), h' = sigmoid(o) tanh(c'). The gates are
kept after sigmoid and tanh; below, i, f, g, o mean these. Backward, with dz of the step after this one: dh' = dz U plus
the gradient of the output, dc' = (what the step after gives) + dh' o (1 - tanh(c')^2), and then di = dc' g i (1 - i),
df = dc' c f (1 - f), dg = dc' i (1 - g^2) and do = dh' tanh(c') o (1 - o), which are this step's dz; dc = dc' f.

Rows R, steps T, samples B of a batch, units H. x, gates and dz are [R, T, B, 4 H]; h and c are [R, T + 1, B, H], with
the state before the first step at 0; U is [R, 4 H, H], with the strides U_K along the summed dimension and U_N along
the other. A program computes a tile of samples and units.
"""

import triton
import triton.language as tl

from fedcat.engines.gradients.triton.products import mul


@triton.jit
def tanh(x):
    """Return tanh(x): near 0 as a series, because the difference of sigmoids would cancel."""
    s = x * x
    series = x * (1 + s * (-1 / 3 + s * (2 / 15 - s * (17 / 315))))
    return tl.where(s < 0.04, series, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit(do_not_specialize=["t"])
def lstm_forward(x, u, d, h, c, gates, t, T: tl.constexpr, B: tl.constexpr, H: tl.constexpr, U_K: tl.constexpr,
                 U_N: tl.constexpr, BIAS: tl.constexpr, MODE: tl.constexpr, BM: tl.constexpr, BU: tl.constexpr,
                 BK: tl.constexpr):  # fmt: skip
    """Write a tile of the gates, of c and of h after step `t`."""
    r = tl.program_id(1).to(tl.int64)
    tiles: tl.constexpr = (H + BU - 1) // BU
    b = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % tiles) * BU + tl.arange(0, BU)
    before = (r * (T + 1) + t) * B + b
    z_i = tl.zeros([BM, BU], tl.float32)
    z_f = tl.zeros([BM, BU], tl.float32)
    z_g = tl.zeros([BM, BU], tl.float32)
    z_o = tl.zeros([BM, BU], tl.float32)
    for k0 in range(0, H, BK):
        k = k0 + tl.arange(0, BK)
        hk = tl.load(h + before[:, None] * H + k[None, :], mask=(b < B)[:, None] & (k < H)[None, :], other=0.0)
        at = u + r * 4 * H * H + k[:, None] * U_K + n[None, :] * U_N
        keep = (n < H)[None, :] & (k < H)[:, None]
        z_i = mul(hk, tl.load(at, mask=keep, other=0.0), z_i, MODE)
        z_f = mul(hk, tl.load(at + H * U_N, mask=keep, other=0.0), z_f, MODE)
        z_g = mul(hk, tl.load(at + 2 * H * U_N, mask=keep, other=0.0), z_g, MODE)
        z_o = mul(hk, tl.load(at + 3 * H * U_N, mask=keep, other=0.0), z_o, MODE)
    keep = (b < B)[:, None] & (n < H)[None, :]
    at = ((r * T + t) * B + b)[:, None] * (4 * H) + n[None, :]
    z_i += tl.load(x + at, mask=keep, other=0.0)
    z_f += tl.load(x + at + H, mask=keep, other=0.0)
    z_g += tl.load(x + at + 2 * H, mask=keep, other=0.0)
    z_o += tl.load(x + at + 3 * H, mask=keep, other=0.0)
    if BIAS:
        d_row = d + r * 4 * H + n
        z_i += tl.load(d_row, mask=n < H, other=0.0)[None, :]
        z_f += tl.load(d_row + H, mask=n < H, other=0.0)[None, :]
        z_g += tl.load(d_row + 2 * H, mask=n < H, other=0.0)[None, :]
        z_o += tl.load(d_row + 3 * H, mask=n < H, other=0.0)[None, :]
    i = tl.sigmoid(z_i)
    f = tl.sigmoid(z_f)
    g = tanh(z_g)
    o = tl.sigmoid(z_o)
    old = before[:, None] * H + n[None, :]
    now = f * tl.load(c + old, mask=keep, other=0.0) + i * g
    tl.store(c + old + B * H, now, mask=keep)
    tl.store(h + old + B * H, o * tanh(now), mask=keep)
    tl.store(gates + at, i, mask=keep)
    tl.store(gates + at + H, f, mask=keep)
    tl.store(gates + at + 2 * H, g, mask=keep)
    tl.store(gates + at + 3 * H, o, mask=keep)


@triton.jit(do_not_specialize=["t"])
def lstm_backward(dout, dh, dc, u, c, gates, dz, t, T: tl.constexpr, B: tl.constexpr, H: tl.constexpr,
                  U_K: tl.constexpr, U_N: tl.constexpr, LAST: tl.constexpr, MODE: tl.constexpr, BM: tl.constexpr,
                  BU: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Write a tile of dz of step `t`, and of dc before it in place of dc after it; `dh` is that of the last step."""
    r = tl.program_id(1).to(tl.int64)
    tiles: tl.constexpr = (H + BU - 1) // BU
    b = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % tiles) * BU + tl.arange(0, BU)
    keep = (b < B)[:, None] & (n < H)[None, :]
    row = (r * T + t) * B + b
    own = (r * B + b)[:, None] * H + n[None, :]
    if LAST:
        slope = tl.load(dh + own, mask=keep, other=0.0)
    else:
        slope = tl.zeros([BM, BU], tl.float32)
        for k0 in range(0, 4 * H, BK):
            k = k0 + tl.arange(0, BK)
            held = (b < B)[:, None] & (k < 4 * H)[None, :]
            after = tl.load(dz + (row + B)[:, None] * (4 * H) + k[None, :], mask=held, other=0.0)
            held = (k < 4 * H)[:, None] & (n < H)[None, :]
            w = tl.load(u + r * 4 * H * H + k[:, None] * U_K + n[None, :] * U_N, mask=held, other=0.0)
            slope = mul(after, w, slope, MODE)
    slope += tl.load(dout + row[:, None] * H + n[None, :], mask=keep, other=0.0)
    at = row[:, None] * (4 * H) + n[None, :]
    i = tl.load(gates + at, mask=keep, other=0.0)
    f = tl.load(gates + at + H, mask=keep, other=0.0)
    g = tl.load(gates + at + 2 * H, mask=keep, other=0.0)
    o = tl.load(gates + at + 3 * H, mask=keep, other=0.0)
    old = ((r * (T + 1) + t) * B + b)[:, None] * H + n[None, :]
    before = tl.load(c + old, mask=keep, other=0.0)
    squashed = tanh(tl.load(c + old + B * H, mask=keep, other=0.0))
    inner = tl.load(dc + own, mask=keep, other=0.0) + slope * o * (1 - squashed * squashed)
    tl.store(dc + own, inner * f, mask=keep)
    tl.store(dz + at, inner * g * i * (1 - i), mask=keep)
    tl.store(dz + at + H, inner * before * f * (1 - f), mask=keep)
    tl.store(dz + at + 2 * H, inner * i * (1 - g * g), mask=keep)
    tl.store(dz + at + 3 * H, slope * squashed * o * (1 - o), mask=keep)
