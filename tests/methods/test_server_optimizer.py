import pytest
import torch
from helpers import (
    apart,
    drive,
    federation,
    layout_of,
    simulate,
    small_net,
    step,
)
from torch import nn

import fedcat
from fedcat.config.layers import SettingsFile
from fedcat.config.resolve import resolve
from fedcat.core.errors import SettingError
from fedcat.core.options import options as options_of
from fedcat.methods import METHODS, FedAvg, FedCat
from fedcat.methods.average import weighted_mean
from fedcat.methods.base import declared
from fedcat.methods.cyclic import Cyclic
from fedcat.methods.fedcluster import FedCluster
from fedcat.methods.fedopt import FedAdam, FedAvgM
from fedcat.methods.scaffold import Scaffold
from fedcat.methods.server_optimizer import (
    SERVER_OPTIMIZERS,
    Adam,
    Mean,
    Momentum,
    ServerOptimizer,
    ServerOptimizerChoice,
)
from fedcat.runs.build import Builder
from fedcat.runs.comparison import Comparison

FED = federation([3, 9, 5, 12, 7, 4])
SHORT = {"dataset": "digits", "rounds": 3, "epochs": 1, "evaluate_every": 1}


def stream(step, count=5, size=4):
    """Return the rows of a step whose means lie in random directions, and the changes that it was given."""
    torch.manual_seed(0)
    rows, changes = [torch.randn(size).double()], []
    for _ in range(count):
        changes.append(torch.randn(size).double())
        rows.append(step.step(rows[-1], rows[-1] + changes[-1]))
    return rows, changes


def test_the_mean_itself_bit_for_bit_and_a_share_of_the_way():
    row, mean = torch.randn(7), torch.randn(7)
    assert torch.equal(Mean().step(row, mean), mean)
    assert torch.allclose(Mean(0.5).step(row, mean), (row + mean) / 2)


def test_momentum_is_sgd_with_momentum_on_the_negative_change():
    rows, changes = stream(Momentum(lr=0.3, momentum=0.8))
    leaf = rows[0].clone().requires_grad_()
    theirs = torch.optim.SGD([leaf], lr=0.3, momentum=0.8)
    for row, change in zip(rows[1:], changes, strict=True):
        leaf.grad = -change
        theirs.step()
        assert torch.allclose(row, leaf.detach(), atol=1e-14)


def test_adam_by_hand():
    rows, changes = stream(Adam(lr=0.1, momentum=0.9, beta2=0.99, tau=1e-3))
    for i in range(4):
        m, v = 0.0, 1e-6
        for row, after, change in zip(rows, rows[1:], changes, strict=False):
            d = float(change[i])
            m, v = 0.9 * m + 0.1 * d, 0.99 * v + 0.01 * d * d
            assert float(after[i]) == pytest.approx(float(row[i]) + 0.1 * m / (v**0.5 + 1e-3), rel=1e-12)


@pytest.mark.parametrize("make", [Mean, lambda: Mean(0.3), Momentum, Adam])
def test_a_restored_step_goes_on_as_if_nothing_had_happened(make):
    whole, first, second = make(), make(), make()
    rows = stream(whole, 6)[0]
    assert first.state() == {}
    torch.manual_seed(0)
    row, changes = torch.randn(4).double(), [torch.randn(4).double() for _ in range(6)]
    second.restore(first.state())
    for change in changes[:3]:
        row = first.step(row, row + change)
    second.restore(first.state())
    for change in changes[3:]:
        row = second.step(row, row + change)
    assert torch.equal(row, rows[-1])


def test_options_and_their_defaults():
    assert {name: options_of(SERVER_OPTIMIZERS.get(name)) for name, _ in SERVER_OPTIMIZERS} == {
        "adam": {"lr": 0.01, "momentum": 0.9, "beta2": 0.99, "tau": 1e-3},
        "mean": {"lr": 1.0},
        "momentum": {"lr": 1.0, "momentum": 0.9},
    }


def test_adams_first_step_starts_from_no_momentum_and_from_tau_squared():
    found = Adam(lr=1.0, momentum=0.5, beta2=0.75, tau=0.1).step(torch.zeros(1), torch.ones(1))
    assert found.item() == pytest.approx(0.5 / ((0.75 * 0.01 + 0.25) ** 0.5 + 0.1))


def test_a_step_starts_from_the_global_row_of_the_round_before():
    """Momentum that is set to zero, and a step of one, is the mean."""
    row, mean = torch.randn(5), torch.randn(5)
    assert torch.allclose(Momentum(momentum=0.0).step(row, mean), mean)
    step = Momentum(lr=0.5, momentum=0.0)
    for _ in range(3):
        assert torch.allclose(step.step(row, mean), (row + mean) / 2)


@pytest.mark.parametrize(
    ("choice", "default", "message"),
    [
        (ServerOptimizerChoice("adam"), None, "server_optimizer cannot be set: the method M takes no"),
        (ServerOptimizerChoice(options={"lr": 1.0}), None, "server_lr cannot be set: the method M takes no"),
        (ServerOptimizerChoice("adam"), "momentum", "server_optimizer must be 'momentum' or left out for the method M"),
        (ServerOptimizerChoice("mean"), "momentum", "server_optimizer must be 'momentum' or left out for the method M"),
        (ServerOptimizerChoice("own", factory=3), "mean", "server_optimizer must be a name, a class or a function"),
        (ServerOptimizerChoice("mean", {"tau": 1.0}), "mean", "unknown option of mean .server_tau."),
    ],
)
def test_choices_that_a_method_does_not_take(choice, default, message):
    with pytest.raises(SettingError, match=message):
        choice.make(default, "M")


def test_choices_that_a_method_takes():
    assert type(ServerOptimizerChoice().make(None, "M")) is Mean
    assert type(ServerOptimizerChoice().make("adam", "M")) is Adam
    assert type(ServerOptimizerChoice("adam").make("adam", "M")) is Adam
    assert type(ServerOptimizerChoice("momentum").make("mean", "M")) is Momentum
    assert ServerOptimizerChoice("momentum", {"lr": 3}).make("mean", "M").lr == 3.0


@pytest.mark.parametrize(("method", "step"), [(FedAvgM, Momentum), (FedAdam, Adam)])
def test_the_named_methods_are_fedavg_with_that_step(method, step):
    layout = layout_of(small_net())
    named, built = (
        simulate(method, FED, layout, rounds=4),
        simulate(FedAvg, FED, layout, rounds=4, server_optimizer=step()),
    )
    plain = simulate(FedAvg, FED, layout, rounds=4)
    for sim in (named, built, plain):
        drive(sim)
    assert torch.equal(named.method.row, built.method.row)
    assert apart(named.method.row, plain.method.row) > 1e-3


@pytest.mark.parametrize(
    "name", [name for name, _ in METHODS if declared(METHODS.get(name), "default_server_optimizer", "") is not None]
)
@pytest.mark.parametrize("make", [lambda: Mean(0.5), Momentum, Adam])
def test_every_averaging_method_takes_every_step(name, make):
    """The first step of a method with a server's step is that step from the start to the method's own mean."""
    torch.manual_seed(0)
    layout = layout_of(fedcat.NETS.get("digits-cnn")((1, 8, 8), 10))
    options = {"fedcluster": {"clusters": 1}}.get(name, {})

    def made(server):
        return simulate(METHODS.get(name), FED, layout, options=options, rounds=6, server_optimizer=server)

    plain, stepped = made(Mean()), made(make())
    start = plain.method.row
    while torch.equal(plain.method.row, start):
        step(plain)
        step(stepped)
    assert torch.allclose(stepped.method.row, make().step(start, plain.method.row), atol=1e-13)
    drive(plain)
    drive(stepped)
    assert apart(stepped.method.row, plain.method.row) > 1e-6


def test_every_stage_of_a_round_takes_the_step():
    layout = layout_of(small_net())
    sim = simulate(FedCluster, FED, layout, k=4, rounds=1, options={"clusters": 2}, server_optimizer=Mean(0.5))
    for _ in range(2):
        before = sim.method.row
        jobs = sim.plan()
        replies = sim.engine.train(jobs)
        sim.absorb(replies)
        mean = weighted_mean(torch.stack([r.end for r in replies]), [r.samples for r in replies])
        assert torch.allclose(sim.method.row, (before + mean) / 2, atol=1e-14)


def test_buffers_are_averaged_whatever_the_step():
    """Running variances must not be moved by momentum or divided by roots."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 10))
    layout = layout_of(net)
    size = layout.parameter_size
    sims = [simulate(FedAvg, FED, layout, rounds=1, server_optimizer=server) for server in (Mean(), Adam(lr=0.5))]
    for sim in sims:
        drive(sim)
    a, b = (sim.method.row for sim in sims)
    assert torch.equal(a[size:], b[size:])
    assert not torch.allclose(a[:size], b[:size])


def test_a_round_in_which_nobody_came_back_moves_nothing():
    sim = simulate(FedAvgM, FED, layout_of(small_net()), rounds=4, bound=None)
    step(sim)
    before = sim.method.row
    jobs = sim.plan()
    sim.absorb([fedcat.Reply.lost(hop, fedcat.Status.FAILED, "gone") for _, hop in jobs])
    assert torch.equal(sim.method.row, before)


def test_scaffolds_global_step_size_is_the_servers():
    layout = layout_of(small_net())
    sims = [simulate(Scaffold, FED, layout, rounds=1, server_optimizer=server) for server in (Mean(), Mean(0.25))]
    start = sims[0].method.row
    for sim in sims:
        drive(sim)
    whole, quarter = (sim.method.row - start for sim in sims)
    assert torch.allclose(quarter, whole / 4, atol=1e-14)
    assert torch.equal(sims[0].method.control, sims[1].method.control)


def test_settings_choose_the_step_and_leave_its_defaults_to_it(tmp_path):
    """What was not given is not written, so that a run's file can be taken up with another method or step."""
    fedcat.run(method="fedavgm", out=tmp_path / "m", **SHORT)
    text = (tmp_path / "m" / "settings.toml").read_text()
    assert 'server_optimizer = ""' in text
    assert "server_options" not in text
    found = Builder().build({**SHORT, "method": "fedcat", "server_optimizer": "adam", "server_tau": 0.01})
    assert (found.settings.server_optimizer, found.settings.server_options) == ("adam", {"tau": 0.01})
    step = found.method.server_optimizer
    assert (step.lr, step.momentum, step.beta2, step.tau) == (0.01, 0.9, 0.99, 0.01)
    step = Builder().build({**SHORT, "method": "fedavgm", "server_momentum": 0.5}).method.server_optimizer
    assert (type(step), step.lr, step.momentum) == (Momentum, 1.0, 0.5)


def wrapped(context):
    return FedAvgM(context)


def test_a_comparison_says_which_methods_do_not_take_a_setting():
    ready = Comparison(["fedavg", "fedavgm", "cyclic"], 1, server_optimizer="adam", server_lr=0.1, **SHORT)
    for name in ("fedavgm", "cyclic"):
        assert f"server_lr, server_optimizer not used by {name}, see `fedcat methods`" in ready.notes
    assert len(ready.notes) == 2


def test_what_a_file_says_of_no_step_is_nothing():
    """A run's settings.toml holds an empty name, which concerns nobody."""
    assert Comparison(["fedavg", "fedavgm", "cyclic"], 1, server_optimizer="", **SHORT).notes == []
    assert Comparison(["cyclic"], 1, server_optimizer="", **SHORT).notes == []
    assert Comparison(["fedavgm"], 1, server_optimizer="momentum", **SHORT).notes == []


def test_a_file_leaves_its_server_settings_behind_for_another_method_or_optimizer(tmp_path):
    fedcat.run(method="fedavg", server_optimizer="momentum", server_lr=0.5, out=tmp_path / "a", **SHORT)
    file = tmp_path / "a" / "settings.toml"

    def resolved(**given):
        found = resolve(given, SettingsFile.read(file))
        return found.settings.server_optimizer, found.settings.server_options, found.notes

    ignored = f"ignored from {file}, which sets them for another method or optimizer"
    assert resolved() == ("momentum", {"lr": 0.5}, ())
    assert resolved(server_lr=0.25)[:2] == ("momentum", {"lr": 0.25})
    assert resolved(method="cyclic") == ("", {}, (f"{ignored}: server_optimizer, server_lr",))
    assert resolved(server_optimizer="adam") == ("adam", {}, (f"{ignored}: server_lr",))


def test_a_method_that_a_function_makes_has_its_own_step():
    assert type(Builder().build({**SHORT, "method": wrapped}).method.server_optimizer) is Momentum


def test_a_comparison_gives_server_settings_to_the_methods_that_take_them():
    def steps(methods, sweep=None, **given):
        ready = Comparison(methods, 1, sweep, **SHORT, **given)
        return {
            label: (
                type(p.method.server_optimizer).__name__,
                getattr(p.method.server_optimizer, "momentum", None),
            )
            for label, p in zip(ready.labels, ready.runs, strict=True)
        }

    assert steps(["fedavg", "fedavgm"], server_momentum=0.5) == {"fedavg": ("Mean", None), "fedavgm": ("Momentum", 0.5)}
    assert steps(["fedavg", "fedavgm"], {"server_momentum": [0.5, 0.8]}) == {
        "fedavg": ("Mean", None),
        "fedavgm server_momentum=0.5": ("Momentum", 0.5),
        "fedavgm server_momentum=0.8": ("Momentum", 0.8),
    }
    assert steps(["fedavg", "fedavgm", "cyclic"], {"server_optimizer": ["mean", "momentum"]}) == {
        "fedavg server_optimizer=mean": ("Mean", None),
        "fedavg server_optimizer=momentum": ("Momentum", 0.9),
        "fedavgm": ("Momentum", 0.9),
        "cyclic": ("Mean", None),
    }
    assert len(steps(["fedavg"], {"server_optimizer": ["momentum", "adam"], "server_tau": [0.001, 0.01]})) == 3
    assert steps(["fedavg", "fedavgm"], server_optimizer="adam", server_momentum=0.5) == {
        "fedavg": ("Adam", 0.5),
        "fedavgm": ("Momentum", 0.9),
    }
    assert steps(["fedavgm"], server_optimizer="momentum") == {"fedavgm": ("Momentum", 0.9)}
    assert steps([wrapped], server_momentum=0.5) == {"wrapped": ("Momentum", 0.5)}
    with pytest.raises(SettingError, match="server_tau has no effect on any of the methods fedavg, cyclic"):
        steps(["fedavg", "cyclic"], server_tau=0.1)


class Halfway(ServerOptimizer):
    def __init__(self, lr: float = 0.5):
        self.lr = lr

    def step(self, row, mean):
        return row + self.lr * (mean - row)


class Needy(Halfway):
    def __init__(self, lr):
        self.lr = lr


class Mute(Halfway):
    def step(self, row, mean):
        return None


class Short(Halfway):
    def step(self, row, mean):
        return mean[:1]


def test_a_users_own_step():
    own = fedcat.run(method="fedavg", server_optimizer=Halfway, server_lr=0.25, **SHORT)
    assert own.settings.server_optimizer == "test_server_optimizer:Halfway"
    same = fedcat.run(method="fedavg", server_optimizer="mean", server_lr=0.25, **SHORT)
    assert own.history[-1].loss == same.history[-1].loss


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "fedavg", "server_optimizer": "adamm"}, "unknown server_optimizer 'adamm': did you mean 'adam'"),
        (
            {"method": "fedavg", "server_tau": 0.1},
            "server_tau needs server_optimizer adam",
        ),
        (
            {"method": "fedavgm", "server_optimizer": "adam"},
            "server_optimizer must be 'momentum' or left out for the method FedAvgM",
        ),
        ({"method": "cyclic", "server_optimizer": "adam"}, "server_optimizer cannot be set: the method Cyclic"),
        ({"method": "cyclic", "server_lr": 0.5}, "server_lr cannot be set: the method Cyclic"),
        ({"method": "fedavg", "server_lr": 0.0}, "server_lr must be > 0, got 0"),
        ({"method": "fedavgm", "server_momentum": 1.0}, "server_momentum must be at least 0 and below 1, got 1"),
        ({"method": "fedadam", "server_tau": float("nan")}, "server_tau must be > 0 and finite, got nan"),
        (
            {"method": "fedavg", "server_optimizer": 3},
            "server_optimizer must be a string, got 3",
        ),
        ({"method": "fedavg", "server_optimizer": lambda: 3}, "must make a ServerOptimizer, got int"),
        (
            {"method": "fedavg", "server_optimizer": ServerOptimizer},
            "server_optimizer 'fedcat.methods.server_optimizer:ServerOptimizer' must define step",
        ),
        (
            {"method": "fedavg", "server_optimizer": Needy},
            "server_optimizer 'test_server_optimizer:Needy' must be a ServerOptimizer class",
        ),
        (
            {"method": "fedavg", "server_optimizer": Short},
            r"server_optimizer Short must return .* of shape \(13706,\), got torch.float32 of shape",
        ),
        (
            {"method": "fedavg", "server_optimizer": Mute},
            r"server_optimizer Mute must return parameters of .* got None",
        ),
        ({"method": "fedavg", "average": 95.0}, "average must be at least 0 and at most 20, got 95"),
    ],
)
def test_what_cannot_be_is_named(given, message):
    with pytest.raises(SettingError, match=message):
        fedcat.run(**{**SHORT, **given})


def test_the_registry_lists_the_steps():
    assert [name for name, _ in SERVER_OPTIMIZERS] == ["adam", "mean", "momentum"]
    assert Cyclic.default_server_optimizer is None
    assert FedCat.default_server_optimizer == "mean"
