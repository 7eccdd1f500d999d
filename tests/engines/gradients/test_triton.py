"""The fused kernels give autograd's gradients; where there is no GPU they run in Triton's interpreter."""

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from helpers import DEVICES, apart, digits_net, drive, federation, layout_of, simulate, small_net
from torch import nn

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from fedcat.data.federation import Federation
from fedcat.data.pool import Normalize, Pool
from fedcat.engines.gradients.chain import Chain, chain_of
from fedcat.engines.gradients.choose import captured_gradients
from fedcat.engines.gradients.triton.gradients import Program, TritonGradients
from fedcat.engines.gradients.vmap import VmapGradients
from fedcat.engines.step_buffers import StepBuffers
from fedcat.methods import FedAvg, FedGen, FedProx, Scaffold
from fedcat.models.nets import NETS, CenterCrop, Net
from fedcat.protocol.hop import Hop
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.task import Task

DEVICE = DEVICES[-1]
AFFINE = "fedcat.engines.gradients.triton.gradients._affine"


def pooled_apart():
    return nn.Sequential(nn.Conv2d(1, 33, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(297, 10))


def overlapping():
    return nn.Sequential(
        *(CenterCrop(7), nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(nn.LocalResponseNorm(3, alpha=0.5), nn.Conv2d(5, 6, 3, padding=1), nn.ReLU()),
        *(nn.LocalResponseNorm(4, alpha=0.3, beta=0.6, k=2.0), nn.MaxPool2d(3, 2, padding=1), nn.Flatten()),
        nn.Linear(24, 10),
    )


def unbiased():
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, bias=False), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(4, 3, 2, bias=False)),
        *(nn.Flatten(), nn.Linear(12, 20, bias=False), nn.ReLU(), nn.Linear(20, 10, bias=False)),
    )


def odd():
    return nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10))


def wide():
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 40), nn.ReLU()),
        *(nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 10)),
    )


def strided():
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 2, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(20, 10)),
    )


def strided_and_pooled():
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 2), nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16, 10)),
    )


def averaged():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 10))


def averaged_with_overlap():
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(3, 2, padding=1), nn.Conv2d(4, 3, 2, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 10)),
    )


NETS_TRIED = {
    "averages": averaged,
    "overlapping averages": averaged_with_overlap,
    "stride": strided,
    "stride and pooling": strided_and_pooled,
    **({"digits": digits_net} if DEVICE == "cuda" else {}),  # Triton's interpreter takes long for it
    "windows apart": pooled_apart,
    "overlapping pools, norms, crop": overlapping,
    "no bias": unbiased,
    "odd sides": odd,
    "linear only": wide,
}


def stored(kind: str) -> Pool:
    rng = np.random.default_rng(0)
    y = rng.integers(10, size=30)
    if kind == "bytes":
        return Pool(rng.integers(256, size=(30, 1, 8, 8), dtype=np.uint8), y, Normalize(255.0, (0.3,), (0.5,)))
    return Pool(rng.normal(size=(30, 1, 8, 8)), y)


def launch(layout, pool, batch: int, count: list[int]) -> StepBuffers:
    """Return rows that stand before their first of two steps, the second batch being short."""
    torch.manual_seed(0)
    rows = StepBuffers.make(len(count), layout.parameter_size, 0, 2, batch, like=layout.pack(layout.net))
    rows.p.copy_(layout.pack(layout.net) * (0.8 + 0.4 * torch.rand(rows.p.shape)).to(rows.p))
    rows.index.copy_(torch.randint(len(pool), rows.index.shape))
    rows.index[1, 1, 2:] = -1
    rows.count.copy_(torch.tensor(count))
    rows.order.copy_(torch.tensor(np.argsort(-np.array(count), kind="stable")))
    rows.lr.fill_(0.1)
    rows.momentum.fill_(0.5)
    rows.decay.fill_(0.01)
    return rows


def expected(layout, pool, p, index):
    """Return loss and gradient of one row by autograd in float64."""
    leaves = {n: v.double().requires_grad_() for n, v in layout.parameter_views(p).items()}
    index = index[index >= 0].long()
    net = layout.bind(leaves, {})
    loss = nn.functional.cross_entropy(net.logits(pool.inputs(index, torch.float64)), pool.y[index])
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), torch.cat([g.reshape(-1) for g in grads])


@pytest.mark.parametrize("kind", ["bytes", "numbers"])
@pytest.mark.parametrize("name", NETS_TRIED)
def test_gradients_are_those_of_autograd(name, kind):
    layout = layout_of(NETS_TRIED[name](), torch.float32, DEVICE)
    pool = stored(kind).to(layout.device)
    chain = chain_of(layout, pool)
    assert isinstance(chain, Chain), chain
    rows = launch(layout, pool, 5, [2, 2, 1])
    rows.step.fill_(1)
    before = rows.p.clone()
    program = Program(chain, pool, rows, "fp32")
    program.gradients(0, 3)
    for row in (0, 1):
        loss, gradient = expected(layout, pool, before[row], rows.index[row, 1])
        assert apart(rows.g[row].double(), gradient) < 1e-5
        assert abs(float(program.losses[row].sum()) - float(loss)) < 1e-5
    assert not rows.g[2].any()
    program.descend(0, 3)
    moved = 0.1 * (rows.g + 0.01 * before)
    assert torch.allclose(rows.p[:2], (before - moved)[:2], atol=1e-7)
    assert torch.equal(rows.p[2], before[2])


def test_the_learning_rate_decays_from_step_to_step():
    layout = layout_of(odd(), torch.float32, DEVICE)
    pool = stored("bytes").to(layout.device)
    rows = replace(launch(layout, pool, 3, [2, 2]), lr_decays=True)
    rows.lr_decay.copy_(torch.tensor([[0.0], [0.5]]))
    rows.momentum.zero_()
    program, before = Program(chain_of(layout, pool), pool, rows, "fp32"), rows.p.clone()
    rows.g.fill_(1.0)
    rows.decay.zero_()
    for step, rates in enumerate([(0.1, 0.1), (0.1, 0.1 / 1.5)]):
        program.descend(step, 2)
        moved = (before - rows.p)[:, 0].tolist()
        assert moved == pytest.approx(rates, rel=1e-4)
        before = rows.p.clone()


def test_a_row_does_not_depend_on_the_others_nor_on_the_room():
    net = digits_net() if DEVICE == "cuda" else odd()  # Triton's interpreter takes 20 s for the digits' net
    layout = layout_of(net, torch.float32, DEVICE)
    pool = stored("bytes").to(layout.device)
    chain = chain_of(layout, pool)
    many = launch(layout, pool, 5, [2, 1, 2, 2])
    found = []
    for which in ([0, 1, 2, 3], [2]):
        rows = StepBuffers.make(len(which), layout.parameter_size, 0, 2, 5, like=many.p[0])
        for name in ("p", "index", "count", "lr", "momentum"):
            getattr(rows, name).copy_(getattr(many, name)[which])
        program = Program(chain, pool, rows, "fp32")
        for step in range(2):
            program.gradients(step, len(which))
            program.descend(step, len(which))
        found.append((rows.p[which.index(2)], program.losses[which.index(2)]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_only_the_first_rows_in_order_are_trained():
    layout = layout_of(odd(), torch.float32, DEVICE)
    pool = stored("bytes").to(layout.device)
    rows = launch(layout, pool, 3, [1, 2, 2])
    before = rows.p.clone()
    program = Program(chain_of(layout, pool), pool, rows, "fp32")
    program.gradients(0, 2)
    program.descend(0, 2)
    assert rows.order.tolist() == [1, 2, 0]
    assert [bool((a != b).any()) for a, b in zip(rows.p, before, strict=True)] == [False, True, True]


def with_hook():
    net = digits_net()
    net.head.register_forward_hook(lambda module, args, out: out)
    return net


def shared_layer():
    layer = nn.Linear(64, 64)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(64, 10))


def frozen():
    net = digits_net()
    net.head.weight.requires_grad_(False)
    return net


def with_another():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    net.another = nn.Parameter(torch.ones(3))
    return net


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (small_net, "Tanh"),
        (with_hook, "hooks"),
        (shared_layer, "twice"),
        (frozen, "frozen"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU()), "last layer"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Linear(9, 10)), "ReLU between"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3, dilation=2), nn.Flatten(), nn.Linear(32, 10)), "dilation"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, (3, 1)), nn.Flatten(), nn.Linear(96, 10)), "square"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 1, padding=1), nn.Flatten(), nn.Linear(200, 10)), "padded by its"),
        (
            lambda: nn.Sequential(
                nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(12, 1, 6), nn.Flatten(), nn.Linear(162, 10)
            ),
            "too large",
        ),
        (lambda: nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 10)), "begins with pooling"),
        (lambda: nn.Sequential(nn.LocalResponseNorm(2), nn.Flatten(), nn.Linear(64, 10)), "begins with a norm"),
        (lambda: nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 10)), "begins with pooling"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.AvgPool2d(2, ceil_mode=True)), "whole windows"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.AvgPool2d((2, 1))), "not square"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(4)), "not equal"),
        (lambda: nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(64, 10)), "ReLU does not follow"),
        (lambda: nn.Sequential(nn.Flatten(2), nn.Flatten(), nn.Linear(64, 10)), "some dimensions"),
        (lambda: nn.Sequential(CenterCrop(4), nn.Flatten(), nn.Linear(16, 10)), "no convolution sees"),
        (lambda: nn.Sequential(CenterCrop(7), nn.Flatten(), nn.Linear(49, 10)), "no convolution sees"),
        (lambda: nn.Sequential(CenterCrop(7), CenterCrop(6), nn.Conv2d(1, 2, 3)), "than its input"),
        (with_another, "no layer uses"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), CenterCrop(4), nn.Flatten(), nn.Linear(32, 10)), "than its input"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 10)), "buffers"),
    ],
)
def test_other_nets_are_told_why(net, why):
    layout = layout_of(net(), torch.float32)
    found = chain_of(layout, stored("numbers"))
    assert isinstance(found, str)
    assert why in found


def test_a_subclass_with_a_forward_of_its_own_is_no_chain():
    class Twice(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    layout = layout_of(Twice(nn.Flatten(), nn.Linear(64, 10)), torch.float32)
    assert "Twice" in chain_of(layout, stored("numbers"))


@pytest.mark.parametrize(
    "name", ["digits-cnn", "lab-cifar", "lab-mnist", "lab-femnist", "mcmahan-mnist", "mcmahan-cifar"]
)
def test_every_net_of_the_package_is_a_chain(name):
    shape = {"digits-cnn": (1, 8, 8), "lab-cifar": (3, 32, 32), "mcmahan-cifar": (3, 32, 32)}.get(name, (1, 28, 28))
    layout = layout_of(NETS.get(name)(shape, 10), torch.float32)
    pool = Pool(np.zeros((2, *shape), np.uint8), np.zeros(2, np.int64))
    assert isinstance(chain_of(layout, pool), Chain)


def task_of(net, rule=None, dtype=torch.float32) -> Task:
    fed = federation([6, 6])
    layout = layout_of(net, dtype, DEVICE)
    return Task(0, layout, fed, fed.train.to(layout.device), rule or LocalRule(), 4)


def choice(task, batch=4, precision="fp32"):
    hop = Hop(0, 0, task.layout.pack(task.layout.net), 1, 0.1)
    return captured_gradients((task, hop), batch, precision)


def why_not(task, batch, precision):
    return choice(task, batch, precision)[1]


def test_the_trial_admits_what_agrees_and_says_what_does_not(monkeypatch):
    task = task_of(tiny())
    assert isinstance(choice(task)[0], TritonGradients)
    assert why_not(task, 4, "fp32") == ""
    double = task_of(tiny(), dtype=torch.float64)
    assert isinstance(choice(double)[0], VmapGradients)
    assert "float32" in why_not(double, 4, "fp32")
    assert "larger than" in why_not(task, 5000, "fp32")
    assert "Tanh" in why_not(task_of(small_net()), 4, "fp32")
    wrong = task_of(tiny())
    monkeypatch.setattr(
        "fedcat.engines.gradients.triton.gradients._affine", lambda pool: (torch.ones(2, device=DEVICE)[:1],) * 2
    )
    with pytest.warns(UserWarning, match="cannot be used .its gradients differ"):
        assert isinstance(choice(wrong)[0], VmapGradients)
    assert "differ from autograd" in why_not(wrong, 4, "fp32")


@pytest.mark.parametrize("precision", ["fp32", "tf32", *(["bf16"] if DEVICE == "cuda" else [])])  # not interpreted
def test_the_trial_sees_one_tensor_that_is_wrong(precision, monkeypatch):
    gradients = Program.gradients

    def without_a_bias(self, ahead, width):
        gradients(self, ahead, width)
        self.buffers.g[:, 27:30] = 0

    monkeypatch.setattr(Program, "gradients", without_a_bias)
    with pytest.warns(UserWarning, match="differ from autograd's by 1"):
        why_not(task_of(tiny()), 4, precision)


def test_the_trial_sees_what_is_no_number(monkeypatch):
    gradients = Program.gradients

    def without_a_number(self, ahead, width):
        gradients(self, ahead, width)
        self.buffers.g[:, -1] = float("nan")

    monkeypatch.setattr(Program, "gradients", without_a_number)
    with pytest.warns(UserWarning, match="differ from autograd's by inf"):
        why_not(task_of(tiny()), 4, "fp32")


def test_each_pool_has_a_trial_of_its_own(monkeypatch):
    task = task_of(tiny())
    assert why_not(task, 4, "fp32") == ""
    monkeypatch.setattr(
        "fedcat.engines.gradients.triton.gradients._affine", lambda pool: (torch.ones(2, device=DEVICE)[:1],) * 2
    )
    other = replace(task, pool=Pool(task.pool.x, task.pool.y, Normalize(3.0)))
    with pytest.warns(UserWarning, match="differ"):
        assert "differ from autograd" in why_not(other, 4, "fp32")
    assert why_not(task, 4, "fp32") == ""


def test_samples_that_lie_otherwise_in_memory_train_the_same(captured):
    rng = np.random.default_rng(0)
    last, y, owner = rng.integers(256, size=(17, 8, 8, 3), dtype=np.uint8), rng.integers(10, size=17), [0] * 9 + [1] * 8
    x = last.transpose(0, 3, 1, 2)
    rows = []
    for pool in (Pool(x, y), Pool(np.ascontiguousarray(x), y)):
        fed = Federation(pool, pool, np.array(owner), 10, 2)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 10))
        sim = simulate(FedAvg, fed, layout_of(net, torch.float32, DEVICE), "stacked", rounds=1, k=2)
        drive(sim)
        assert sim.engine.kernels(sim.task) == "fused"
        rows.append(sim.method.row)
    assert torch.equal(*rows)


def test_a_tile_that_does_not_fit_gets_fewer_stages():
    tried = []

    class Kernel:
        def __getitem__(self, grid):
            def launch(*tensors, num_stages, **words):
                tried.append(num_stages)
                if num_stages > most:
                    raise OutOfResources(2, 1, "shared memory")

            return launch

    program = Program.__new__(Program)
    program.buffers, program.width, program.ahead = StepBuffers.make(1, 2, 0, 1, 1, torch.zeros(1)), 1, 0
    most = 2
    program.launch(Kernel(), 1, num_stages=4)
    assert tried == [4, 3, 2]
    most = 0
    with pytest.raises(OutOfResources):
        program.launch(Kernel(), 1, num_stages=2)


def test_memory_that_runs_out_in_the_trial_says_nothing_about_the_net(monkeypatch):
    def out_of_memory(*args, **words):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(Program, "gradients", out_of_memory)
        task = task_of(tiny())
        with pytest.raises(torch.OutOfMemoryError):
            choice(task)
    assert isinstance(choice(task)[0], TritonGradients)


def test_flat_inputs_are_normalised_by_feature():
    rng = np.random.default_rng(0)
    how = Normalize(1.0, tuple(rng.normal(size=6)), tuple(rng.uniform(0.5, 2, size=6)))
    pool = Pool(rng.normal(size=(20, 6)), rng.integers(3, size=20), how).to(torch.device(DEVICE))
    layout = layout_of(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), torch.float32, DEVICE)
    rows = launch(layout, pool, 5, [2, 2])
    Program(chain_of(layout, pool), pool, rows, "fp32").gradients(0, 2)
    _, gradient = expected(layout, pool, rows.p[0], rows.index[0, 0])
    assert apart(rows.g[0].double(), gradient) < 1e-5


def test_a_compiler_that_fails_is_no_end_of_training(monkeypatch):
    def fails(*args, **words):
        raise RuntimeError("no such instruction\nand much more")

    monkeypatch.setattr("fedcat.engines.gradients.triton.gradients.Program.gradients", fails)
    task = task_of(digits_net())
    with pytest.warns(UserWarning, match="no such instruction"):
        assert isinstance(choice(task)[0], VmapGradients)


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(27, 8), nn.ReLU(), nn.Linear(8, 10)),
    )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("method", [FedAvg, FedProx, Scaffold])
def test_training_with_them_agrees_with_the_sequential_engine(method, exact, captured):
    fed = federation([3, 9, 5])
    rows = []
    for engine in ("sequential", "stacked"):
        layout = layout_of(tiny(), torch.float32, DEVICE)
        words = {"rounds": 2, "k": 2, "epochs": 1, "momentum": 0.5, "clip": 1.0, "weight_decay": 0.01}
        sim = simulate(method, fed, layout, engine, exact=exact, **words)
        drive(sim)
        rows.append(sim.method.row)
        if engine == "stacked":
            assert sim.engine.kernels(sim.task) == "fused"
    assert apart(rows[1], rows[0]) < 1e-5


@pytest.mark.parametrize("exact", [False, True])
def test_a_loss_of_the_outputs_and_the_last_layer_trains_with_them(exact, captured):
    fed, rows = federation([3, 9, 5]), []
    for engine in ("sequential", "stacked"):
        torch.manual_seed(0)
        net = Net(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()), nn.Linear(16, 10))
        layout = layout_of(net, torch.float32, DEVICE)
        words = {"options": {"hidden": 8, "generator_steps": 3}, "momentum": 0.5}
        sim = simulate(FedGen, fed, layout, engine, rounds=3, k=2, epochs=1, exact=exact, **words)
        drive(sim)
        rows.append(sim.method.row)
    assert sim.engine.kernels(sim.task) == "fused, loss by autograd"
    assert apart(rows[1], rows[0]) < 1e-5


def smooth(outputs, targets):
    """A loss that a user chose."""
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1, reduction="none")


def test_a_loss_that_the_user_chose_trains_with_them(captured):
    rows = []
    for engine in ("sequential", "stacked"):
        layout = layout_of(tiny(), torch.float32, DEVICE)
        sim = simulate(FedAvg, federation([3, 9, 5]), layout, engine, rounds=2, k=2, epochs=1, loss=smooth)
        drive(sim)
        rows.append(sim.method.row)
    assert sim.engine.kernels(sim.task) == "fused, loss by autograd"
    assert apart(rows[1], rows[0]) < 1e-5


@dataclass(frozen=True)
class LooksAtStart(LocalRule):
    def loss(self, net, batch, inputs):
        return super().loss(net, batch, inputs) + net.at(inputs.start).logits(batch.x).square().mean()


@dataclass(frozen=True)
class LooksAtInputs(LocalRule):
    def loss(self, net, batch, inputs):
        return super().loss(net, batch, inputs) * batch.x.abs().mean()


@dataclass(frozen=True)
class LooksTwice(LocalRule):
    def loss(self, net, batch, inputs):
        return super().loss(net, batch, inputs) + batch.mean(net.logits(batch.x * 2).square().mean(1))


@pytest.mark.parametrize(
    ("rule", "why"),
    [(LooksAtStart(), "net's at"), (LooksAtInputs(), "batch's inputs"), (LooksTwice(), "NoneType|inputs|operand")],
)
def test_a_loss_that_sees_more_goes_without_them(rule, why):
    gradients, reason = choice(task_of(tiny(), rule))
    assert isinstance(gradients, VmapGradients)
    assert re.search(f"sees more than the net's outputs: .*({why})", reason)
