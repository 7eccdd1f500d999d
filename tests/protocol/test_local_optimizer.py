"""Local optimizers: the algebra on rows against PyTorch's own, in both engines."""

import pytest
import torch
from helpers import DEVICES, apart, digits_net, drive, federation, layout_of, simulate
from hypothesis import given, settings
from hypothesis.strategies import floats, integers, sampled_from

import fedcat
from fedcat.core.errors import SettingError
from fedcat.methods import FedAvg, FedCat
from fedcat.protocol.local_optimizer import OPTIMIZERS, Adam, AdamW, Sgd, TorchOptimizer, make_optimizer

FED = federation([3, 9, 5, 12, 7, 4])


@given(
    optimizer=sampled_from([Sgd(), Adam(), AdamW(), Adam(0.5, 0.9, 1e-3), AdamW(0.0, 0.5)]),
    seed=integers(0, 1000),
    momentum=sampled_from([0.0, 0.5]),
    decay=sampled_from([0.0, 0.1]),
    lr=floats(1e-3, 1.0),
)
@settings(max_examples=40, deadline=None)
def test_rows_move_as_pytorchs_optimizer_moves_each(optimizer, seed, momentum, decay, lr):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    grads = torch.randn(5, 3, 4, generator=generator, dtype=torch.float64)
    alone = []
    for row in range(3):
        p = rows[row].clone().requires_grad_()
        theirs = optimizer.of([p], lr, momentum, decay)
        for g in grads[:, row]:
            p.grad = g.clone()
            theirs.step()
        alone.append(p.detach())
    state = [torch.zeros_like(rows) for _ in range(optimizer.slots)]
    columns = [torch.full((3, 1), value, dtype=torch.float64) for value in (lr, momentum, decay)]
    p = rows.clone()
    for step, g in enumerate(grads, start=1):
        given = columns if decay else [*columns[:2], None]
        p = optimizer.step(p, g.clone(), state, torch.tensor(step), *given)
    assert torch.allclose(p, torch.stack(alone), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", [Adam(), AdamW(0.8, 0.95)])
@pytest.mark.parametrize("method", [FedAvg, FedCat])
def test_the_engines_agree(method, optimizer, device):
    rows = []
    for engine in ("sequential", "stacked"):
        layout = layout_of(digits_net(), torch.float64, device)
        words = {"lr": 0.01, "weight_decay": 0.1, "clip": 1.0, "optimizer": optimizer}
        rows.append(drive(simulate(method, FED, layout, engine, k=3, rounds=3, **words)).method.row)
    plain = simulate(method, FED, layout_of(digits_net(), torch.float64, device), k=3, rounds=3, lr=0.01)
    assert apart(rows[1], rows[0]) < 1e-9
    assert apart(drive(plain).method.row, rows[0]) > 1e-3


def test_an_optimizer_is_fresh_at_every_hop():
    """Two rounds of one client: Adam's first step has the size of lr, in each of them."""
    one = federation([4])
    layout = layout_of(digits_net())
    run = simulate(FedAvg, one, layout, k=1, rounds=2, epochs=1, batch_size=4, lr=0.01, optimizer=Adam(eps=1e-12))
    before = run.method.row
    sizes = []
    while not run.done:
        run.absorb(run.engine.train(run.plan()))
        run.record({})
        moved = (run.method.row - before).abs()
        sizes.append(float(moved.max()))
        before = run.method.row
    assert sizes == pytest.approx([0.01, 0.01], rel=1e-3)


@pytest.mark.parametrize("name", ["torch.optim:RMSprop", "torch.optim:Adagrad", "torch.optim:NAdam"])
def test_any_class_of_pytorch_trains_one_client_after_another(name):
    words = {"dataset": "digits", "method": "fedavg", "rounds": 2, "epochs": 1, "lr": 0.003, "optimizer": name}
    with pytest.warns(UserWarning, match="only the optimizers named sgd, adam and adamw can be stacked"):
        result = fedcat.run(**words)
    assert result.summary.decisions.engine == "sequential"
    assert result.settings.optimizer == name
    with pytest.warns(UserWarning, match="engine sequential"):
        other = fedcat.run(**words, weight_decay=0.3)
    assert other.history[-1].loss != result.history[-1].loss


def test_options_reach_the_optimizer():
    words = {"dataset": "digits", "method": "fedavg", "rounds": 1, "epochs": 1, "lr": 0.003, "engine": "sequential"}
    by_name = fedcat.run(optimizer="adam", optimizer_beta1=0.5, **words)
    by_class = fedcat.run(optimizer=torch.optim.Adam, optimizer_options={"betas": (0.5, 0.999)}, **words)
    default = fedcat.run(optimizer="adam", **words)
    assert by_name.history[-1].loss == by_class.history[-1].loss != default.history[-1].loss
    assert by_name.settings.optimizer_options == {"beta1": 0.5, "beta2": 0.999, "eps": 1e-8}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "scaffold", "optimizer": "adam"}, "optimizer must be sgd for the method 'scaffold'"),
        ({"optimizer": "adam", "optimizer_beta2": 1.0}, "optimizer_beta2 must be at least 0 and below 1, got 1"),
        ({"optimizer": "adamm"}, "unknown optimizer 'adamm': did you mean 'adam'"),
        ({"optimizer": "torch.optim:RMSprop", "optimizer_options": {"lr": 1.0}}, "lr is a setting, not an option"),
        ({"optimizer": "torch.nn:Linear"}, "optimizer must be a name or a class of torch.optim"),
        ({"optimizer_beta1": 0.5}, "optimizer_beta1 needs optimizer adam or adamw"),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    with pytest.raises(SettingError, match=message):
        fedcat.run(dataset="digits", rounds=1, **given)


def test_numbers_whose_default_is_a_whole_one():
    words = {"dataset": "digits", "method": "fedavg", "rounds": 1, "epochs": 1, "engine": "sequential"}
    given = {"optimizer": "torch.optim:SGD", "optimizer_options": {"momentum": 0.5}, "lr": 0.05}
    theirs, ours = fedcat.run(**given, **words), fedcat.run(momentum=0.5, lr=0.05, **words)
    assert theirs.history[-1].loss == pytest.approx(ours.history[-1].loss, rel=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": torch.optim.LBFGS}, "evaluates the loss several times per step"),
        ({"optimizer": torch.optim.Adam, "optimizer_options": {"betas": (2.0, 0.9)}}, "cannot train: Invalid beta"),
    ],
)
def test_classes_that_cannot_train_clients_are_refused_before_the_first_round(given, message):
    with pytest.raises(SettingError, match=message):
        fedcat.run(dataset="digits", rounds=1, **given)


def test_a_rate_that_was_made_for_sgd_is_noted():
    with pytest.warns(UserWarning, match="lr 0.05 is meant for sgd, optimizer 'adam' may need another: set lr"):
        fedcat.run(dataset="digits", method="fedavg", optimizer="adam", rounds=1, epochs=1)


def test_one_method_of_a_comparison_may_have_its_own():
    found = fedcat.compare(
        ["fedavg", "scaffold"], 1, options={"fedavg": {"optimizer": "adam", "lr": 0.003}}, rounds=1, epochs=1
    )
    assert [variant.results[0].settings.optimizer for variant in found] == ["adam", "sgd"]


def test_adam_in_float32_is_pytorchs_also_for_a_slow_mean():
    p = torch.randn(1, 50)
    for beta2 in (0.999, 0.99999):
        optimizer = Adam(beta2=beta2)
        one = p[0].clone().requires_grad_()
        theirs, row, state = optimizer.of([one], 0.1, 0.0, 0.0), p.clone(), [torch.zeros_like(p) for _ in range(2)]
        for step in range(1, 4):
            g = torch.randn(50, generator=torch.Generator().manual_seed(step))
            one.grad = g.clone()
            theirs.step()
            row = optimizer.step(row, g[None].clone(), state, torch.tensor(step), p.new_tensor([[0.1]]), p, None)
        assert torch.allclose(row[0], one.detach(), rtol=1e-5, atol=1e-6)


def test_momentum_beside_another_optimizer_is_noted():
    with pytest.warns(UserWarning, match="momentum has no effect with the optimizer 'adam'"):
        fedcat.run(dataset="digits", method="fedavg", optimizer="adam", momentum=0.9, rounds=1, epochs=1)


def test_runs_with_different_optimizers_side_by_side_give_their_own_bits():
    words = {"dataset": "digits", "rounds": 3, "epochs": 1, "lr": 0.005, "exact": True}
    found = fedcat.compare(["fedavg"], 1, {"optimizer": ["sgd", "adam"]}, **words)
    for variant, name in zip(found, ("sgd", "adam"), strict=True):
        alone = fedcat.run(method="fedavg", optimizer=name, **words)
        assert variant.results[0].history[-1].metrics == alone.history[-1].metrics


def test_what_is_made():
    assert {name for name, _ in OPTIMIZERS} == {"sgd", "adam", "adamw"}
    assert make_optimizer("adam", Adam, {"eps": 0.1}) == Adam(eps=0.1)
    assert make_optimizer("x", torch.optim.RMSprop, {"alpha": 0.5}) == TorchOptimizer(
        torch.optim.RMSprop, (("alpha", 0.5),)
    )
