"""Recurrent layers step by step are PyTorch's, also stacked."""

import pytest
import torch
from helpers import apart, drive, federation, layout_of, simulate
from torch import nn
from torch.func import functional_call, vmap

from fedcat.engines import make, pick
from fedcat.methods import FedCat
from fedcat.models.recurrent import is_recurrent, unrolled_recurrence
from fedcat.models.traits import traits

LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4, batch_first=True),
    "deep, both ways": lambda: nn.LSTM(3, 4, num_layers=3, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(3, 4, num_layers=2, proj_size=2, bidirectional=True),
    "projected, no bias": lambda: nn.LSTM(3, 4, proj_size=2, bias=False),
    "gru": lambda: nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True),
    "gru, no bias": lambda: nn.GRU(3, 4, bias=False),
    "tanh": lambda: nn.RNN(3, 4, num_layers=2, bidirectional=True),
    "relu": lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
}
CELLS = {
    "lstm cell": lambda: nn.LSTMCell(3, 4),
    "gru cell": lambda: nn.GRUCell(3, 4),
    "tanh cell": lambda: nn.RNNCell(3, 4, bias=False),
    "relu cell": lambda: nn.RNNCell(3, 4, nonlinearity="relu"),
}


def flat(found):
    """Return all tensors of nested tuples."""
    return [found] if isinstance(found, torch.Tensor) else [tensor for part in found for tensor in flat(part)]


def outputs_and_gradients(layer, x, unrolled):
    with torch.enable_grad():
        if unrolled:
            with unrolled_recurrence():
                found = flat(layer(x))
        else:
            found = flat(layer(x))
        grads = torch.autograd.grad(sum(part.square().sum() for part in found), [x, *layer.parameters()])
    return [*found, *grads]


@pytest.mark.parametrize("name", [*LAYERS, *CELLS])
def test_outputs_and_gradients_are_those_of_pytorch(name):
    torch.manual_seed(0)
    layer = {**LAYERS, **CELLS}[name]().double()
    x = torch.randn(*((5, 3) if name in CELLS else (5, 6, 3)), dtype=torch.float64, requires_grad=True)
    ours, right = (outputs_and_gradients(layer, x, unrolled) for unrolled in (True, False))
    for a, b in zip(ours, right, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [*LAYERS, *CELLS])
def test_stacks_give_what_each_copy_gives(name):
    torch.manual_seed(0)
    layer = {**LAYERS, **CELLS}[name]().double()
    rows = {n: torch.randn(3, *p.shape, dtype=torch.float64) for n, p in layer.named_parameters()}
    x = torch.randn(3, *((5, 3) if name in CELLS else (5, 6, 3)), dtype=torch.float64)
    with unrolled_recurrence():
        together = flat(vmap(lambda p, x: functional_call(layer, p, (x,)))(rows, x))
    for row in range(3):
        alone = flat(functional_call(layer, {n: p[row] for n, p in rows.items()}, (x[row],)))
        for a, b in zip(together, alone, strict=True):
            assert torch.allclose(a[row], b, rtol=1e-12, atol=1e-14)


class Lines(nn.Module):
    """Reads the lines of an image one after another."""

    def __init__(self, layer, **given):
        super().__init__()
        self.layer, self.head = layer(8, 5, batch_first=True, **given), nn.Linear(5, 10)

    def forward(self, x):
        return self.head(self.layer(x[:, 0])[0][:, -1])


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_nets_train_as_stacks(layer):
    fed, rows = federation([3, 9, 5, 12, 7, 4]), []
    for engine in ("sequential", "stacked"):
        torch.manual_seed(1)
        layout = layout_of(Lines(layer))
        assert pick("stacked", layout, fed.train, 4).name == "stacked"
        sim = simulate(FedCat, fed, layout, make(engine), rounds=3, momentum=0.5)
        drive(sim)
        rows.append(sim.method.row)
    assert apart(rows[1], rows[0]) < 1e-10


class Packed(Lines):
    """The same with packed sequences, whose lengths are data."""

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x[:, 0], torch.full((len(x),), 8), batch_first=True)
        return self.head(self.layer(packed)[1][0][-1])


def test_what_draws_or_packs_cannot_be_stacked():
    fed = federation([8] * 3)
    assert "dropout" in traits(layout_of(Lines(nn.LSTM, num_layers=2, dropout=0.5)), fed.train).unstackable
    assert "torch.vmap cannot run it" in traits(layout_of(Packed(nn.LSTM)), fed.train).unstackable
    assert is_recurrent(Lines(nn.LSTM))
    assert not is_recurrent(nn.Linear(2, 2))
