"""A run that ended in whatever way goes on from its last good checkpoint, with the bits of one that did not end."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers import QUICK
from safetensors.torch import load_file
from torch import nn

import fedcat
from fedcat.core.errors import SettingError
from fedcat.core.files import locked
from fedcat.methods import METHODS
from fedcat.runs.checkpoint import LAST, PREVIOUS, Saved
from fedcat.runs.listing import listed
from fedcat.runs.run_files import read_history
from fedcat.runs.summary import Decisions

SOURCE = Path(__file__).parents[2] / "src"
SHORT = {"dataset": "digits", "clients": 20, "per_round": 4, "epochs": 1, "evaluate_every": 3, "average": 0.9}
NAMES = [name for name, _ in METHODS]


class CutError(BaseException):
    """Ends a run as a signal that comes twice does: at once, without a last checkpoint."""


class Cut(fedcat.Callback):
    """Ends a run in a round, unless it goes on from a checkpoint."""

    def __init__(self, round, end=CutError):
        self.round, self.end = round, end

    def on_round(self, run, record):
        if record.round == self.round and not run.resumed:
            raise self.end


def cut(path, round=7, **given):
    with pytest.raises(CutError):
        fedcat.run(out=path, callbacks=[Cut(round)], **{**SHORT, "rounds": 10, "checkpoint_every": "3r", **given})


def lines(path):
    """Return a history without timings."""
    found = [json.loads(line) for line in (path / "history.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in found]


def assert_same(a, b):
    assert lines(a) == lines(b)
    assert (a / "traffic.csv").read_text() == (b / "traffic.csv").read_text()
    for file in ("model.safetensors", "average.safetensors"):
        one, other = load_file(a / file), load_file(b / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    first, second = (json.loads((path / "run.json").read_text()) for path in (a, b))
    for name in ("status", "rounds", "metrics", "bytes", "relative_traffic", "partition_hash", "decisions"):
        assert first[name] == second[name]


@pytest.fixture(autouse=True)
def quiet():
    """Let notes pass that say where a run went on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*resumed after|it had no checkpoint|.*FedCat aggregates")
        yield


@pytest.mark.parametrize("method", NAMES)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(method, tmp_path):
    words = {"method": method, "method_options": QUICK.get(method, {})}
    fedcat.run(out=tmp_path / "whole", rounds=10, **words, **SHORT)
    cut(tmp_path / "cut", **words)
    assert len(lines(tmp_path / "cut")) == 7  # a round beyond the checkpoint
    result = fedcat.resume(tmp_path / "cut")
    assert result.summary.notes[-1] == "resumed after round 6"
    assert_same(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize("method", ["fedcat", "fedcat-gc", "scaffold", "fedgen", "clusamp", "fedcluster"])
def test_more_rounds_are_those_of_a_longer_run(method, tmp_path):
    """The last cycle is left open in the checkpoint, and the last round was evaluated only because it was the last."""
    words = {**SHORT, "method": method, "method_options": QUICK.get(method, {})}
    fedcat.run(out=tmp_path / "whole", rounds=10, **words)
    fedcat.run(out=tmp_path / "short", rounds=5, **words)
    assert lines(tmp_path / "short")[-1]["metrics"]
    result = fedcat.resume(tmp_path / "short", rounds=10)
    assert "metrics" not in lines(tmp_path / "short")[4]
    assert result.settings.rounds == 10
    assert_same(tmp_path / "short", tmp_path / "whole")


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path):
    fedcat.run(method="fedcat", out=tmp_path / "whole", rounds=6, **SHORT)
    cut(tmp_path / "cut", 2, method="fedcat", rounds=6)
    assert not (tmp_path / "cut" / "checkpoint").exists()
    (tmp_path / "cut" / "run.json").unlink()  # which a killed process does not write
    assert fedcat.resume(tmp_path / "cut").summary.notes[-1] == "it had no checkpoint yet, and was begun again"
    assert_same(tmp_path / "cut", tmp_path / "whole")


def test_a_complete_run_is_not_run_again(tmp_path):
    whole = fedcat.run(method="fedcat", out=tmp_path / "run", rounds=4, per_client=True, **SHORT)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    again = fedcat.resume(tmp_path / "run")
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    assert again.history == whole.history
    assert (again.summary, again.clients) == (whole.summary, whole.clients)
    assert torch.equal(again.model().head.weight, whole.model().head.weight)
    assert torch.equal(again.model("average").head.weight, whole.model("average").head.weight)


def test_a_comparison_goes_on_as_a_whole_and_skips_what_is_complete(tmp_path):
    methods, words = ["fedavg", "fedcat", "scaffold"], {**SHORT, "rounds": 8}
    whole = fedcat.compare(methods, 2, out=tmp_path / "whole", **words)

    class Ends(fedcat.Callback):
        """Ends fedavg's runs early as stopped, and all others at once."""

        def on_round(self, run, record):
            if record.round == 7 and run.settings.method == "scaffold" and not run.resumed:
                raise CutError

    with pytest.raises(CutError):
        fedcat.compare(methods, 2, out=tmp_path / "cut", callbacks=[Ends], checkpoint_every="2r", **words)
    plan = json.loads((tmp_path / "cut" / "comparison.json").read_text())
    assert [line["label"] for line in plan] == methods
    folders = sorted(path.name for path in (tmp_path / "cut").glob("*/"))
    fedcat.resume(tmp_path / "cut" / "fedavg-seed0")  # one of them alone: it is complete afterwards
    stamp = (tmp_path / "cut" / "fedavg-seed0" / "run.json").stat().st_mtime_ns
    found = fedcat.resume(tmp_path / "cut")
    assert (tmp_path / "cut" / "fedavg-seed0" / "run.json").stat().st_mtime_ns == stamp
    assert sorted(path.name for path in (tmp_path / "cut").glob("*/")) == folders
    for name in folders:
        assert_same(tmp_path / "cut" / name, tmp_path / "whole" / name)
    assert [one.mean_std("last_five") for one in found] == [one.mean_std("last_five") for one in whole]
    assert [line["label"] for line in json.loads((tmp_path / "cut" / "comparison.json").read_text())] == methods
    longer = fedcat.resume(tmp_path / "cut", rounds=10)
    fedcat.compare(methods, 2, out=tmp_path / "longer", **{**words, "rounds": 10})
    for name in folders:
        assert_same(tmp_path / "cut" / name, tmp_path / "longer" / name)
    assert [len(line.results[0].history) for line in longer] == [10, 10, 10]


def test_a_users_callback_gets_its_state_back(tmp_path):
    class Count(fedcat.Callback):
        def __init__(self):
            self.rounds = 0

        def on_round(self, run, record):
            self.rounds += 1

        def state(self):
            return {"rounds": self.rounds}

        def restore(self, state):
            self.rounds = state["rounds"]

    words = {**SHORT, "rounds": 8, "method": "fedavg", "checkpoint_every": "2r"}
    with pytest.raises(CutError):
        fedcat.run(out=tmp_path / "run", callbacks=[Cut(5), Count], **words)
    count = Count()
    fedcat.resume(tmp_path / "run", callbacks=[count])
    assert count.rounds == 8


def test_a_state_that_cannot_be_saved_is_told_and_does_not_end_the_run(tmp_path):
    class Odd(fedcat.Callback):
        def state(self):
            return {"seen": {1, 2}}

    with pytest.warns(UserWarning, match=r"is not saved and cannot be resumed: .*\.seen is a set"):
        result = fedcat.run(out=tmp_path / "run", callbacks=[Odd], rounds=2, **SHORT)
    assert result.status == "finished"
    assert not (tmp_path / "run" / "checkpoint").exists()


# What is refused


def test_other_settings_are_refused_with_both_values(tmp_path):
    cut(tmp_path / "run", method="fedavg")
    file = tmp_path / "run" / "settings.toml"
    file.write_text(file.read_text().replace("epochs = 1", "epochs = 2").replace("alpha = 0.5", "alpha = 0.7"))
    with pytest.raises(SettingError, match=r"epochs was 1 and is 2; partition_options.alpha was 0.5 and is 0.7"):
        fedcat.resume(tmp_path / "run")
    assert len(lines(tmp_path / "run")) == 7


def test_what_cannot_change(tmp_path):
    cut(tmp_path / "run", method="fedavg", lr_schedule="cosine")
    with pytest.raises(SettingError, match="rounds can be raised, not lowered: they were 10, got 8"):
        fedcat.resume(tmp_path / "run", rounds=8)
    with pytest.raises(SettingError, match="rounds cannot be raised from 10 to 20: the lr_schedule 'cosine' depends"):
        fedcat.resume(tmp_path / "run", rounds=20)
    with pytest.raises(SettingError, match="lr cannot change when a run is resumed: only rounds, checkpoint_every"):
        fedcat.resume(tmp_path / "run", lr=0.1)
    with pytest.raises(SettingError, match="unknown setting 'round': did you mean 'rounds'"):
        fedcat.resume(tmp_path / "run", round=20)
    with pytest.raises(SettingError, match="net was 'digits-cnn' and is 'mlp'"):
        fedcat.resume(tmp_path / "run", net="mlp")
    assert fedcat.resume(tmp_path / "run").status == "finished"


def test_other_data_is_refused_with_both_hashes(tmp_path):
    def data(seed):
        torch.manual_seed(seed)
        return fedcat.Dataset.from_arrays(torch.rand(200, 1, 8, 8), torch.arange(200) % 10, name="mine")

    words = {"dataset": data(0), "net": "digits-cnn", "min_samples": 1}
    cut(tmp_path / "run", method="fedavg", **words)
    with pytest.raises(SettingError, match="'<mine>' was passed as a Python object"):
        fedcat.resume(tmp_path / "run")
    with pytest.raises(SettingError, match=r"its federation is '[0-9a-f]{64}', this one's '[0-9a-f]{64}'; the data"):
        fedcat.resume(tmp_path / "run", dataset=data(1))
    assert fedcat.resume(tmp_path / "run", dataset=data(0)).status == "finished"
    with pytest.raises(SettingError, match="its federation is"):  # also of a run that is complete
        fedcat.resume(tmp_path / "run", dataset=data(1))


def test_options_that_were_not_set_are_refused_if_they_change_anything(tmp_path):
    cut(tmp_path / "run", method="fedavg", aggregator="clipped", server_optimizer="momentum")
    file = tmp_path / "run" / "settings.toml"
    before = file.read_text()
    for table, old, new in (("aggregator", "norm = 0.01", "not set"), ("server", "momentum = 0.1", "not set")):
        assert f"[{table}_options]" not in before
        file.write_text(f"{before}\n[{table}_options]\n{old}\n")
        with pytest.raises(SettingError, match=f"{table}_options.* was '{new}' and is 0"):
            fedcat.resume(tmp_path / "run")
    file.write_text(f"{before}\n[aggregator_options]\nnorm = 0.0\n")  # as if a version before had not known it
    assert fedcat.resume(tmp_path / "run").status == "finished"


def test_a_comparison_gets_the_parts_of_its_runs_again(tmp_path):
    class Mine(fedcat.FedAvg):
        pass

    words = {**SHORT, "rounds": 8, "checkpoint_every": "2r"}
    whole = fedcat.compare(["fedavg", Mine], 1, **words)
    with pytest.raises(CutError):
        fedcat.compare(["fedavg", Mine], 1, out=tmp_path / "cut", callbacks=[Cut(5)], **words)
    with pytest.raises(SettingError, match="'<Mine>' was passed as a Python object"):
        fedcat.resume(tmp_path / "cut")
    with pytest.raises(SettingError, match="net cannot change when a comparison is resumed"):
        fedcat.resume(tmp_path / "cut", method=Mine, net="mlp")
    found = fedcat.resume(tmp_path / "cut", method=[Mine])
    assert [one.results[0].history[-1].loss for one in found] == [one.results[0].history[-1].loss for one in whole]


def test_a_run_that_was_stopped_has_the_traffic_of_one_that_was_not(tmp_path):
    class Stop(fedcat.Callback):
        def on_round(self, run, record):
            if record.round == 5 and not run.resumed:
                run.stop("enough")

    words = {**SHORT, "method": "fedcat", "rounds": 8, "per_client": True}
    fedcat.run(out=tmp_path / "whole", **words)
    with pytest.warns(UserWarning, match="stopped after round 5"):
        fedcat.run(out=tmp_path / "stopped", callbacks=[Stop], **words)
    assert (tmp_path / "stopped" / "clients.json").exists()
    assert fedcat.resume(tmp_path / "stopped").status == "finished"
    assert_same(tmp_path / "stopped", tmp_path / "whole")


def test_a_directory_is_held_by_whatever_name(tmp_path, monkeypatch):
    with pytest.raises(CutError):
        fedcat.compare(["fedavg"], 1, out=tmp_path / "all", callbacks=[Cut(5)], **SHORT, rounds=8)
    run = tmp_path / "all" / "fedavg-seed0"
    (run / "run.json").unlink()
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(run)
    with locked(tmp_path / "all"):
        for path in (tmp_path / "link", "."):
            with pytest.raises(SettingError, match="is in use by this process"):
                fedcat.resume(path)
            assert listed(Path(path)).status == "running"


def test_forged_numbers_are_damage(tmp_path):
    fedcat.run(out=tmp_path / "run", method="fedavg", rounds=2, **SHORT)
    file = tmp_path / "run" / "run.json"
    before = file.read_text()
    forged = [json.loads(before) for _ in range(3)]
    forged[0]["metrics"]["global"]["accuracy"]["final"] = "x"
    forged[1]["metrics"]["global"]["accuracy"]["best"] = 10**400
    del forged[2]["bytes"]["up"]
    for content in forged:
        file.write_text(json.dumps(content))
        assert listed(tmp_path / "run").status == "damaged"
        with pytest.raises(SettingError, match=r"run.json' is damaged"):
            fedcat.resume(tmp_path / "run")
    file.write_text(before)
    settings = tmp_path / "run" / "settings.toml"
    settings.write_text(settings.read_text().replace("rounds = 2", "rounds = inf"))
    assert listed(tmp_path / "run").status == "damaged"


def test_parts_that_are_objects_are_passed_again(tmp_path):
    class Mine(fedcat.FedAvg):
        pass

    def net():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    words = {"method": Mine, "net": net, "server_optimizer": "momentum", "server_lr": 0.5, "metrics": ["macro-f1"]}
    fedcat.run(out=tmp_path / "whole", rounds=10, **SHORT, **words)
    cut(tmp_path / "cut", **words)
    fedcat.resume(tmp_path / "cut", method=Mine, net=net)
    assert_same(tmp_path / "cut", tmp_path / "whole")


def test_a_strangers_directory_imports_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "stranger_net.py").write_text(
        "from pathlib import Path\nfrom torch import nn\nPath('mark').write_text('x')\n"
        "def net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    fedcat.run(method="fedavg", net="stranger_net:net", out="run", rounds=2, **SHORT)
    Path("mark").unlink()
    sys.modules.pop("stranger_net")
    with pytest.raises(SettingError, match="net 'stranger_net:net' would import the module 'stranger_net'"):
        fedcat.resume("run", rounds=3)
    assert not Path("mark").exists()
    assert fedcat.resume("run", rounds=3, net="stranger_net:net").summary.rounds == 3
    assert fedcat.resume("run", rounds=4, trust=True).summary.rounds == 4


def test_changed_versions_and_decisions_are_warned_about(tmp_path, monkeypatch):
    cut(tmp_path / "run", method="fedavg")
    monkeypatch.setattr("fedcat.runs.resume.versions", lambda: {"torch": "9.9"})
    with pytest.warns(UserWarning, match=r"numbers may differ .*: torch was \d.*, now 9.9, threads was \d+, now \d"):
        assert fedcat.resume(tmp_path / "run", threads=torch.get_num_threads() + 1).status == "finished"


def test_decisions_that_were_left_open_are_kept(tmp_path):
    """On a machine with other cores, and from a shell with other limits, the same numbers of threads are used."""
    cut(tmp_path / "run", method="fedavg")
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        result = fedcat.resume(tmp_path / "run")
    finally:
        torch.set_num_threads(before)
    assert result.summary.decisions.threads == before
    assert result.settings.threads is None


def test_two_processes_on_one_directory(tmp_path):
    cut(tmp_path / "run", method="fedavg")
    with locked(tmp_path / "run"), pytest.raises(SettingError, match="is in use by this process"):
        fedcat.resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "holds no run that could be resumed: settings.toml is missing"),
        (lambda path: (path.mkdir(), (path / "comparison.json").write_text("[{]")), "comparison.json' is damaged"),
        (lambda path: (path.mkdir(), (path / "comparison.json").write_text("[]")), "it must list labels"),
        (
            lambda path: (
                path.mkdir(),
                (path / "comparison.json").write_text('[{"label": "a", "runs": [{"seed": 0, "folder": "../../x"}]}]'),
            ),
            "names a directory that is not its own",
        ),
    ],
)
def test_what_is_no_run(tmp_path, make, message):
    make(tmp_path / "run")
    with pytest.raises(SettingError, match=message):
        fedcat.resume(tmp_path / "run")


def test_a_run_without_checkpoints_says_so(tmp_path):
    whole = fedcat.run(method="fedavg", out=tmp_path / "a", rounds=2, checkpoint_every="never", **SHORT)
    assert not (tmp_path / "a" / "checkpoint").exists()
    with pytest.raises(SettingError, match="cannot be resumed: it was run without checkpoints"):
        fedcat.resume(tmp_path / "a", rounds=4)
    assert fedcat.resume(tmp_path / "a").history == whole.history  # it is complete
    fedcat.run(method="fedavg", out=tmp_path / "b", rounds=2, **SHORT)
    shutil.rmtree(tmp_path / "b" / "checkpoint")
    with pytest.raises(SettingError, match=r"it has ended \(finished\) and left no checkpoint"):
        fedcat.resume(tmp_path / "b", rounds=4)
    (tmp_path / "a" / "run.json").unlink()
    with pytest.raises(SettingError, match="it was run without checkpoints"):
        fedcat.resume(tmp_path / "a")


def test_a_complete_run_of_a_comparison_needs_no_checkpoint(tmp_path):
    fedcat.compare(["fedavg", "fedcat"], 1, out=tmp_path / "c", rounds=4, **SHORT)
    shutil.rmtree(tmp_path / "c" / "fedavg-seed0" / "checkpoint")
    (tmp_path / "c" / "fedcat-seed0" / "run.json").unlink()
    assert [line.label for line in fedcat.resume(tmp_path / "c")] == ["fedavg", "fedcat"]


def test_notes_about_an_end_do_not_outlive_it(tmp_path):
    class Stop(fedcat.Callback):
        def on_round(self, run, record):
            if record.round == 3 and not run.resumed:
                run.stop("enough")

    with pytest.warns(UserWarning, match="stopped after round 3 of 6: enough"):
        first = fedcat.run(method="fedavg", out=tmp_path / "run", rounds=6, dropout=0.5, callbacks=[Stop], **SHORT)
    assert first.summary.notes[-1].startswith("the replies of")
    with pytest.warns(UserWarning, match="the replies of"):
        again = fedcat.resume(tmp_path / "run")
    resumed, lost = again.summary.notes
    assert resumed == "resumed after round 3"
    assert " of 24 hops are missing" in lost


def test_the_state_of_a_callback_may_change_its_type(tmp_path):
    class Best(fedcat.Callback):
        def __init__(self):
            self.best = 0

        def on_round(self, run, record):
            self.best = max(self.best, record.train_loss)

        def state(self):
            return {"best": self.best}

        def restore(self, state):
            self.best = state["best"]

    words = {**SHORT, "rounds": 8, "method": "fedavg", "checkpoint_every": "2r"}
    with pytest.raises(CutError):
        fedcat.run(out=tmp_path / "run", callbacks=[Cut(5), Best], **words)
    other = Best()
    fedcat.resume(tmp_path / "run", callbacks=[other])
    assert other.best > 0


def test_a_run_of_a_cpu_stays_there(tmp_path, monkeypatch):
    cut(tmp_path / "run", method="fedavg", device="cpu")
    build = "fedcat.runs.build.Decisions"
    monkeypatch.setattr(build, lambda device, *rest: Decisions("cuda:0", *rest))
    with pytest.raises(SettingError, match="device must be cpu: the run began on a CPU, got 'cuda:0'"):
        fedcat.resume(tmp_path / "run")


# Damage


def damaged(path, how):
    content = bytearray(path.read_bytes())
    if how == "truncated":
        content = content[: len(content) // 2]
    elif how == "a flipped bit":
        content[len(content) // 2] ^= 4
    else:
        content = b""
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "a flipped bit", "empty"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, how):
    fedcat.run(method="scaffold", out=tmp_path / "whole", rounds=10, **SHORT)
    cut(tmp_path / "cut", method="scaffold")
    assert Saved.read(tmp_path / "cut" / "checkpoint" / PREVIOUS).state["rounds"] == 3
    damaged(tmp_path / "cut" / "checkpoint" / LAST, how)
    with pytest.warns(UserWarning, match=r"the last checkpoint was passed over: '.*last\.safetensors' is damaged"):
        result = fedcat.resume(tmp_path / "cut")
    assert result.summary.notes[-1] == "resumed after round 3"
    assert_same(tmp_path / "cut", tmp_path / "whole")


def test_a_checkpoint_that_was_passed_over_does_not_come_back(tmp_path):
    """It fits by its length again once the history has grown, but its offsets are those of other lines."""
    cut(tmp_path / "run", method="fedavg")
    file = tmp_path / "run" / "history.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:5]))

    class Again(fedcat.Callback):
        def on_round(self, run, record):
            if record.round == 9:
                raise CutError

    with pytest.warns(UserWarning, match="was passed over"), pytest.raises(CutError):
        fedcat.resume(tmp_path / "run", callbacks=[Again], checkpoint_every="1h")
    (tmp_path / "run" / "run.json").unlink()
    assert not (tmp_path / "run" / "checkpoint" / LAST).exists()
    assert fedcat.resume(tmp_path / "run").summary.notes[-1] == "resumed after round 3"
    assert [record.round for record in read_history(tmp_path / "run")] == list(range(1, 11))


def test_without_a_good_checkpoint_nothing_is_touched(tmp_path):
    cut(tmp_path / "cut", method="fedavg")
    for name in (LAST, PREVIOUS):
        damaged(tmp_path / "cut" / "checkpoint" / name, "a flipped bit")
    before = lines(tmp_path / "cut")
    with pytest.raises(SettingError, match=r"cannot be resumed: .*last.*is damaged.*previous.*is damaged"):
        fedcat.resume(tmp_path / "cut")
    assert lines(tmp_path / "cut") == before


def test_every_flipped_bit_of_a_small_checkpoint_is_noticed(tmp_path):
    cut(tmp_path / "run", method="fedavg", net="linear" if "linear" in fedcat.NETS else "mlp")
    path = tmp_path / "run" / "checkpoint" / LAST
    whole = path.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(0, head, 37), *range(head, len(whole), max(1, (len(whole) - head) // 60))]
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        with pytest.raises(SettingError, match="is damaged, or not a"):
            Saved.read(path)


def test_a_history_that_is_shorter_than_its_checkpoint_leads_to_the_one_before(tmp_path):
    cut(tmp_path / "run", method="fedavg")
    file = tmp_path / "run" / "history.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:5]))
    with pytest.warns(UserWarning, match=r"history.jsonl' is missing or shorter than the state says"):
        assert fedcat.resume(tmp_path / "run").summary.notes[-1] == "resumed after round 3"
    assert [record.round for record in read_history(tmp_path / "run")] == list(range(1, 11))


# Signals, disks and directories


@contextmanager
def started(tmp_path, *words, **given):
    """Start a run in a process of its own, which is gone afterwards whatever happens."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    words = ["run", "--rounds", "100000", "--clients", "20", "--epochs", "1", "--out", "run", *words]
    with subprocess.Popen(
        [sys.executable, "-m", "fedcat", *words], cwd=tmp_path, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_hangup, **given,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def heed_hangup():
    """Let SIGHUP end a process also if the tests ignore it, as with nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def wait_for(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path, number, code):
    with started(tmp_path, "--checkpoint-every", "1h", start_new_session=True) as process:
        wait_for(lambda: (tmp_path / "run" / "history.jsonl").exists() and len(lines(tmp_path / "run")) > 3)
        os.killpg(process.pid, number)  # also its worker processes, as a scheduler does
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"ended by {number.name} after " in err
    assert "`fedcat resume run` goes on" in err
    assert "Traceback" not in err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"
    saved = Saved.read(tmp_path / "run" / "checkpoint" / LAST)
    assert saved.state["rounds"] == len(lines(tmp_path / "run"))
    fedcat.run(method="fedcat", out=tmp_path / "whole", rounds=saved.state["rounds"], clients=20, epochs=1)
    whole = Saved.read(tmp_path / "whole" / "checkpoint" / LAST)
    assert torch.equal(saved.state["server"]["copies"], whole.state["server"]["copies"])


def test_a_run_goes_on_if_nobody_reads_what_it_prints(tmp_path):
    with started(tmp_path, "--evaluate-every", "1", "--checkpoint-every", "1h") as process:
        wait_for(lambda: (tmp_path / "run" / "history.jsonl").exists() and len(lines(tmp_path / "run")) > 1)
        process.stdout.close()
        process.stderr.close()
        before = len(lines(tmp_path / "run"))
        wait_for(lambda: len(lines(tmp_path / "run")) > before + 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert Saved.read(tmp_path / "run" / "checkpoint" / LAST).state["rounds"] > before


def test_a_full_disk_is_told_and_the_last_good_checkpoint_resumes(tmp_path):
    """SCAFFOLD's checkpoint grows with the clients that took part, until it exceeds what a file may hold."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, 700_000))

    given = {"method": "scaffold", "rounds": 12, "clients": 20, "epochs": 1}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "fedcat", "run", *words, "--checkpoint-every", "2r", "--out", "run"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True, preexec_fn=limit, timeout=120
    )
    assert done.returncode == 0  # all that was asked for is written
    assert "note: a checkpoint of 'run' is not written: File too large" in done.stderr
    assert "the last good one is kept" in done.stderr
    assert "Traceback" not in done.stderr
    assert 2 <= Saved.read(tmp_path / "run" / "checkpoint" / LAST).state["rounds"] < 11
    (tmp_path / "run" / "run.json").unlink()  # as if it had been killed
    fedcat.resume(tmp_path / "run")
    fedcat.run(out=tmp_path / "whole", **given)
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def test_a_directory_that_becomes_unwritable_is_told(tmp_path):
    """Its files cannot be opened any more; the last good checkpoint has what was before."""

    class Break(fedcat.Callback):
        def on_round(self, run, record):
            if record.round == 5:
                for name in ("history.jsonl", "traffic.csv"):
                    (tmp_path / "run" / name).rename(tmp_path / name)
                    (tmp_path / "run" / name).mkdir()

    given = {"method": "fedcat", "rounds": 10, **SHORT}
    with pytest.warns(UserWarning, match="cannot be written: Is a directory; the run goes on"):
        result = fedcat.run(out=tmp_path / "run", checkpoint_every="2r", callbacks=[Break], **given)
    assert (result.status, len(result.history)) == ("finished", 10)
    assert "Is a directory" in result.unwritten
    for name in ("history.jsonl", "traffic.csv"):
        (tmp_path / "run" / name).rmdir()
        shutil.move(tmp_path / name, tmp_path / "run" / name)
    (tmp_path / "run" / "run.json").unlink(missing_ok=True)
    assert fedcat.resume(tmp_path / "run").summary.notes[-1] == "resumed after round 4"
    fedcat.run(out=tmp_path / "whole", **given)
    assert_same(tmp_path / "run", tmp_path / "whole")
