import json
import tomllib

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedcat
from fedcat.core.errors import SettingError
from fedcat.core.files import save_tensors
from fedcat.models.layout import Layout
from fedcat.protocol.ledger import HopRecord
from fedcat.runs.folder import RunFolder, model_tensors
from fedcat.runs.history import Record
from fedcat.runs.run_files import COLUMNS, read_history, read_model, read_summary

SHORT = {"dataset": "digits", "alpha": 0.5, "clients": 20, "rounds": 4, "epochs": 1, "evaluate_every": 2}


@pytest.fixture
def finished(tmp_path):
    return fedcat.run(method="fedcat", out=tmp_path / "run", per_client=True, **SHORT)


def test_the_folder_holds_everything(finished):
    folder = finished.folder
    assert {p.name for p in folder.iterdir()} == {
        "settings.toml",
        "history.jsonl",
        "traffic.csv",
        "model.safetensors",
        "run.json",
        "clients.json",
        "checkpoint",
    }
    history = read_history(folder)
    assert history == finished.history
    assert [record.round for record in history] == [1, 2, 3, 4]
    summary = json.loads((folder / "run.json").read_text())
    assert summary["status"] == "finished"
    assert summary["partition_hash"] == finished.federation.hash
    assert summary["versions"]["fedcat"] == fedcat.__version__
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["decisions"]["engine"] == "stacked"
    assert summary["decisions"]["reason"]
    clients = json.loads((folder / "clients.json").read_text())
    assert [d["samples"] for d in clients] == finished.federation.sizes.tolist()


def test_the_traffic_file_adds_up_to_the_history(finished):
    lines = [line.split(",") for line in (finished.folder / "traffic.csv").read_text().splitlines()]
    assert lines[0] == ["round", "client", "copy", "attempt", "down", "up", "evaluation"]
    last = finished.history[-1]
    assert sum(int(line[4]) for line in lines[1:]) == last.down
    assert sum(int(line[5]) for line in lines[1:]) == last.up
    for record in finished.history:
        mine = sorted(int(line[1]) for line in lines[1:] if int(line[0]) == record.round and line[1])
        assert mine == sorted(record.clients)


def test_the_settings_file_gives_the_same_numbers_again(finished, tmp_path):
    given = tomllib.loads((finished.folder / "settings.toml").read_text())
    again = fedcat.run(out=tmp_path / "again", **given)
    assert (tmp_path / "again" / "settings.toml").read_text() == (finished.folder / "settings.toml").read_text()
    assert (tmp_path / "again" / "traffic.csv").read_text() == (finished.folder / "traffic.csv").read_text()
    for a, b in zip(finished.history, again.history, strict=True):
        assert (a.accuracy, a.loss, a.train_loss, a.clients) == (b.accuracy, b.loss, b.train_loss, b.clients)
    stored, fresh = (load_file(f / "model.safetensors") for f in (finished.folder, again.folder))
    assert all(torch.equal(stored[n], fresh[n]) for n in stored)


def test_the_model_comes_back_trained(finished):
    net = fedcat.load_model(finished.folder)
    assert not net.training
    test = finished.federation.test
    with torch.no_grad():
        accuracy = (net(test.inputs(slice(None), torch.float32)).argmax(1) == test.y).double().mean().item()
    assert accuracy == pytest.approx(finished.accuracy)
    for a, b in zip(net.parameters(), finished.model().parameters(), strict=True):
        assert torch.equal(a, b)


class Odd(nn.Module):
    """Tied weights, a frozen layer and batch normalisation, for inputs of 64 numbers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.b = nn.Linear(64, 64)
        self.b.weight = self.a.weight
        self.out = nn.Linear(64, 10)
        self.out.bias.requires_grad_(False)

    def forward(self, x):
        return self.out(self.b(torch.tanh(self.norm(self.a(x.flatten(1))))))


def test_tied_frozen_and_integer_tensors_survive_the_file(tmp_path):
    torch.manual_seed(0)
    net = Odd()
    net.norm.num_batches_tracked += 5
    layout = Layout(net)
    row = layout.pack(net) + 1
    save_tensors(tmp_path / "m", model_tensors(layout, row))
    back = read_model(tmp_path / "m", Odd())
    assert torch.equal(layout.pack(back), row)
    assert torch.equal(back.out.bias, net.out.bias)
    assert back.b.weight is back.a.weight
    assert int(back.norm.num_batches_tracked) == 5


def test_a_users_net_is_needed_to_load_a_users_net(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    result = fedcat.run(net=net, out=tmp_path / "run", **SHORT)
    with pytest.raises(SettingError, match=r"'<Sequential>' .* pass the net"):
        fedcat.load_model(tmp_path / "run")
    back = fedcat.load_model(tmp_path / "run", net=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    assert torch.equal(back[1].weight, result.model()[1].weight)
    with pytest.raises(SettingError, match="net does not match"):
        fedcat.load_model(tmp_path / "run", net=nn.Linear(64, 10))
    assert not torch.equal(net[1].weight, back[1].weight)


def test_a_net_that_can_be_imported_is_found_again(tmp_path):
    result = fedcat.run(net=Odd, out=tmp_path / "run", **{**SHORT, "min_samples": 2})
    assert result.settings.net == f"{__name__}:Odd"
    assert torch.equal(fedcat.load_model(tmp_path / "run", trust=True).a.weight, result.model().a.weight)


def test_a_model_comes_back_in_its_own_precision(tmp_path):
    result = fedcat.run(out=tmp_path / "run", dtype="float64", **SHORT)
    back = fedcat.load_model(tmp_path / "run")
    assert back.head.weight.dtype == torch.float64
    assert torch.equal(back.head.weight, result.model().head.weight)


def test_objects_without_a_name_are_marked_in_the_settings(tmp_path):
    data = fedcat.Dataset.from_arrays(torch.rand(100, 1, 8, 8), torch.arange(100) % 10, name="digits")
    fedcat.run(out=tmp_path / "run", **{**SHORT, "dataset": data, "net": "digits-cnn", "min_samples": 1})
    given = tomllib.loads((tmp_path / "run" / "settings.toml").read_text())
    assert given["dataset"] == "<digits>"
    with pytest.raises(SettingError, match="dataset '<digits>' was passed as a Python object"):
        fedcat.run(**given)


def test_a_run_that_fails_in_its_first_round_leaves_nothing(tmp_path):
    with pytest.raises(SettingError, match="selector must return 2 clients"):
        fedcat.run(method="fedavg", selector=lambda round, rng, samples, k: [0], out=tmp_path / "a" / "b", **SHORT)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(finished, tmp_path):
    with pytest.raises(SettingError, match="already holds a run"):
        fedcat.run(out=finished.folder, **SHORT)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(SettingError, match="is not empty"):
        fedcat.run(out=tmp_path / "mine", **SHORT)
    with pytest.raises(SettingError, match="cannot be written"):
        fedcat.run(out=finished.folder / "run.json" / "below", **SHORT)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(SettingError, match=r"holds no finished run: run\.json is missing"):
        fedcat.load_model(tmp_path)


class Stop(fedcat.Callback):
    """Interrupts everything after a round of a run."""

    def __init__(self, round, name=None):
        self.round, self.name = round, name

    def on_round(self, run, record):
        if record.round == self.round and self.name in (None, run.name):
            raise KeyboardInterrupt


def test_an_interrupt_keeps_every_round_of_every_run(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fedcat.compare(["fedavg", "fedcat"], seeds=2, out=tmp_path / "c", callbacks=[Stop(2, "fedavg-seed1")], **SHORT)
    for folder in (tmp_path / "c").glob("*/"):
        assert json.loads((folder / "run.json").read_text())["rounds"] == len(read_history(folder)) == 2


def test_the_accuracy_of_an_interrupted_run_is_that_of_the_model_it_kept(tmp_path):
    words = {**SHORT, "rounds": 20, "evaluate_every": 3, "lr": 0.2}
    with pytest.raises(KeyboardInterrupt):
        fedcat.run(method="fedavg", out=tmp_path / "run", callbacks=[Stop(5)], **words)
    test = fedcat.DATASETS.get("digits")().test
    with torch.no_grad():
        logits = fedcat.load_model(tmp_path / "run")(test.inputs(slice(None), torch.float32))
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    assert summary["metrics"]["global"]["accuracy"]["final"] == pytest.approx(
        (logits.argmax(1) == test.y).double().mean().item()
    )
    assert summary["metrics"]["global"]["accuracy"]["final"] != read_history(tmp_path / "run")[2].accuracy


def test_runs_that_were_done_before_an_interrupt_are_finished(tmp_path):
    sweep, short = {"rounds": [2, 20]}, {name: value for name, value in SHORT.items() if name != "rounds"}
    with pytest.raises(KeyboardInterrupt):
        fedcat.compare(["fedavg"], 1, sweep, out=tmp_path / "c", callbacks=[Stop(4)], **{**short, "evaluate_every": 2})
    status = {p.name: json.loads((p / "run.json").read_text())["status"] for p in (tmp_path / "c").glob("*/")}
    assert status == {"fedavg-rounds=2-seed0": "finished", "fedavg-rounds=20-seed0": "interrupted"}


class Breaking(fedcat.FedAvg):
    """Breaks in its second round, in one of several ways."""

    def __init__(self, context, how="raise"):
        super().__init__(context)
        self.how = how

    def reduce(self, hops, replies):
        mean = super().reduce(hops, replies)
        if self.round == 1 and self.how == "raise":
            raise RuntimeError("no idea")
        if self.round == 1 and self.how == "exit":
            raise SystemExit(3)
        if self.round == 1 and self.how == "shape":
            return mean[:3]
        if self.round == 1 and self.how == "type":
            return mean.cpu().numpy()
        return mean * torch.nan if self.round == 1 and self.how == "nan" else mean


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raise", RuntimeError, "no idea"),
        ("exit", SystemExit, "3"),
        ("shape", SettingError, r"method Breaking must return a row .* from reduce, got torch.float32 of shape \(3,\)"),
        ("type", SettingError, r"method Breaking must return a row .* from reduce, got ndarray"),
    ],
)
def test_a_method_that_breaks_leaves_a_failed_run_that_says_why(how, error, message, tmp_path):
    words = {**SHORT, "method": Breaking, "options": {"Breaking": {"how": how}}, "out": tmp_path / "run"}
    with pytest.raises(error, match=message):
        fedcat.run(**words)
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    assert summary["status"] == "failed"
    assert summary["rounds"] == 1
    fedcat.load_model(tmp_path / "run")
    if how != "exit":
        assert error.__name__ in summary["notes"][-1]


def test_a_run_beside_one_that_breaks_keeps_its_model(tmp_path):
    with pytest.raises(RuntimeError, match="no idea"):
        fedcat.compare(["fedavg", Breaking], seeds=1, out=tmp_path / "c", **SHORT)
    fedcat.load_model(tmp_path / "c" / "fedavg-seed0")


def test_a_comparison_that_cannot_start_leaves_nothing(tmp_path):
    with pytest.raises(SettingError, match="selector must return"):
        fedcat.compare(
            ["fedavg", "fedprox"], 2, selector=lambda round, rng, samples, k: [0], out=tmp_path / "c", **SHORT
        )
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_finite_is_noted():
    with pytest.warns(UserWarning, match="the model has collapsed by round 2: it contains numbers that are not finite"):
        result = fedcat.run(method=Breaking, options={"Breaking": {"how": "nan"}}, **SHORT)
    assert "the global model contains numbers that are not finite" in result.summary.notes


def test_an_interrupt_keeps_what_there_is(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fedcat.run(out=tmp_path / "run", callbacks=[Stop(3)], **SHORT)
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("interrupted", 3)
    assert len(read_history(tmp_path / "run")) == 3
    fedcat.load_model(tmp_path / "run")


def record(round, client):
    hops = [HopRecord(round - 1, 0, 0, client, 10, 20, "arrived")]
    return Record(round, up=20 * round, down=10 * round, hops=hops)


def test_a_round_that_an_interrupt_cut_short_is_written_once(tmp_path):
    folder = RunFolder(tmp_path / "run", "")
    folder.add(record(1, 3))
    whole = folder._put

    def write_and_stop(name, end, text):
        if name == "history.jsonl":
            whole(name, end, text[:3])
            raise KeyboardInterrupt
        return whole(name, end, text)

    folder._put = write_and_stop
    with pytest.raises(KeyboardInterrupt):
        folder.add(record(2, 4))
    folder._put = whole
    assert folder.rounds == 1
    folder.add(record(2, 4))
    assert read_history(folder.path) == [record(1, 3), record(2, 4)]
    assert (folder.path / "traffic.csv").read_text() == COLUMNS + "1,3,0,0,10,20,0\n2,4,0,0,10,20,0\n"


def test_the_summary_comes_back_as_it_was(finished):
    plain = json.loads((finished.folder / "run.json").read_text())
    assert plain["version"] == 2
    assert read_summary(finished.folder) == finished.summary
    summary = finished.summary
    assert summary.name == "fedcat-seed0"
    assert summary.rounds == 4
    assert summary.net == {"parameters": sum(p.numel() for p in finished.model().parameters()), "buffers": 0}
    assert (summary.input_shape, summary.classes, summary.outputs) == ([1, 8, 8], 10, 10)
    last = finished.history[-1]
    assert summary.bytes == {"up": last.up, "down": last.down, "evaluation": 20 * (13_706 * 4 + 8 * 3)}  # per_client
    lines = (finished.folder / "traffic.csv").read_text().splitlines()
    assert lines[-1] == f"4,,,,0,0,{summary.bytes['evaluation']}"
    assert summary.figures().best == max(finished.accuracies) == finished.best


def test_a_summary_of_another_format_is_an_error_with_both_versions(finished):
    file = finished.folder / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 1}))
    with pytest.raises(SettingError, match="written in format 1, and this version of fedcat reads 2"):
        fedcat.load_model(finished.folder)
