import numpy as np
import pytest
import torch
from torch import nn

import fedcat
from fedcat.errors import SettingError
from fedcat.workshop import Workshop, find_device

SHORT = {"dataset": "digits", "devices": 20, "rounds": 2, "epochs": 1}


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x.flatten(1))


def test_simulations_share_data_layout_and_engine():
    shop = Workshop()
    a = shop.prepare({**SHORT, "method": "fedavg"})
    b = shop.prepare({**SHORT, "method": "fedcat", "seed": 1})
    assert a.simulation.task.layout is b.simulation.task.layout
    assert a.simulation.task.pool is b.simulation.task.pool
    assert a.simulation.engine is b.simulation.engine
    assert a.federation is not b.federation
    assert not torch.equal(a.simulation.method.row, b.simulation.method.row)


def test_methods_of_one_seed_start_from_one_row_and_one_partition():
    shop = Workshop()
    a, b = (shop.prepare({**SHORT, "method": m, "seed": 4}) for m in ("fedavg", "fedcat"))
    assert torch.equal(a.simulation.method.row, b.simulation.method.row)
    assert a.federation is b.federation


def test_the_partition_can_have_a_seed_of_its_own():
    shop = Workshop()
    a, b = (shop.prepare({**SHORT, "seed": s, "data_seed": 7}) for s in (0, 1))
    assert a.federation is b.federation
    assert not torch.equal(a.simulation.method.row, b.simulation.method.row)


def test_making_a_net_leaves_the_users_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    Workshop().prepare(SHORT)
    assert torch.equal(torch.rand(2), expected)


def test_a_given_net_starts_from_its_own_weights():
    net = Plain()
    ready = Workshop().prepare({**SHORT, "net": net})
    start = torch.cat([net.layer.weight.flatten(), net.layer.bias])
    assert torch.equal(ready.simulation.method.row.cpu(), start)
    before = net.layer.weight.clone()
    ready.simulation.run()
    assert torch.equal(net.layer.weight, before)


@pytest.mark.parametrize(
    "net",
    [Plain, lambda: Plain(), lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(shape[1] ** 2, classes))],
)
def test_a_net_may_be_a_class_or_a_function(net):
    assert fedcat.run(net=net, **SHORT).accuracy >= 0


def test_a_net_that_cannot_be_stacked_runs_and_says_why():
    class Dropping(Plain):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, self.training))

    result = fedcat.run(net=Dropping, engine="stacked", **SHORT)
    assert result.summary["engine"]["name"] == "sequential"
    assert result.summary["notes"] == [
        "engine sequential: the net cannot be stacked: its forward pass draws random numbers (dropout), which every "
        "device must draw for itself"
    ]


def test_batch_norm_needs_two_samples_and_joins_a_lone_one():
    def net():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

    words = {**SHORT, "net": net, "partition": "iid", "batch_size": 71}
    ready = Workshop().prepare({**words, "exact": False})
    assert set(ready.federation.sizes.tolist()) == {71, 72}
    ready.simulation.run()
    assert ready.simulation.engine.name == "stacked"
    assert torch.isfinite(ready.simulation.method.row).all()
    with pytest.raises(SettingError, match="min_samples must be at least 2"):
        Workshop().prepare({**words, "partition": "dirichlet", "alpha": 0.1, "devices": 50, "seed": 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"net": "digit-cnn"}, "unknown net 'digit-cnn': did you mean 'digits-cnn'"),
        ({"net": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 12))}, "dataset has 10 classes"),
        ({"net": lambda: "a net"}, "net must be a torch.nn.Module, got str"),
        ({"net": 5}, "net must be a name"),
        ({"method": "fedcat", "options": {"fedcat": {"epsilon": "x"}}}, "fedcat.epsilon must be a number, got 'x'"),
        ({"method": "fedcat", "options": {"fedcat": {"epsilom": 1}}}, "unknown option of fedcat 'epsilom'"),
        ({"method": "fedcat", "options": {"fedcat": {"grouping": 1}}}, "fedcat.grouping must be true or false, got 1"),
        ({"method": "fedavg", "options": {"fedavg": {"mu": 1}}}, "method 'fedavg' has no options, got 'mu'"),
        ({"options": {"fedcat": 3}}, "options of method 'fedcat' must be a table, got 3"),
        ({"dataset": lambda: 3}, "must give a Dataset or a Federation, got int"),
        ({"dataset": 3}, "dataset must be a name"),
        ({"device": "cuda:99"}, "device 'cuda:99'"),
        ({"device": "nonsense"}, "device 'nonsense' cannot be used"),
        ({"selector": "unifrom"}, "unknown selector 'unifrom': did you mean 'uniform'"),
        ({"selector": lambda round, rng, samples, k: [0] * (k + 1)}, "selector must name 2 devices"),
    ],
)
def test_bad_parts_are_named(given, message):
    with pytest.raises(SettingError, match=message):
        Workshop().prepare({**SHORT, **given}).simulation.run()


def test_a_federation_brings_its_own_devices():
    rng = np.random.default_rng(0)
    train = fedcat.Pool(rng.normal(size=(60, 4)), rng.integers(3, size=60))
    test = fedcat.Pool(rng.normal(size=(20, 4)), rng.integers(3, size=20))
    fed = fedcat.Federation(train, test, np.arange(60) % 12)
    result = fedcat.run(dataset=fed, net=nn.Linear(4, 3), rounds=2, fraction=0.25)
    assert result.settings.devices == 12
    assert result.settings.partition == "given"
    assert len(result.history[0].devices) == 3
    with pytest.raises(SettingError, match="devices must be 12 as in the federation, got 5"):
        fedcat.run(dataset=fed, net=nn.Linear(4, 3), devices=5)
    with pytest.raises(SettingError, match="net must be named: dataset 'custom' has none"):
        fedcat.run(dataset=fed)


def test_the_device_that_is_there_is_found():
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(SettingError, match="needs CUDA, which this machine or this PyTorch lacks"):
            find_device("cuda")


def test_threads_are_set():
    before = torch.get_num_threads()
    try:
        Workshop().prepare({**SHORT, "threads": 1})
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
