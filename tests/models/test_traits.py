import numpy as np
import pytest
import torch
from helpers import DEVICES, Attention, federation, layout_of
from torch import nn
from torch.nn import functional

from fedcat.data.pool import Pool
from fedcat.models.traits import traits


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        out = self.layer(x.flatten(1))
        return out if out.sum() > 0 else -out


def flat(*layers):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), *layers, nn.Linear(6, 10))


@pytest.fixture
def pool():
    return federation([5, 5]).train


@pytest.mark.parametrize("device", DEVICES)
def test_a_plain_net_stacks(pool, device):
    found = traits(layout_of(flat(nn.ReLU()), device=device), pool.to(torch.device(device)))
    assert (found.unstackable, found.mixes_samples, found.refuses_one) == ("", False, False)
    assert found.flops == 2 * (64 * 6 + 6 * 10)


def test_batch_normalisation_mixes_samples_and_refuses_one(pool):
    found = traits(layout_of(flat(nn.BatchNorm1d(6))), pool)
    assert (found.unstackable, found.mixes_samples, found.refuses_one) == ("", True, True)


def test_batch_normalisation_is_seen_in_the_call_whatever_the_samples_are():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x):
            return functional.batch_norm(self.layer(x.flatten(1)), None, None, training=True)

    equal = Pool(np.zeros((6, 1, 8, 8), np.uint8), np.zeros(6, np.int64))  # nothing shows that samples are mixed
    for net in (flat(nn.BatchNorm1d(6)), Functional()):
        assert traits(layout_of(net), equal).batch_norm
    assert not traits(layout_of(flat(nn.GroupNorm(2, 6))), equal).batch_norm


def test_group_normalisation_does_neither(pool):
    found = traits(layout_of(flat(nn.GroupNorm(2, 6))), pool)
    assert (found.unstackable, found.mixes_samples, found.refuses_one) == ("", False, False)


def test_dropout_cannot_be_stacked(pool):
    assert "draws random numbers" in traits(layout_of(flat(nn.Dropout(0.5))), pool).unstackable


def test_a_net_that_runs_in_one_precision_only_is_tried_in_that():
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x):
            assert x.dtype == torch.float32
            return self.layer(x.flatten(1))

    layout = layout_of(Narrow(), torch.float32)
    found = traits(layout, federation([5, 5]).train)
    assert (found.unstackable, found.mixes_samples) == ("", False)


def test_a_branch_on_values_cannot_be_stacked(pool):
    assert traits(layout_of(Branching()), pool).unstackable.startswith("torch.vmap cannot run it: ")


def test_gradients_are_compared_too():
    """The gradient of a padding index is left out by the layer itself, which stacked weights do not do."""
    tokens = Pool(np.arange(40).reshape(8, 5) % 7, np.zeros(8, int))
    net = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(20, 3))
    assert "gradients" in traits(layout_of(net), tokens).unstackable
    plain = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 3))
    assert traits(layout_of(plain), tokens).unstackable == ""


def test_looking_at_a_net_leaves_it_and_the_random_numbers_alone(pool):
    net = flat(nn.BatchNorm1d(6), nn.Dropout(0.5)).double()
    layout = layout_of(net)
    before = layout.pack(net)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    traits(layout, pool)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(layout.pack(net), before)


class Contiguous(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 3, 3)

    def forward(self, x):
        assert x.is_contiguous()
        return self.layer(x).flatten(1)


def test_a_net_that_insists_on_how_its_values_lie_gets_them_so():
    images = Pool(np.zeros((8, 2, 5, 5)), np.zeros(8, np.int64))
    assert not traits(layout_of(Contiguous()), images).channels_last
    assert traits(layout_of(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten())), images).channels_last


@pytest.mark.parametrize("frozen", [False, True])
def test_the_operations_of_attention_are_counted(frozen):
    length, width, inner = 8, 8, 16
    products = length * width * 4 * width + 2 * length * length * width + 2 * length * width * inner + width * 10
    found = traits(layout_of(Attention().train(not frozen), torch.float32), federation([8]).train)
    assert found.flops == 2 * products


def test_batch_normalization_of_other_things_than_the_batch_is_not_stacked(pool):
    """Its batches cannot be padded, because what pads them would count."""

    class ByTime(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(64, 10)

        def forward(self, x):
            return self.head(self.norm(x.reshape(-1, 8)).reshape(len(x), -1))

    assert "other ways than batch normalization" in traits(layout_of(ByTime()), pool).unstackable
