"""Convolutions of stacked nets by kernels are PyTorch's; where there is no GPU they run in Triton's interpreter."""

import pytest
import torch
from helpers import DEVICES, apart, drive, federation, layout_of, simulate
from torch import nn
from torch.func import vmap
from torch.nn import functional

pytest.importorskip("triton")

from fedcat.engines.gradients.trials import trial_step
from fedcat.engines.gradients.triton.conv2d import fast_conv2d
from fedcat.engines.gradients.vmap import VmapGradients, VmapTritonGradients
from fedcat.methods import FedAvg

DEVICE = DEVICES[-1]
SHAPES = [(1, 3, 3, 1, 1, 6), (3, 5, 3, 2, 1, 7), (4, 6, 1, 2, 0, 8), (2, 3, 2, 2, 0, 7), (3, 4, 5, 1, 2, 6)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("into", "out", "kernel", "stride", "padding", "side"), SHAPES)
def test_values_and_gradients_are_pytorchs(into, out, kernel, stride, padding, side, bias):
    torch.manual_seed(0)
    shapes = ((2, 4, into, side, side), (2, out, into, kernel, kernel), (2, out))
    x, w, b = (torch.randn(shape, device=DEVICE) for shape in shapes)

    def squares(x, w, b):
        return functional.conv2d(x, w, b if bias else None, stride, padding).square().sum()

    def by_kernels(x, w, b):
        with fast_conv2d("fp32"):
            return squares(x, w, b)

    found = []
    for function, dtype in ((squares, torch.float64), (by_kernels, torch.float32)):
        leaves = [t.to(dtype).requires_grad_() for t in (x, w, b)]
        losses = vmap(function)(*leaves)
        found.append([losses.detach(), *torch.autograd.grad(losses.sum(), leaves[: 2 + bias])])
    for right, mine in zip(*found, strict=True):
        assert apart(mine.double(), right) < 1e-5


@pytest.mark.parametrize("words", [{"groups": 2}, {"dilation": 2}, {"padding": "same"}, {"padding": (1, 0)}])
def test_other_convolutions_are_left_to_pytorch(words):
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 4, 7, 7), torch.randn(2, 4, 4 // words.get("groups", 1), 3, 3)
    right = torch.stack([functional.conv2d(a, b, **words) for a, b in zip(x, w, strict=True)])

    def conv(x, w):
        with fast_conv2d("fp32"):
            return functional.conv2d(x, w, **words)

    assert torch.allclose(vmap(conv)(x, w), right, atol=1e-5)


class Residual(nn.Module):
    """A block like those of ResNets."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm, self.head = norm, nn.Linear(4, 10)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.head((x + functional.gelu(self.norm(self.second(x)))).mean((2, 3)))


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.BatchNorm2d(4)])
def test_gradients_of_a_net_with_them_are_autograds(norm):
    layout, fed = layout_of(Residual(norm), torch.float32, DEVICE), federation([3, 5])
    made = VmapTritonGradients(layout, fed.train.to(layout.device))
    step = trial_step(made, 2, 3)
    right = VmapGradients(layout, made.pool)
    for mine, plain in zip(made.of(step), right.of(step), strict=True):
        assert plain.numel() == 0 or apart(mine, plain) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes minutes in Triton's interpreter")
@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.BatchNorm2d(4)])
def test_a_net_with_them_agrees_with_the_sequential_engine(norm):
    rows = []
    for engine in ("sequential", "stacked"):
        torch.manual_seed(0)
        layout = layout_of(Residual(norm), torch.float32, DEVICE)
        sim = simulate(FedAvg, federation([3, 5]), layout, engine, rounds=1, k=2, epochs=1, join_lone=True)
        drive(sim)
        rows.append(sim.method.row)
    assert sim.engine.kernels(sim.task).startswith("torch.vmap with Triton kernels, captured: ")
    assert apart(rows[1], rows[0]) < 1e-5
