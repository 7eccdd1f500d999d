"""Stacks of recurrent layers, step by step, give what PyTorch's own give."""

import pytest
import torch
from helpers import DEVICES, Lines, apart, digits_net, drive, federation, layout_of, simulate
from torch import nn
from torch.func import functional_call, vmap

from fedcat.engines import make, pick
from fedcat.methods import FedCat
from fedcat.models.recurrent import unrolled_recurrence
from fedcat.models.traits import traits

LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4, batch_first=True),
    "deep, both ways": lambda: nn.LSTM(3, 4, num_layers=3, bidirectional=True, batch_first=True),
    "lstm, no bias": lambda: nn.LSTM(3, 4, bias=False),
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*LAYERS, *CELLS])
def test_stacks_give_the_outputs_and_gradients_of_each_copy(name, device):
    torch.manual_seed(0)
    layer = {**LAYERS, **CELLS}[name]().to(device, torch.float64)
    shape = (5, 3) if name in CELLS else (5, 6, 3)
    x = torch.randn(3, *shape, dtype=torch.float64, device=device, requires_grad=True)
    rows = {n: torch.randn(3, *p.shape).to(p).requires_grad_() for n, p in layer.named_parameters()}
    with unrolled_recurrence():
        together = flat(vmap(lambda p, x: functional_call(layer, p, (x,)))(rows, x))
    each = [flat(functional_call(layer, {n: p[row] for n, p in rows.items()}, (x[row],))) for row in range(3)]
    alone = [torch.stack(parts) for parts in zip(*each, strict=True)]
    ours, right = (
        [*found, *torch.autograd.grad(sum(part.square().sum() for part in found), [x, *rows.values()])]
        for found in (together, alone)
    )
    for a, b in zip(ours, right, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_one_net_gives_what_pytorch_gives():
    torch.manual_seed(0)
    layer, x = LAYERS["deep, both ways"](), torch.randn(5, 6, 3)
    with torch.no_grad(), unrolled_recurrence():
        ours = flat(layer(x))
    for a, b in zip(ours, flat(layer(x)), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_nets_train_as_stacks_and_one_by_one(layer, device):
    fed, rows = federation([3, 9, 5, 12, 7, 4]), []
    for engine, where in (("sequential", "cpu"), ("sequential", device), ("stacked", device)):
        torch.manual_seed(1)
        layout = layout_of(Lines(layer), torch.float64, where)
        assert pick("stacked", layout, fed.train.to(layout.device), 4).name == "stacked"
        assert pick("auto", layout, fed.train.to(layout.device), 4).name == {"cpu": "sequential"}.get(where, "stacked")
        sim = simulate(FedCat, fed, layout, make(engine), rounds=3, momentum=0.5)
        rows.append(drive(sim).method.row.cpu())
    assert apart(rows[1], rows[0]) < 1e-10
    assert apart(rows[2], rows[0]) < 1e-10


class Mixed(Lines):
    """The same in bfloat16 where PyTorch thinks that this is enough."""

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x).to(x.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_nets_that_use_autocast_train_as_stacks(layer, device):
    fed, rows = federation([3, 9, 5]), []
    for engine in ("sequential", "stacked"):
        torch.manual_seed(1)
        layout = layout_of(Mixed(layer), torch.float32, device)
        rows.append(drive(simulate(FedCat, fed, layout, make(engine), rounds=3)).method.row)
    assert apart(rows[1], rows[0]) < 0.01


@pytest.mark.parametrize("named", [False, True])
def test_functions_that_are_called_with_names_are_left_to_pytorch(named):
    cell = nn.LSTMCell(3, 4)
    x, h, c = torch.randn(5, 3), torch.randn(5, 4), torch.randn(5, 4)
    biases = {"b_ih": cell.bias_ih, "b_hh": cell.bias_hh}
    with unrolled_recurrence():
        given = biases if named else {}
        found = torch.lstm_cell(x, (h, c), cell.weight_ih, cell.weight_hh, *(() if named else biases.values()), **given)
    assert torch.allclose(found[0], cell(x, (h, c))[0], atol=1e-6)


class Packed(Lines):
    """The same with packed sequences, whose lengths are data."""

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x[:, 0], torch.full((len(x),), 8), batch_first=True)
        return self.head(self.layer(packed)[1][0][-1])


def test_what_draws_packs_or_projects_cannot_be_stacked():
    fed = federation([8] * 3)
    assert "dropout" in traits(layout_of(Lines(nn.LSTM, num_layers=2, dropout=0.5)), fed.train).unstackable
    for net in (Packed(nn.LSTM), Lines(nn.LSTM, proj_size=3)):
        assert "torch.vmap cannot run it" in traits(layout_of(net), fed.train).unstackable


class ByHand(nn.Module):
    """A net that calls the function of a cell and has no such module."""

    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Parameter(torch.ones(6, 8)), nn.Parameter(torch.ones(6, 6))
        self.head = nn.Linear(6, 10)

    def forward(self, x):
        h = x.new_zeros(len(x), 6)
        for step in x[:, 0].unbind(1):
            h = torch.rnn_tanh_cell(step, h, self.w, self.u)
        return self.head(h)


@pytest.mark.parametrize("net", [Lines(nn.LSTM), Lines(nn.GRU), ByHand()])
def test_a_net_that_calls_them_is_recurrent(net):
    found = traits(layout_of(net), federation([8] * 3).train)
    assert found.recurrent
    assert not found.unstackable


def test_other_nets_are_not_recurrent():
    assert not traits(layout_of(digits_net()), federation([8] * 3).train).recurrent
