import pytest
import torch
from torch import nn

from fedcat.core.errors import SettingError
from fedcat.models.layout import Layout


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(4, 3, bias=False)
        self.back = nn.Linear(3, 4, bias=False)
        self.twin = nn.Linear(4, 3, bias=False)
        self.twin.weight = self.into.weight

    def forward(self, x):
        return self.twin(self.back(self.into(x)))


def with_everything():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[2].bias.requires_grad_(False)
    net.register_buffer("scratch", torch.ones(5), persistent=False)
    return net


def test_a_row_is_parameters_then_float_buffers():
    layout = Layout(with_everything())
    assert [s.name for s in layout.parameters] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    assert [s.name for s in layout.buffers] == ["1.running_mean", "1.running_var"]
    assert layout.parameter_size == 12 + 3 + 3 + 3 + 6
    assert layout.size == layout.parameter_size + 6
    assert list(layout.integers) == ["1.num_batches_tracked"]


def test_unpack_gives_views_and_pack_gives_the_row_back():
    net = with_everything()
    layout = Layout(net)
    row = layout.pack(net)
    named = layout.unpack(row)
    assert torch.equal(named["0.weight"], net[0].weight)
    named["0.weight"][0, 0] = 42.0
    assert row[0] == 42.0
    other = with_everything()
    layout.write(row, other)
    assert torch.equal(layout.pack(other), row)


def test_a_matrix_of_rows_unpacks_to_stacks():
    layout = Layout(with_everything())
    rows = torch.randn(3, 2, layout.size)
    assert layout.unpack(rows)["0.weight"].shape == (3, 2, 3, 4)
    p = layout.parameter_views(rows[..., : layout.parameter_size])
    b = layout.buffer_views(rows[..., layout.parameter_size :])
    assert torch.equal(p["2.weight"], layout.unpack(rows)["2.weight"])
    assert torch.equal(b["1.running_var"], layout.unpack(rows)["1.running_var"])


def test_a_net_on_a_row_computes_what_the_net_computes():
    net = with_everything()
    layout = Layout(net)
    x = torch.randn(6, 4)
    net.eval()
    row = layout.pack(net)
    size = layout.parameter_size
    bound = layout.bind(layout.parameter_views(row[:size]), layout.buffer_views(row[size:]))
    assert torch.equal(bound.logits(x), net(x))


def test_training_moves_the_bound_nets_buffers_and_nothing_else():
    net = with_everything()
    layout = Layout(net)
    row = layout.pack(net)
    before = row.clone()
    size = layout.parameter_size
    net.train()
    bound = layout.bind(layout.parameter_views(row[:size]), layout.buffer_views(row[size:]))
    x = torch.randn(6, 4)
    bound.logits(x)
    expected = 0.9 * torch.zeros(3) + 0.1 * net[0](x).mean(0)
    assert torch.allclose(bound.buffers["1.running_mean"], expected, atol=1e-6)
    assert torch.equal(row, before)
    assert torch.equal(layout.pack(net), before)
    assert int(net[1].num_batches_tracked) == 0


def test_tied_weights_are_one_place_in_the_row():
    net = Tied()
    layout = Layout(net)
    assert layout.size == 24
    row = torch.randn(24)
    x = torch.randn(2, 4)
    a, b = row[:12].view(3, 4), row[12:].view(4, 3)
    out = layout.bind(layout.parameter_views(row), {}).logits(x)
    assert torch.allclose(out, x @ a.T @ b.T @ a.T, atol=1e-5)


def test_a_net_in_two_parts_can_be_split():
    from fedcat.models.nets import NETS

    net = NETS.get("digits-cnn")((1, 8, 8), 10)
    layout = Layout(net)
    bound = layout.bind(layout.parameter_views(layout.pack(net)), {})
    x = torch.randn(3, 1, 8, 8)
    assert bound.features(x).shape == (3, 64)
    assert torch.equal(bound.head(bound.features(x)), bound.logits(x))


def test_parts_that_share_a_weight_see_the_rows_weight():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.into = nn.Linear(5, 3, bias=False)
            self.head = nn.Linear(3, 5, bias=False)
            self.out = nn.Linear(5, 3, bias=False)
            self.out.weight = self.into.weight

        def features(self, x):
            return self.into(x)

        def forward(self, x):
            return self.head(self.features(x))

    layout = Layout(Shared())
    row = torch.randn(layout.size)
    bound = layout.bind(layout.parameter_views(row), {})
    x = torch.randn(2, 5)
    assert torch.allclose(bound.features(x), x @ row[:15].view(3, 5).T, atol=1e-6)
    assert torch.allclose(bound.head(bound.features(x)), bound.logits(x))
    other = torch.randn(layout.size)
    assert torch.allclose(bound.at(other).features(x), x @ other[:15].view(3, 5).T, atol=1e-6)


def test_a_buffer_that_is_assigned_anew_moves_too():
    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return self.layer(x - self.mean)

    layout = Layout(Moving())
    row = layout.pack(layout.net)
    bound = layout.bind(layout.parameter_views(row[:6]), layout.buffer_views(row[6:]))
    bound.logits(torch.ones(3, 2))
    bound.logits(torch.ones(3, 2))
    assert torch.allclose(bound.buffers["mean"], torch.full((2,), 0.19))
    assert torch.equal(layout.pack(layout.net), row)


def test_statistics_that_need_a_counter_are_refused():
    with pytest.raises(SettingError, match="'0' averages over all batches so far"):
        Layout(nn.Sequential(nn.BatchNorm1d(3, momentum=None)))


def test_a_net_without_parts_says_what_is_missing():
    layout = Layout(Tied())
    with pytest.raises(SettingError, match="Tied has no part 'features'"):
        layout.bind(layout.parameter_views(layout.pack(layout.net)), {}).features(torch.zeros(1, 4))


def test_a_net_with_nothing_to_train_is_refused():
    with pytest.raises(SettingError, match="nothing to train"):
        Layout(nn.Linear(2, 2).requires_grad_(False))


def test_complex_parameters_are_refused():
    with pytest.raises(SettingError, match="'weight' is not real"):
        Layout(nn.Linear(2, 2, dtype=torch.complex64))
