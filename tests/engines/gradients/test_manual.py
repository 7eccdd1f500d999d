"""Gradients that are written out by hand are autograd's."""

import numpy as np
import pytest
import torch
from helpers import apart, digits_net, drive, federation, layout_of, simulate, small_net
from torch import nn

from fedcat.data.pool import Pool
from fedcat.engines import StackedEngine, make
from fedcat.engines.gradients.base import Step
from fedcat.engines.gradients.chain import chain_of
from fedcat.engines.gradients.manual import ManualGradients, manual_gradients
from fedcat.engines.gradients.trials import trial_step
from fedcat.engines.gradients.vmap import VmapGradients
from fedcat.methods import FedAvg, FedCat, FedGen, FedProx, Scaffold
from fedcat.models.nets import CenterCrop

NETS = {
    "digits": digits_net,
    "no pooling": lambda: nn.Sequential(nn.Conv2d(1, 3, 3, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(300, 10)),
    "no ReLU": lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 10)),
    "no bias": lambda: nn.Sequential(
        *(nn.Conv2d(1, 4, 3, bias=False), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(4, 3, 2, bias=False)),
        *(nn.Flatten(), nn.Linear(12, 20, bias=False), nn.ReLU(), nn.Linear(20, 10, bias=False)),
    ),
    "odd sides, twice": lambda: nn.Sequential(
        *(nn.Conv2d(1, 20, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 5, 1), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(5, 10)),
    ),
    "crop": lambda: nn.Sequential(
        *(CenterCrop(6), nn.Conv2d(1, 17, 3, padding=1), nn.ReLU(), nn.Conv2d(17, 3, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(108, 10)),
    ),
    "linear only": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10)),
}


def pool_of(shape=(1, 8, 8), seed=0, **words):
    rng = np.random.default_rng(seed)
    return Pool(rng.integers(256, size=(40, *shape), dtype=np.uint8), rng.integers(10, size=40), **words)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NETS)
def test_gradients_are_those_of_autograd(name, dtype):
    torch.manual_seed(0)
    pool, layout = pool_of(), layout_of(NETS[name](), dtype)
    made = ManualGradients(layout, pool, chain_of(layout, pool))
    step = trial_step(made, 3, 5)
    (losses, mine, _), (right_losses, right, _) = made.of(step), VmapGradients(layout, pool).of(step)
    assert apart(mine, right) < (1e-14 if dtype == torch.float64 else 1e-6)
    assert apart(losses, right_losses) < (1e-14 if dtype == torch.float64 else 1e-6)


def test_of_equal_values_in_a_window_the_first_wins():
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 20, 1), nn.ReLU(), nn.Conv2d(20, 4, 1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()),
        nn.Linear(64, 10),
    )
    layout = layout_of(net)
    pool = Pool(np.random.default_rng(0).integers(2, size=(40, 1, 8, 8)).astype(float), np.arange(40) % 10)
    made = ManualGradients(layout, pool, chain_of(layout, pool))
    step = trial_step(made, 2, 6)
    assert apart(made.of(step)[1], VmapGradients(layout, pool).of(step)[1]) < 1e-14


def test_samples_that_do_not_count_change_nothing():
    pool, layout = pool_of(), layout_of(digits_net())
    made = ManualGradients(layout, pool, chain_of(layout, pool))
    step = trial_step(made, 2, 5)
    losses, g, _ = made.of(step)
    few, few_g, _ = made.of(Step(step.p[:1], step.buffers[:1], step.index[:1, :3], padded=False))
    assert apart(g[0], few_g[0]) < 1e-14
    assert torch.allclose(losses[:1], few, rtol=1e-14)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("method", [FedAvg, FedCat, FedProx, Scaffold])
def test_training_by_hand_agrees_with_the_sequential_engine(method, exact):
    rows = []
    for engine in ("sequential", "stacked"):
        words = {"rounds": 3, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}
        sim = simulate(method, federation([3, 9, 5, 12, 7]), layout_of(digits_net()), engine, exact=exact, **words)
        drive(sim)
        rows.append(sim.method.row)
    assert sim.engine.kernels(sim.task) == "hand-written gradients"
    assert apart(*rows) < 1e-12


def test_what_goes_without():
    layout, pool = layout_of(digits_net(), torch.float32), pool_of()
    assert isinstance(manual_gradients(layout, pool, 10), ManualGradients)
    assert manual_gradients(layout, pool, 10_000) is None
    assert manual_gradients(layout_of(small_net()), pool, 10) is None
    large = nn.Sequential(nn.Flatten(), nn.Linear(64, 4000), nn.ReLU(), nn.Linear(4000, 10))
    assert manual_gradients(layout_of(large), pool, 1) is None
    norm = nn.Sequential(nn.Conv2d(1, 4, 3), nn.LocalResponseNorm(3), nn.Flatten(), nn.Linear(144, 10))
    assert manual_gradients(layout_of(norm), pool, 10) is None
    sim = simulate(FedGen, federation([4, 4, 4]), layout, make("stacked"), rounds=1)
    assert sim.engine.kernels(sim.task) == "torch.vmap"


def test_nothing_is_kept_after_a_step():
    layout, pool = layout_of(digits_net()), pool_of()
    made = manual_gradients(layout, pool, 10)
    held = [name for layer in made.layers for name, value in vars(layer).items() if isinstance(value, torch.Tensor)]
    assert held == []


def test_gradients_that_differ_are_not_used(monkeypatch):
    gradients = ManualGradients.gradients

    def wrong(self, *given):
        losses, g = gradients(self, *given)
        return losses, g * 1.1

    monkeypatch.setattr(ManualGradients, "gradients", wrong)
    layout, pool = layout_of(digits_net()), pool_of()
    with pytest.warns(UserWarning, match="hand-written gradients cannot be used .its gradients differ"):
        assert manual_gradients(layout, pool, 10) is None
    assert manual_gradients(layout, pool, 10) is None


def test_one_window_whose_winner_differs_does_not_count(monkeypatch):
    gradients, calls = ManualGradients.gradients, []

    def wrong_once(self, *given):
        calls.append(1)
        losses, g = gradients(self, *given)
        return losses, g * (1.1 if len(calls) == 1 else 1.0)

    monkeypatch.setattr(ManualGradients, "gradients", wrong_once)
    assert manual_gradients(layout_of(digits_net()), pool_of(), 10) is not None
    assert len(calls) == 2


def test_exact_bits_do_not_depend_on_what_is_beside():
    layout, fed = layout_of(digits_net(), torch.float32), federation([8] * 9)
    rows = []
    for count in (1, 2, 7):
        engine = StackedEngine(exact=True)
        sims = [simulate(FedAvg, fed, layout, engine, rounds=2, seed=s, exact=True) for s in reversed(range(count))]
        for _ in range(2):
            replies = engine.train([job for sim in sims for job in sim.plan()])
            for sim in sims:
                own, replies = replies[:3], replies[3:]
                sim.absorb(own)
                sim.record({})
        rows.append(sims[-1].method.row)
        assert engine.kernels(sims[-1].task) == "hand-written gradients"
    assert all(torch.equal(row, rows[0]) for row in rows)
