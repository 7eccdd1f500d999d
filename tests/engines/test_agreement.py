"""The engines agree: sequential, in plain PyTorch, is the reference; stacked must give its rows."""

import numpy as np
import pytest
import torch
from helpers import DEVICES, Attention, apart, digits_net, drive, federation, layout_of, simulate, small_net
from torch import nn
from torch._C._functorch import get_unwrapped, is_batchedtensor

from fedcat.data.federation import EvaluationSet
from fedcat.engines import EngineChoice, StackedEngine, make, pick
from fedcat.engines.evaluation import Evaluation, evaluate
from fedcat.engines.gradients import trials
from fedcat.engines.gradients.vmap import VmapGradients
from fedcat.engines.rule_rows import groups
from fedcat.methods import FedAvg, FedCat
from fedcat.models.losses import cross_entropy
from fedcat.models.metrics import make_metrics
from fedcat.models.nets import NETS
from fedcat.runs.evaluations import evaluation

CASES = {
    "digits-cnn": ((1, 8, 8), 10),
    "lab-cifar": ((3, 32, 32), 10),
    "lab-mnist": ((1, 28, 28), 10),
    "lab-femnist": ((1, 28, 28), 62),
    "mcmahan-mnist": ((1, 28, 28), 10),
    "mcmahan-cifar": ((3, 32, 32), 20),
}
SIZES = [3, 9, 5, 12, 7, 4]


def both(make_net, fed, dtype, device, **words):
    rows = []
    for engine in ("sequential", "stacked"):
        torch.manual_seed(1)
        layout = layout_of(make_net(), dtype, device)
        sim = simulate(FedCat, fed, layout, engine, k=3, **words)
        drive(sim)
        rows.append(sim.method.row)
    assert torch.isfinite(rows[0]).all()
    return rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_float64_after_a_whole_cycle(name, device, record_figure):
    shape, classes = CASES[name]
    fed = federation(SIZES, shape, classes)
    words = {"rounds": 3, "epochs": 2, "batch_size": 4, "lr": 0.05, "momentum": 0.5}
    a, b = both(lambda: NETS.get(name)(shape, classes), fed, torch.float64, device, **words)
    record_figure(f"{name} {device} float64, a cycle", apart(b, a), 1e-9)
    assert apart(b, a) <= 1e-9


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_float32_after_five_steps(name, device, record_figure):
    shape, classes = CASES[name]
    fed = federation([8] * 6, shape, classes)
    words = {"rounds": 1, "epochs": 5, "batch_size": 8, "lr": 0.01, "momentum": 0.5}
    a, b = both(lambda: NETS.get(name)(shape, classes), fed, torch.float32, device, **words)
    # where two places of a pooling window are almost alike, rounding decides which of them wins
    record_figure(f"{name} {device} float32, five steps", apart(b, a), 1e-5)
    assert apart(b, a) <= 1e-5


LOWERED = {"tf32": 1e-3, "bf16": 3e-3}
"""How far the rows may be apart after five steps, relative to their norm, where products are not formed in full."""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("precision", LOWERED)
@pytest.mark.parametrize("name", CASES)
def test_lowered_precision_after_five_steps(name, precision, record_figure):
    shape, classes = CASES[name]
    fed = federation([8] * 6, shape, classes)
    words = {"rounds": 1, "epochs": 5, "batch_size": 8, "lr": 0.01, "momentum": 0.5}
    rows = []
    for engine, how in (("sequential", "fp32"), ("sequential", precision), ("stacked", precision)):
        torch.manual_seed(1)
        layout = layout_of(NETS.get(name)(shape, classes), torch.float32, "cuda")
        sim = simulate(FedCat, fed, layout, make(engine, precision=how), k=3, **words)
        drive(sim)
        rows.append(sim.method.row)
    full, sequential, stacked = rows
    for label, row, other in (("engines", stacked, sequential), ("against fp32", stacked, full)):
        record_figure(f"{name} {precision}, five steps, {label}", apart(row, other), LOWERED[precision])
        assert apart(row, other) <= LOWERED[precision]
    assert apart(stacked, full) > 1e-8


def test_fewer_bits_are_a_permission(record_figure):
    """On a CPU the sequential engine lowers products to bfloat16; a stack, which would be slower, keeps float32."""
    fed, rows = federation([8] * 6), []
    for engine, how in (("sequential", "fp32"), ("sequential", "bf16"), ("stacked", "bf16")):
        torch.manual_seed(1)
        net = nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.LocalResponseNorm(3), nn.Flatten(), nn.LayerNorm(288)),
            *(nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 10)),
        )
        layout = layout_of(net, torch.float32)
        sim = simulate(FedCat, fed, layout, make(engine, precision=how), k=3, rounds=1, epochs=5, batch_size=8, lr=0.01)
        drive(sim)
        rows.append(sim.method.row)
    full, sequential, stacked = rows
    record_figure("stacked on a CPU bf16, five steps", apart(stacked, sequential), LOWERED["bf16"])
    assert 1e-6 < apart(stacked, sequential) <= LOWERED["bf16"]
    assert apart(stacked, full) < 1e-5


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "local",
    [
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"clip": 0.05},
        {"lr_decay": 0.3},
        {"momentum": 0.9, "weight_decay": 0.1, "clip": 0.2, "lr_decay": 0.05},
    ],
)
def test_every_part_of_sgd(local, exact):
    fed = federation(SIZES)
    plain, _ = both(small_net, fed, torch.float64, "cpu", rounds=3)
    a, b = both(small_net, fed, torch.float64, "cpu", rounds=3, exact=exact, **local)
    assert apart(b, a) < 1e-12
    assert apart(plain, a) > 1e-6


def with_batch_norm():
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(144, 10), nn.BatchNorm1d(10)),
    )


def with_groups():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))


@pytest.mark.parametrize("device", DEVICES)
def test_batch_norm_is_stacked_by_true_batch_length(device):
    fed = federation([3, 9, 5, 13, 7, 4])
    words = {"rounds": 3, "momentum": 0.5, "join_lone": True}
    a, b = both(with_batch_norm, fed, torch.float64, device, **words)
    layout = layout_of(with_batch_norm())
    assert apart(b, a) < 1e-10
    assert apart(a[layout.parameter_size :], layout.pack(layout.net)[layout.parameter_size :].to(a)) > 0.1


class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(64, 10)
        self.back = nn.Linear(10, 64)
        self.back.weight = nn.Parameter(self.into.weight.t().clone())
        self.out = nn.Linear(64, 10)
        self.out.weight = self.into.weight

    def forward(self, x):
        return self.out(torch.tanh(self.back(torch.tanh(self.into(x.flatten(1))))))


class Viewed(nn.Module):
    """Looks at how its values lie in memory."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.out = nn.Linear(144, 10)

    def forward(self, x):
        return self.out(torch.relu(self.conv(x)).view(len(x), -1))


class Turned(nn.Module):
    """Its weights' gradients come back transposed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(10, 192) - 0.5)

    def forward(self, x):
        return torch.einsum("bi,oi->bo", x.flatten(1), self.weight)


@pytest.mark.parametrize("net", [Viewed, Turned])
def test_how_values_lie_in_memory_changes_nothing(net):
    fed = federation(SIZES, (3, 8, 8))
    a, b = both(net, fed, torch.float64, "cpu", rounds=3, momentum=0.5)
    assert apart(b, a) < 1e-12


def test_tied_weights():
    fed = federation(SIZES)
    a, b = both(TiedAutoencoder, fed, torch.float64, "cpu", rounds=3, momentum=0.5)
    assert apart(b, a) < 1e-12


def test_a_part_that_the_loss_does_not_reach_stays():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(64, 10)
            self.idle = nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x.flatten(1))

    fed = federation(SIZES)
    a, b = both(Idle, fed, torch.float64, "cpu", rounds=3)
    torch.manual_seed(1)
    before = layout_of(Idle())
    idle = before.unpack(before.pack(before.net))["idle.weight"]
    for row in (a, b):
        assert torch.equal(before.unpack(row)["idle.weight"], idle)
    assert apart(b, a) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_runs_sequentially_and_repeats(device):
    fed = federation(SIZES)

    def net():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))

    layout = layout_of(net(), torch.float64, device)
    choice = pick("stacked", layout, fed.train.to(layout.device), 4)
    assert (choice.name, choice.forced) == ("sequential", True)
    assert "draws random numbers" in choice.reason
    rows = []
    for noise in (0, 1):
        torch.manual_seed(noise)
        sim = simulate(FedCat, fed, layout, choice.name, start=layout.pack(layout.net))
        drive(sim)
        rows.append(sim.method.row)
    assert torch.equal(rows[0], rows[1])


def test_stacked_dropout_would_be_an_error_and_not_a_silent_mistake():
    fed = federation(SIZES)
    layout = layout_of(nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout(0.5)))
    with pytest.raises(RuntimeError, match="random"):
        drive(simulate(FedCat, fed, layout, "stacked"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("net", [small_net, lambda: NETS.get("digits-cnn")((1, 8, 8), 10), with_groups])
def test_exact_mode_gives_the_same_bits_whatever_is_beside(net, batch_size, fixed, device, monkeypatch):
    """On a CPU also where the size of a stack is taken to matter, so that it is fixed."""
    if fixed:
        monkeypatch.setattr(trials, "_size_matters", lambda *given: True)
    fed = federation([3, 9, 5, 13, 7, 4])
    layout = layout_of(net(), torch.float32, device)

    def result(*companions):
        engine = make("stacked", exact=True)
        words = {"rounds": 4, "momentum": 0.5, "batch_size": batch_size}
        sims = [simulate(FedCat, fed, layout, engine, k=2, **words)]
        sims += [simulate(m, fed, layout, engine, seed=9, k=k, lr=0.3, **words) for m, k in companions]
        drive(*sims)
        return sims[0].method.row

    alone = result()
    assert torch.equal(alone, result((FedAvg, 1)))
    assert torch.equal(alone, result((FedAvg, 6), (FedCat, 5), (FedCat, 3)))
    assert torch.equal(alone, result(*[(FedAvg, 6)] * 4))


def test_a_fixed_size_agrees_with_the_reference(monkeypatch):
    monkeypatch.setattr(trials, "_size_matters", lambda *given: True)
    monkeypatch.setattr(trials, "FIXED", 4)
    fed = federation([3, 9, 5, 12, 7, 4, 20])
    rows = []
    for engine in ("sequential", "stacked"):
        sim = simulate(FedCat, fed, layout_of(small_net()), engine, k=7, rounds=7, exact=True, momentum=0.5)
        drive(sim)
        rows.append(sim.method.row)
    assert apart(rows[1], rows[0]) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
def test_stack_sizes(device):
    fed = federation(SIZES)
    layout = layout_of(small_net(), torch.float32, device)
    pool = fed.train.to(layout.device)
    gradients = VmapGradients(layout, pool)
    assert trials.stack_size(gradients, 4, exact=False) == trials.StackSize(1, None)
    exact = trials.stack_size(gradients, 4, exact=True)
    fixed = trials.StackSize(trials.FIXED, trials.FIXED, row_by_row=True)
    assert exact in (trials.StackSize(2, None), fixed)
    if device != "cpu":
        assert exact == fixed
    gradients.independent = True
    alone = trials.stack_size(gradients, 4, exact=True)
    assert (alone.least, alone.most) == (1, None)
    assert [part.stop for part in groups(3, alone)] == [1, 2, 3]  # a rule's sums are not independent


def test_a_net_whose_bits_depend_on_the_size_of_a_stack_is_found_out():
    class Odd(nn.Module):
        """Adds what it knows of the size of its stack: the storage behind its weights."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x):
            rows = get_unwrapped(x).shape[0] if is_batchedtensor(x) else 1
            return self.layer(x.flatten(1)) * (1 + 1e-6 * rows)

    fed = federation(SIZES)
    gradients = VmapGradients(layout_of(Odd()), fed.train)
    assert trials.stack_size(gradients, 4, exact=True) == trials.StackSize(trials.FIXED, trials.FIXED, row_by_row=True)


def test_exact_mode_trains_a_net_that_mixes_samples_one_at_a_time():
    fed = federation(SIZES)
    layout = layout_of(with_batch_norm())
    assert pick("stacked", layout, fed.train, 4) == EngineChoice("stacked", "as requested")
    choice = pick("stacked", layout, fed.train, 4, exact=True)
    assert (choice.name, choice.forced) == ("sequential", True)
    assert choice.reason.startswith("the net mixes the samples of a batch")


def test_simulations_with_other_settings_share_a_launch():
    fed, other = federation(SIZES), federation([20, 4, 11], seed=5)
    layout = layout_of(small_net())
    words = [
        {"fed": fed, "lr": 0.1, "batch_size": 4},
        {"fed": fed, "lr": 0.02, "batch_size": 7, "clip": 0.1, "seed": 3},
        {"fed": other, "momentum": 0.9, "weight_decay": 0.01, "epochs": 1},
    ]
    for method in (FedAvg, FedCat):
        engine = StackedEngine()
        together = [simulate(method, layout=layout, engine=engine, rounds=3, **w) for w in words]
        drive(*together)
        for sim, word in zip(together, words, strict=True):
            alone = simulate(method, layout=layout, engine="sequential", rounds=3, **word)
            drive(alone)
            assert apart(sim.method.row, alone.method.row) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
def test_evaluation(device):
    fed = federation(SIZES)
    layout = layout_of(small_net(), torch.float64, device)
    test = fed.test.to(layout.device)
    row = layout.pack(layout.net)
    logits = layout.net(test.x.double())
    metrics = list(make_metrics([], cross_entropy, classes=True).values())
    (found,) = evaluate([Evaluation(layout, row, EvaluationSet(test), metrics, together=True)])
    accuracy, loss = found["accuracy"], found["loss"]
    assert accuracy == pytest.approx((logits.argmax(1) == test.y).double().mean().item())
    assert loss == pytest.approx(nn.functional.cross_entropy(logits, test.y).item())
    some = np.array([0, 5, 7])
    (found,) = evaluate([Evaluation(layout, row, EvaluationSet(test, some), metrics)])
    accuracy, loss = found["accuracy"], found["loss"]
    assert accuracy == pytest.approx((logits[some].argmax(1) == test.y[some]).double().mean().item())
    assert loss == pytest.approx(nn.functional.cross_entropy(logits[some], test.y[some]).item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_every_net_of_ours_can_be_stacked(name, device):
    shape, classes = CASES[name]
    fed = federation(SIZES, shape, classes)
    layout = layout_of(NETS.get(name)(shape, classes), torch.float32, device)
    assert pick("stacked", layout, fed.train.to(layout.device), 4, exact=True).name == "stacked"


def test_the_rule_for_auto():
    fed = federation(SIZES)
    small = layout_of(small_net())
    assert pick("auto", small, fed.train, 10).name == "stacked"
    choice = pick("auto", small, fed.train, 10**6)
    assert (choice.name, choice.forced) == ("sequential", False)
    assert "MFLOP per forward batch, above" in choice.reason
    assert pick("stacked", small, fed.train, 10**6) == EngineChoice("stacked", "as requested")
    chain = layout_of(digits_net())
    assert pick("auto", chain, fed.train, 50).name == "stacked"
    assert "small chain of layers" in pick("auto", chain, fed.train, 50).reason
    assert pick("auto", chain, fed.train, 100).name == "sequential"
    assert pick("auto", chain, fed.train, 50, plain=False).name == "sequential"
    assert pick("sequential", small, fed.train, 1) == EngineChoice("sequential", "as requested")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.filterwarnings("error:There is a performance drop")
def test_a_net_with_attention_trains_in_every_engine(exact, device):
    ended = []
    for engine in ("sequential", "stacked"):
        torch.manual_seed(1)
        layout = layout_of(Attention(), torch.float32, device)
        sim = simulate(FedCat, federation(SIZES), layout, engine, k=3, rounds=3, batch_size=4, lr=0.02, exact=exact)
        drive(sim)
        ended.append(sim.method.row)
        rows = [sim.method.row, layout.pack(layout.net)]
        found = evaluate([evaluation(sim, row, sim.federation.test_set) for row in rows])
        assert found[0]["loss"] == pytest.approx(sim.history[-1].loss, rel=1e-3)
    assert apart(ended[1], ended[0]) <= 1e-4
