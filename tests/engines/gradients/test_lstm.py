"""Stacked LSTMs by kernels are PyTorch's; where there is no GPU they run in Triton's interpreter."""

import pytest
import torch
from helpers import DEVICES, Lines, apart, drive, federation, layout_of, simulate
from torch import nn
from torch.func import functional_call, vmap

pytest.importorskip("triton")

from fedcat.engines.gradients.trials import trial_step
from fedcat.engines.gradients.triton.lstm import fast_lstm
from fedcat.engines.gradients.vmap import VmapGradients, VmapTritonGradients
from fedcat.methods import FedAvg

DEVICE = DEVICES[-1]
LAYERS = [
    ({}, 3, 5),
    ({"bias": False}, 1, 20),
    ({"hidden_size": 35}, 2, 40),
    ({"num_layers": 2, "bidirectional": True, "batch_first": True}, 3, 2),
]


def outputs_and_gradients(layer, leaves, stacked):
    """Return what two copies of a layer give for `leaves` with the leading dimension 2, and their gradients."""

    def run(x, h, c, *weights):
        out, state = functional_call(layer, dict(zip(names, weights, strict=True)), (x, (h, c)))
        return out, *state

    names, leaves = [n for n, _ in layer.named_parameters()], [t.detach().requires_grad_() for t in leaves]
    found = vmap(run)(*leaves) if stacked else [torch.stack(p) for p in zip(*map(run, *leaves), strict=True)]
    slopes = torch.autograd.grad(sum(part.square().sum() for part in found), leaves)
    return [*(part.detach() for part in found), *slopes]


def apart_from_pytorch(words, steps, batch, precision="fp32", scale=1.0):
    """Return the largest difference of the kernels' outputs and gradients from PyTorch's in float64."""
    torch.manual_seed(0)
    layer = nn.LSTM(3, **{"hidden_size": 6, **words}).to(DEVICE)
    shape = (batch, steps, 3) if layer.batch_first else (steps, batch, 3)
    start = (layer.num_layers * (1 + layer.bidirectional), batch, layer.hidden_size)
    shapes = [shape, start, start, *(p.shape for p in layer.parameters())]
    leaves = [scale * torch.randn(2, *size, device=DEVICE) for size in shapes]
    with fast_lstm(precision):
        ours = outputs_and_gradients(layer, leaves, stacked=True)
    right = outputs_and_gradients(layer.double(), [t.double() for t in leaves], stacked=False)
    return max(apart(a.double(), b) for a, b in zip(ours, right, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize(("words", "steps", "batch"), LAYERS)
def test_values_and_gradients_are_pytorchs(words, steps, batch, precision):
    assert apart_from_pytorch(words, steps, batch, precision) < (1e-5 if precision == "fp32" else 1e-2)


def test_small_values_keep_their_digits():
    assert apart_from_pytorch({}, 2, 4, scale=1e-3) < 1e-5


def test_gradients_of_a_net_with_them_are_autograds():
    layout, fed = layout_of(Lines(num_layers=2), torch.float32, DEVICE), federation([3, 5])
    made = VmapTritonGradients(layout, fed.train.to(layout.device))
    step = trial_step(made, 2, 3)
    losses, slopes, _ = made.of(step)
    right_losses, right_slopes, _ = VmapGradients(layout, made.pool).of(step)
    assert apart(losses, right_losses) < 1e-5
    assert apart(slopes, right_slopes) < 1e-5


def test_a_net_with_them_agrees_with_the_sequential_engine(captured):
    rows = []
    for engine in ("sequential", "stacked"):
        torch.manual_seed(0)
        layout = layout_of(Lines(), torch.float32, DEVICE)
        sim = simulate(FedAvg, federation([3, 5]), layout, engine, rounds=1, k=2, epochs=1)
        rows.append(drive(sim).method.row)
    assert sim.engine.kernels(sim.task).startswith("torch.vmap with Triton kernels, captured: ")
    assert apart(rows[1], rows[0]) < 1e-5
