"""Batch normalization of a padded batch is that of its real samples."""

import pytest
import torch
from helpers import apart
from torch.func import vmap
from torch.nn import functional

from fedcat.core.errors import SettingError
from fedcat.models.batch_norm import masked_batch_norm

REAL = (4, 6)


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (6, 3, 2, 4)])
def test_values_gradients_and_running_statistics_are_those_of_the_real_samples(shape):
    torch.manual_seed(0)
    x, w, b, mean, var = (torch.rand(2, *part, dtype=torch.float64) for part in (shape, *[(3,)] * 4))
    mask = (torch.arange(6) < torch.tensor(REAL)[:, None]).double()

    def padded(x, w, b, mean, var, mask):
        mean, var = mean.clone(), var.clone()
        with masked_batch_norm(mask):
            y = functional.batch_norm(x, mean, var, w, b, training=True)
        return (y**3 * mask.view(-1, *[1] * (y.dim() - 1))).sum(), mean.detach(), var.detach()

    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    losses, means, variances = vmap(padded)(*leaves, mean, var, mask)
    found = torch.autograd.grad(losses.sum(), leaves)
    plain = [t.clone().requires_grad_() for t in (x, w, b)]
    total = torch.zeros((), dtype=torch.float64)
    for row, real in enumerate(REAL):
        y = functional.batch_norm(
            plain[0][row, :real], mean[row], var[row], plain[1][row], plain[2][row], training=True
        )
        total = total + (y**3).sum()
        assert apart(means[row], mean[row]) < 1e-14
        assert apart(variances[row], var[row]) < 1e-14
    for mine, right in zip(found, torch.autograd.grad(total, plain), strict=True):
        assert apart(mine, right) < 1e-13


def test_evaluation_is_left_alone():
    x, mean, var = torch.rand(4, 3), torch.rand(3), torch.rand(3)
    right = functional.batch_norm(x, mean, var)
    with masked_batch_norm(torch.tensor([1.0, 1, 0, 0])):
        assert torch.equal(functional.batch_norm(x, mean, var), right)


def test_several_versions_of_a_batch_are_padded_alike():
    torch.manual_seed(0)
    x, weight, bias = torch.rand(4, 3), torch.rand(3), torch.rand(3)
    mask = torch.tensor([1.0, 1, 1, 0])
    with masked_batch_norm(mask):
        both = functional.batch_norm(torch.cat([x, 2 * x]), None, None, weight, bias, training=True)
    real = functional.batch_norm(torch.cat([x[:3], 2 * x[:3]]), None, None, weight, bias, training=True)
    assert apart(both[mask.repeat(2) > 0], real) < 1e-6


def test_samples_that_are_no_batch_are_refused_with_the_remedy():
    with (
        masked_batch_norm(torch.tensor([1.0, 1, 0, 0])),
        pytest.raises(SettingError, match=r'gave 6 samples .* a batch has 4: .* engine="sequential"'),
    ):
        functional.batch_norm(torch.rand(6, 3), None, None, training=True)
