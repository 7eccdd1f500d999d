import pytest
import torch
from helpers import apart, drive, federation, layout_of, simulate, small_net

from fedcat.core.errors import SettingError
from fedcat.methods import FedAvg
from fedcat.methods.fedprox import FedProx, ProximalRule

FED = federation([3, 9, 5, 12, 7, 4])


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_pull_it_is_fedavg_bit_for_bit(engine, dtype):
    layout = layout_of(small_net(), dtype)
    words = {"rounds": 5, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}
    plain, prox = (
        simulate(FedAvg, FED, layout, engine, **words),
        simulate(FedProx, FED, layout, engine, options={"mu": 0.0}, **words),
    )
    drive(plain)
    drive(prox)
    assert torch.equal(plain.method.row, prox.method.row)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_stronger_the_pull_the_nearer_to_the_start(momentum, record_figure):
    layout = layout_of(small_net())
    ways = []
    for mu in (0.0, 0.01, 0.1, 1.0, 3.0, 10.0):
        sim = simulate(FedProx, FED, layout, "stacked", epochs=20, lr=0.02, momentum=momentum, options={"mu": mu})
        jobs = sim.plan()
        ways.append([apart(r.end, hop.start) for (_, hop), r in zip(jobs, sim.engine.train(jobs), strict=True)])
    for nearer, further in zip(ways[1:], ways, strict=False):
        assert all(a < b for a, b in zip(nearer, further, strict=True))
        assert max(nearer) < max(further)
    assert max(ways[-1]) < 0.5 * min(ways[0])
    record_figure(f"FedProx, momentum {momentum}: way with mu = 10 over way without", ways[-1][0] / ways[0][0], 0.5)


def test_the_term_is_half_mu_times_the_squared_distance():
    """The gradient is that of the loss plus mu/2 * ||w - start||^2: sign, square and half are right."""
    layout = layout_of(small_net())
    start = layout.pack(layout.net)
    p = (start + torch.linspace(-1, 1, len(start), dtype=torch.float64)).requires_grad_()
    term = 0.3 / 2 * (p - start).norm() ** 2
    (wanted,) = torch.autograd.grad(term, p)
    found = ProximalRule(0.3).gradient(torch.zeros_like(start)[None], p.detach()[None], start[None], {}, {})
    assert torch.allclose(found[0], wanted, atol=1e-14)


def test_it_passes_through_the_momentum_buffer():
    """Two steps by hand: v = b * v + (g + mu * (p - start))."""
    fed = federation([4])
    layout = layout_of(small_net())
    words = {"k": 1, "epochs": 2, "batch_size": 4, "lr": 0.1, "momentum": 0.9}
    start = layout.pack(layout.net)
    x, y = fed.train.inputs(torch.from_numpy(fed.indices(0)), torch.float64), fed.train.y[fed.indices(0)]
    p, v = start.clone(), torch.zeros_like(start)
    for _ in range(2):
        leaf = p.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(layout.bind(layout.parameter_views(leaf), {}).logits(x), y)
        (g,) = torch.autograd.grad(loss + 0.7 / 2 * (leaf - start).square().sum(), leaf)
        v = 0.9 * v + g
        p = p - 0.1 * v
    sim = simulate(FedProx, fed, layout, options={"mu": 0.7}, rounds=1, **words)
    drive(sim)
    assert apart(sim.method.row, p) < 1e-12


@pytest.mark.parametrize("mu", [-1.0, float("nan"), float("inf")])
def test_a_pull_that_is_none_is_refused(mu):
    with pytest.raises(SettingError, match="mu must be at least 0"):
        simulate(FedProx, FED, layout_of(small_net()), options={"mu": mu})
