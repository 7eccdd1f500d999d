"""The theorem: the problem's constants against brute force, the bound by hand, and a short measurement."""

import math

import numpy as np
import pytest
import torch

from fedcat.paper.theorem import (
    BATCH,
    CLIENTS,
    L2,
    SAMPLES,
    WINDOW,
    Constants,
    Measured,
    Problem,
    measure,
    theorem_sheets,
)

CONSTANTS = Constants(
    smoothness=4.0, convexity=0.5, steps=3, copies=2, distance=2.0, heterogeneity=0.25, gradient=9.0, variance=1.0
)


@pytest.fixture(scope="module")
def problem():
    return Problem(3)


def test_the_bound_by_hand():
    assert CONSTANTS.gamma == 64  # 8 L / mu is more than K E
    assert (CONSTANTS.chain("FedAvg"), CONSTANTS.chain("FedCat, shuffled")) == (3, 6)
    b = 1.0 / 2 + 6 * 4 * 0.25 + 8 * 25 * 9.0
    expected = 4.0 / (0.5 * (64 + 36)) * (2 * b / 0.5 + 0.5 * 64 / 2 * 2.0)
    assert CONSTANTS.bound(36, 6) == pytest.approx(expected)
    assert CONSTANTS.bound(36, 3) < CONSTANTS.bound(36, 6)


def test_clients_of_equal_size(problem):
    assert problem.federation.sizes.tolist() == [SAMPLES] * CLIENTS
    assert SAMPLES % BATCH == 0


def test_the_minimum_is_one(problem):
    w, lowest = problem.minimum()
    w = w.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.value(w), w)
    assert gradient.norm() < 1e-6
    near = w.detach() + 1e-3 * torch.randn(w.shape, dtype=w.dtype, generator=torch.Generator().manual_seed(0))
    assert float(problem.value(near)) > lowest
    own = [problem.minimum(mine)[1] for mine in problem.mine]
    assert np.mean(own) < lowest


def test_the_hessian_lies_between_mu_and_l(problem):
    w = 0.1 * torch.randn(10, 65, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hessian = torch.func.hessian(lambda flat: problem.value(flat.view(10, 65), problem.mine[0]))(w.reshape(-1))
    values = torch.linalg.eigvalsh(hessian)
    assert values[0] >= L2 - 1e-9
    assert values[-1] <= problem.smoothness()


def test_mean_squares_of_batch_gradients_against_many_batches(problem):
    w = 0.1 * torch.randn(10, 65, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rng = np.random.default_rng(0)
    squares, variances = [], []
    for mine in problem.mine:
        whole = _gradient(problem, w, mine)
        found = [_gradient(problem, w, mine[rng.integers(SAMPLES, size=BATCH)]) for _ in range(400)]
        squares.append(np.mean([float((g**2).sum()) for g in found]))
        variances.append(np.mean([float(((g - whole) ** 2).sum()) for g in found]))
    square, variance = problem.gradients(w)
    assert square == pytest.approx(max(squares), rel=0.03)
    assert variance == pytest.approx(max(variances), rel=0.1)


def _gradient(problem, w, rows):
    w = w.clone().requires_grad_()
    return torch.autograd.grad(problem.value(w, rows), w)[0]


def test_a_row_of_the_net_is_the_matrix_of_the_problem(problem):
    net = problem.net().double()
    row = torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])
    x = problem.federation.train.inputs(torch.arange(5), torch.float64)
    assert torch.allclose(net(x), problem.x[:5] @ problem.matrix(row).T)


def test_a_short_measurement_stays_below_the_bound_and_falls():
    found = measure([3], rounds=30)
    assert measure([3], rounds=2).gaps["FedCat"][0] == pytest.approx(found.gaps["FedCat"][0][:2])  # the same start
    assert found.steps[0] == SAMPLES // BATCH
    assert found.steps[-1] == 30 * SAMPLES // BATCH
    for label, (gaps,) in found.gaps.items():
        chain = found.constants.chain(label)
        assert all(0 < gap < found.constants.bound(t, chain) for t, gap in zip(found.steps, gaps, strict=True))
        assert gaps[-1] < 0.3 * gaps[0]
    assert list(found.gaps) == ["FedAvg", "FedCat", "FedAvg, shuffled", "FedCat, shuffled"]
    assert found.gaps["FedCat"] != found.gaps["FedCat, shuffled"]
    assert math.isnan(found.slope("FedAvg"))  # 30 rounds do not reach the window
    constants, table = theorem_sheets(found)
    assert len(table.rows) == 36
    assert constants.rows[0][1] == f"{L2:.4g}"


def test_the_slope_is_fitted_in_the_window_alone():
    steps = [round(CONSTANTS.gamma * factor) for factor in (1, 5, 10, 20, 40, 80)]
    gaps = [5.0, 4.0, *(1000 / t**1.5 for t in steps[2:])]
    assert WINDOW[0] == 10
    assert Measured(CONSTANTS, steps, {"FedAvg": [gaps]}).slope("FedAvg") == pytest.approx(-1.5)
