import gc
import time
from concurrent.futures import ThreadPoolExecutor
from weakref import ref

import numpy as np
import pytest
import torch
from helpers import drive
from torch import nn

import fedcat
import fedcat.runs.runner
from fedcat.core.device import find_device
from fedcat.core.errors import SettingError
from fedcat.engines import SequentialEngine
from fedcat.runs.build import Builder
from fedcat.runs.driver import Driver
from fedcat.runs.run import Run

SHORT = {"dataset": "digits", "clients": 20, "rounds": 2, "epochs": 1}


def with_batch_norm():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


class Bare(fedcat.RoundMethod):
    def reduce(self, hops, replies):
        return replies[0].end


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x.flatten(1))


def test_simulations_share_data_layout_and_engine():
    builder = Builder()
    a = builder.build({**SHORT, "method": "fedavg"})
    b = builder.build({**SHORT, "method": "fedcat", "seed": 1})
    assert a.task.layout is b.task.layout
    assert a.task.pool is b.task.pool
    assert a.engine is b.engine
    assert a.federation is not b.federation
    assert not torch.equal(a.method.row, b.method.row)


def test_methods_of_one_seed_start_from_one_row_and_one_partition():
    builder = Builder()
    a, b = (builder.build({**SHORT, "method": m, "seed": 4}) for m in ("fedavg", "fedcat"))
    assert torch.equal(a.method.row, b.method.row)
    assert a.federation is b.federation


def test_the_partition_can_have_a_seed_of_its_own():
    builder = Builder()
    a, b = (builder.build({**SHORT, "seed": s, "data_seed": 7}) for s in (0, 1))
    assert a.federation is b.federation
    assert not torch.equal(a.method.row, b.method.row)


def test_what_lies_beside_the_row_belongs_to_the_seed():
    """A factory's frozen layer differs from seed to seed: such nets share no layout, and each model has its own."""

    def net():
        made = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 10))
        made[1].requires_grad_(False)
        return made

    words = {**SHORT, "net": net, "method": "fedavg"}
    builder = Builder()
    first, second = (builder.build({**words, "seed": s}) for s in (0, 1))
    assert first.task.layout is not second.task.layout
    together = fedcat.compare(seeds=2, methods=["fedavg"], exact=True, net=net, **SHORT)[0].results[1]
    alone = fedcat.run(seed=1, exact=True, **words)
    assert together.history[-1].loss == alone.history[-1].loss
    test = alone.federation.test
    with torch.no_grad():
        right = (alone.model()(test.inputs(slice(None), torch.float32)).argmax(1) == test.y).double().mean().item()
    assert right == pytest.approx(alone.accuracy)


def test_a_lazy_net_is_made_under_the_seed():
    def net():
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(12), nn.ReLU(), nn.LazyLinear(10))

    torch.manual_seed(1)
    first = fedcat.run(net=net, **SHORT)
    torch.manual_seed(2)
    again = fedcat.run(net=net, **SHORT)
    assert first.history[-1].loss == again.history[-1].loss


def test_tokens_are_inputs_as_well():
    rng = np.random.default_rng(0)
    data = fedcat.Dataset.from_arrays(rng.integers(20, size=(120, 6)), rng.integers(3, size=120))

    def net():
        return nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(24, 3))

    words = {"dataset": data, "net": net, "clients": 6, "per_round": 3, "rounds": 3, "min_samples": 2}
    losses = {
        engine: fedcat.run(engine=engine, dtype="float64", **words).history[-1].loss
        for engine in ("sequential", "stacked")
    }
    assert losses["stacked"] == pytest.approx(losses["sequential"], rel=1e-12)


def test_options_may_use_a_classes_own_name_and_numbers_of_numpy():
    class Mine(fedcat.FedCat):
        pass

    ready = Builder().build({**SHORT, "method": Mine, "options": {"Mine": {"epsilon": np.float64(0.25)}}})
    assert ready.method.selector.epsilon == 0.25
    assert "epsilon = 0.25" in ready.settings.toml()
    assert ready.settings.method == "<Mine>"
    assert Builder().build({**SHORT, "alpha": np.float32(0.5)}).settings.partition_options == {"alpha": 0.5}


def test_a_method_may_be_a_function_of_the_context():
    made = fedcat.run(method=lambda context, trim=2: fedcat.FedAvg(context), **SHORT)
    assert made.status == "finished"


def test_making_a_net_leaves_the_users_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    Builder().build(SHORT)
    assert torch.equal(torch.rand(2), expected)


def test_a_given_net_starts_from_its_own_weights():
    net = Plain()
    ready = Builder().build({**SHORT, "net": net})
    start = torch.cat([net.layer.weight.flatten(), net.layer.bias])
    assert torch.equal(ready.method.row.cpu(), start)
    before = net.layer.weight.clone()
    drive(ready)
    assert torch.equal(net.layer.weight, before)


@pytest.mark.parametrize(
    "net",
    [Plain, lambda: Plain(), lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(shape[1] ** 2, classes))],
)
def test_a_net_may_be_a_class_or_a_function(net):
    result = fedcat.run(net=net, **SHORT)
    assert sum(p.numel() for p in result.model().parameters()) == 650
    assert result.history[-1].loss != pytest.approx(result.history[0].train_loss)


def test_a_net_that_cannot_be_stacked_runs_and_says_why():
    class Dropping(Plain):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, self.training))

    result = fedcat.run(net=Dropping, engine="stacked", **SHORT)
    assert result.summary.decisions.engine == "sequential"
    assert result.summary.notes == [
        "engine sequential: the net cannot be stacked: its forward pass draws random numbers (dropout), which every "
        "client must draw for itself"
    ]


def test_batch_norm_needs_two_samples_and_joins_a_lone_one():
    words = {**SHORT, "net": with_batch_norm, "partition": "iid", "batch_size": 71}
    ready = Builder().build({**words, "exact": False})
    assert set(ready.federation.sizes.tolist()) == {71, 72}
    drive(ready)
    assert ready.engine.name == "stacked"
    assert torch.isfinite(ready.method.row).all()
    with pytest.raises(SettingError, match=r"clients? holds? a single sample.* set min_samples to 2 or more"):
        Builder().build({**words, "partition": "dirichlet", "alpha": 0.1, "clients": 50, "seed": 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"net": "digit-cnn"}, "unknown net 'digit-cnn': did you mean 'digits-cnn'"),
        ({"net": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 12))}, "dataset has 10 classes"),
        ({"net": lambda: "a net"}, "net must be a torch.nn.Module, got str"),
        ({"net": 5}, "net must be a string, got 5"),
        ({"method": "fedcat", "options": {"fedcat": {"epsilon": "x"}}}, "fedcat.epsilon must be a number, got 'x'"),
        ({"method": "fedcat", "options": {"fedcat": {"epsilom": 1}}}, "unknown option of fedcat 'epsilom'"),
        ({"method": "fedcat", "options": {"fedcat": {"grouping": 1}}}, "fedcat.grouping must be true or false, got 1"),
        (
            {"method": "fedavg", "options": {"fedavg": {"mu": 1}}},
            "option of fedavg 'mu': available: average, batch_size",
        ),
        (
            {"method": Bare, "options": {"Bare": {"mu": 1}}},
            "option of test_build:Bare 'mu': available",
        ),
        ({"options": {"fedcat": 3}}, "options of method 'fedcat' must be a table, got 3"),
        ({"options": {"fedkat": {"epsilon": 0.1}}}, "unknown method in options 'fedkat': did you mean 'fedcat'"),
        ({"method": "os:getcwd"}, "method 'os:getcwd' must be a Method class"),
        ({"method": lambda context: 3}, "method '<lambda>' must make a Method, got int"),
        ({"method": 5}, "method must be a string, got 5"),
        ({"dataset": [1]}, "dataset must be a string"),
        ({"dataset": lambda size: None}, "must be a function whose arguments all have defaults"),
        ({"net": lambda a, b, c: None}, r"must take no arguments or \(input shape, number of classes\)"),
        ({"net": "<Wide>"}, "net '<Wide>' was passed as a Python object"),
        ({"selector": lambda round: [0]}, r"selector must be a function of \(round, rng, samples, k\)"),
        ({"method": type("Half", (fedcat.RoundMethod,), {})}, "must define reduce"),
        ({"device": "meta"}, "device 'meta' cannot hold data"),
        ({"net": with_batch_norm, "batch_size": 1}, "batch_size must be at least 2"),
        ({"dataset": lambda: 3}, "must return a Dataset or a Federation, got int"),
        ({"dataset": 3}, "dataset must be a string"),
        ({"device": "cuda:99"}, "device 'cuda:99'"),
        ({"device": "nonsense"}, "device 'nonsense' cannot be used"),
        ({"selector": "unifrom"}, "unknown selector 'unifrom': did you mean 'uniform'"),
        (
            {"method": "fedavg", "selector": lambda round, rng, samples, k: [0] * (k + 1)},
            "selector must return 2 clients",
        ),
    ],
)
def test_bad_parts_are_named(given, message):
    with pytest.raises(SettingError, match=message):
        drive(Builder().build({**SHORT, **given}))


def test_a_federation_brings_its_own_clients():
    rng = np.random.default_rng(0)
    train = fedcat.Pool(rng.normal(size=(60, 4)), rng.integers(3, size=60))
    test = fedcat.Pool(rng.normal(size=(20, 4)), rng.integers(3, size=20))
    fed = fedcat.Federation(train, test, np.arange(60) % 12)
    result = fedcat.run(dataset=fed, net=nn.Linear(4, 3), rounds=2, fraction=0.25)
    assert result.settings.clients == 12
    assert result.settings.partition == "given"
    assert len(result.history[0].clients) == 3
    with pytest.raises(SettingError, match="alpha cannot be set: the federation 'custom' is already divided"):
        fedcat.run(dataset=fed, net=nn.Linear(4, 3), alpha=0.1)
    with pytest.raises(SettingError, match="clients must be 12 as in the federation, got 5"):
        fedcat.run(dataset=fed, net=nn.Linear(4, 3), clients=5)
    with pytest.raises(
        SettingError, match="net must be given: dataset '<custom>' has no default net; mlp fits any data"
    ):
        fedcat.run(dataset=fed)


def test_the_client_that_is_there_is_found():
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(SettingError, match="needs CUDA, which is not available here"):
            find_device("cuda")


def test_a_datasets_own_defaults_are_checked():
    data = fedcat.Dataset.from_arrays(np.zeros((20, 2)), np.arange(20) % 2, defaults={"devise": 3})
    with pytest.raises(SettingError, match="unknown setting 'devise': did you mean 'device"):
        Builder().build({"dataset": data, "net": nn.Linear(2, 2)})


def test_options_are_written_with_their_defaults():
    settings = Builder().build({**SHORT, "method": "fedcat-dc", "options": {"fedcat-dc": {"epsilon": 0.1}}}).settings
    options = {"grouping": False, "concatenation": True, "epsilon": 0.1, "lambda": 1.0, "retry": 0}
    assert settings.options == {"fedcat-dc": options}


def test_threads_are_as_before_after_a_run(monkeypatch):
    before = torch.get_num_threads()
    counts = []
    drive = Driver.run
    monkeypatch.setattr(Driver, "run", lambda *args: counts.append(torch.get_num_threads()) or drive(*args))
    fedcat.run(**SHORT, threads=before + 1)
    assert counts == [before + 1]
    assert torch.get_num_threads() == before


def test_runs_in_several_threads_wait_for_each_other(monkeypatch):
    active, most = [], []
    drive = Driver.run

    def watched(*args):
        active.append(1)
        most.append(len(active))
        time.sleep(0.1)
        drive(*args)
        active.pop()

    monkeypatch.setattr(Driver, "run", watched)
    alone = [fedcat.run(**SHORT, seed=seed, workers=1).accuracy for seed in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        beside = list(pool.map(lambda seed: fedcat.run(**SHORT, seed=seed, workers=1).accuracy, (0, 1)))
    assert beside == alone
    assert most == [1, 1, 1, 1]


def test_engines_are_released_whatever_happens(monkeypatch):
    released = []
    monkeypatch.setattr(SequentialEngine, "release", lambda self: released.append(self))
    monkeypatch.setattr(Run, "result", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        fedcat.run(**SHORT, engine="sequential", workers=1)
    assert len(released) == 1


def test_a_result_keeps_no_run_alive(monkeypatch):
    made = []
    start = Run.__init__
    monkeypatch.setattr(Run, "__init__", lambda self, *args: made.append(ref(self)) or start(self, *args))
    result = fedcat.run(**SHORT)
    gc.collect()
    assert [one() for one in made] == [None]
    assert result.model() is not None


def test_building_a_run_leaves_pytorchs_threads_alone():
    before = torch.get_num_threads()
    made = Builder().build({**SHORT, "threads": before + 1})
    assert torch.get_num_threads() == before
    assert (made.decisions.threads, made.settings.threads) == (before + 1, before + 1)
    made = Builder().build(SHORT)
    assert (made.decisions.threads, made.settings.threads) == (before, None)


def test_options_that_are_no_plain_values_are_not_mistaken_for_each_other():
    def load(*, table=None):
        return fedcat.Dataset.from_arrays(table, np.arange(len(table)) % 2)

    builder = Builder()
    first, second = np.zeros((2000, 1)), np.zeros((2000, 1))
    second[1000] = 5.0
    words = {"dataset": load, "net": torch.nn.Linear(1, 2), "clients": 2, "partition": "iid"}
    found = [builder.divide({**words, "dataset_options": {"table": table}})[1] for table in (first, second)]
    assert [float(max(fed.train.x.max(), fed.test.x.max())) for fed in found] == [0.0, 5.0]


def test_a_functions_own_data_dir_stays_where_the_user_names_none(tmp_path):
    seen = []

    def load(*, data_dir="their/place", seed=7):
        seen.append((data_dir, seed))
        return fedcat.load_dataset("digits")

    Builder().divide({"dataset": load})
    Builder().divide({"dataset": load, "data_dir": str(tmp_path), "seed": 3, "data_seed": 4})
    assert seen == [("their/place", 0), (str(tmp_path), 4)]


def test_a_fraction_that_is_given_beats_a_datasets_own_number_of_clients_a_round():
    data = fedcat.Dataset.from_arrays(np.zeros((40, 2)), np.arange(40) % 2, defaults={"clients": 10, "per_round": 5})
    assert Builder().divide({"dataset": data, "partition": "iid", "min_samples": 1})[0].k == 5
    given = {"dataset": data, "partition": "iid", "min_samples": 1, "fraction": 0.2}
    assert Builder().divide(given)[0].k == 2


def test_a_model_that_the_method_does_not_offer_is_refused():
    with pytest.raises(SettingError, match="unknown model of method 'fedavg' to evaluate 'copies'"):
        Builder().build({**SHORT, "method": "fedavg", "evaluate": ["copies"]})
