"""Runs side by side: none takes its neighbours with it, and each is written as far as that is possible."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedcat
from fedcat.core.errors import SettingError
from fedcat.protocol.ledger import HopRecord
from fedcat.runs.build import Builder
from fedcat.runs.driver import Driver
from fedcat.runs.evaluations import final_clients
from fedcat.runs.folder import RunFolder, claim, reserve
from fedcat.runs.history import Record
from fedcat.runs.run_files import COLUMNS, read_history
from fedcat.runs.runner import execute

SHORT = {"dataset": "digits", "clients": 20, "rounds": 4, "epochs": 1, "evaluate_every": 2}
SOURCE = Path(__file__).parents[2] / "src"


def prepared(count, **given):
    builder = Builder()
    return [builder.build({**SHORT, "method": "fedavg", "seed": seed, **given}) for seed in range(count)]


def record(round, *hops):
    made = [HopRecord(round - 1, i, 0, client, down, up, "arrived") for i, (client, down, up) in enumerate(hops)]
    down, up = (round * sum(hop[place] for hop in hops) for place in (1, 2))  # as in every round before
    return Record(round, up=up, down=down, hops=made)


# Directories


def reserve_many(parent, count, pipe):
    pipe.send([reserve("compare-digits", parent).name for _ in range(count)])


def test_processes_that_reserve_a_directory_at_once_get_different_ones(tmp_path):
    context = multiprocessing.get_context("fork")
    ends = []
    for _ in range(4):
        mine, theirs = context.Pipe()
        process = context.Process(target=reserve_many, args=(tmp_path / "runs", 25, theirs))
        process.start()
        ends.append((mine, process))
    names = [name for mine, _ in ends for name in mine.recv()]
    for _, process in ends:
        process.join(20)
    assert sorted(names, key=lambda name: int(name.rpartition("-")[2])) == [
        f"compare-digits-{i}" for i in range(1, 101)
    ]


def test_a_directory_can_be_claimed_once(tmp_path):
    claim(tmp_path / "run", "settings.toml", "a")
    with pytest.raises(SettingError, match="already holds a run"):
        claim(tmp_path / "run", "settings.toml", "b")
    assert (tmp_path / "run" / "settings.toml").read_text() == "a"


def test_a_claim_that_comes_second_between_check_and_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fedcat.runs.folder.check_free", lambda path: None)
    claim(tmp_path / "run", "settings.toml", "a")
    with pytest.raises(SettingError, match="already holds a run"):
        claim(tmp_path / "run", "settings.toml", "b")


def test_comparisons_started_at_once_lose_nothing(tmp_path):
    words = [
        "compare",
        "--methods",
        "fedavg,fedcat",
        "--rounds",
        "2",
        "--epochs",
        "1",
        "--clients",
        "10",
        "--seeds",
        "1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, "-m", "fedcat", *words], cwd=tmp_path, env=environment, stdout=-3, stderr=-3)
        for _ in range(3)
    ]
    assert [process.wait(150) for process in started] == [0, 0, 0]
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name for folder in folders] == ["compare-digits-1", "compare-digits-2", "compare-digits-3"]
    for folder in folders:
        lines = json.loads((folder / "comparison.json").read_text())
        assert [line["label"] for line in lines] == ["fedavg", "fedcat"]
        assert (folder / "fedcat-seed0" / "run.json").exists()


# One unwritable run


def test_a_removed_directory_does_not_take_the_others_with_it(tmp_path):
    class Remove(fedcat.Callback):
        def on_round(self, run, record):
            if (run.settings.seed, record.round) == (1, 2):
                shutil.rmtree(tmp_path / "1")

    with pytest.warns(UserWarning, match="cannot be written: No such file.*; the run goes on"):
        results = execute(prepared(4), [tmp_path / str(i) for i in range(4)], [Remove()])
    assert [result.status for result in results] == ["finished"] * 4
    assert [bool(result.unwritten) for result in results] == [False, True, False, False]
    assert "the run is not completely written: " in results[1].summary.notes[-1]
    assert "No such file" in results[1].unwritten
    for i in (0, 2, 3):
        assert json.loads((tmp_path / str(i) / "run.json").read_text())["status"] == "finished"
        assert (tmp_path / str(i) / "model.safetensors").exists()
    assert results[1].model().head.weight.isfinite().all()


def test_a_comparison_with_an_unwritable_run_still_writes_its_table(tmp_path):
    class Remove(fedcat.Callback):
        def on_round(self, run, record):
            if (run.name, record.round) == ("fedavg-seed0", 2):
                shutil.rmtree(tmp_path / "c" / "fedavg-seed0")

    with pytest.warns(UserWarning, match="fedavg: the run is not completely written"):
        fedcat.compare(["fedavg", "fedprox"], 1, out=tmp_path / "c", callbacks=[Remove()], **SHORT)
    assert len(json.loads((tmp_path / "c" / "comparison.json").read_text())) == 2
    assert (tmp_path / "c" / "fedprox-seed0" / "model.safetensors").exists()


def test_what_a_full_disk_refused_is_written_when_there_is_room_again(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run", "")
    assert folder.add(record(1, (3, 10, 20)))
    whole = folder._put
    monkeypatch.setattr(folder, "_put", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.warns(UserWarning, match="No space left on device; the run goes on, and writes what is missing if it"):
        assert not folder.add(record(2, (4, 10, 20)))
    assert "No space left on device" in folder.trouble
    assert folder.rounds == 1
    monkeypatch.setattr(folder, "_put", whole)
    assert folder.add(record(2, (4, 10, 20)))
    assert folder.trouble == ""
    assert [line.round for line in read_history(folder.path)] == [1, 2]
    assert (folder.path / "traffic.csv").read_text() == COLUMNS + "1,3,0,0,10,20,0\n2,4,0,0,10,20,0\n"


def test_a_model_that_cannot_be_saved_is_trouble_and_not_an_error(tmp_path):
    folder = RunFolder(tmp_path / "run", "")
    shutil.rmtree(folder.path)
    with pytest.warns(UserWarning, match="cannot be written"):
        folder.finish({"global": {"w": torch.ones(2)}}, None)
    assert str(folder.path) in folder.trouble


def test_an_end_that_fails_leaves_the_other_runs_alone(tmp_path, monkeypatch):
    runs = prepared(3, per_client=True)
    monkeypatch.setattr("fedcat.runs.run.final_clients", lambda run: 1 / 0 if run is runs[0] else final_clients(run))
    results = execute(runs, [tmp_path / str(i) for i in range(3)])
    assert [result.status for result in results] == ["failed", "finished", "finished"]
    assert isinstance(results[0].error, ZeroDivisionError)
    written = [json.loads((tmp_path / str(i) / "run.json").read_text()) for i in range(3)]
    assert [one["status"] for one in written] == ["failed", "finished", "finished"]
    assert "ZeroDivisionError: division by zero (in the evaluation on each client" in written[0]["notes"][-1]


def test_more_runs_than_open_files(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 25, hard))
    try:
        folders = [RunFolder(tmp_path / str(i), "") for i in range(30)]
        assert all(folder.add(Record(1)) for folder in folders)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not any(folder.trouble for folder in folders)


def test_directories_of_runs_that_cannot_all_be_made_are_removed(tmp_path):
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "mine").write_text("x")
    with pytest.raises(SettingError, match="is not empty"):
        execute(prepared(3), [tmp_path / str(i) for i in range(3)])
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_without_a_directory_the_ledger_keeps_totals_only():
    (run,) = prepared(1)
    (result,) = execute([run])
    assert list(run.ledger) == []
    assert run.ledger.total == result.summary.bytes["up"] + result.summary.bytes["down"] > 0


# A killed process


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("moment", range(12))
def test_after_a_kill_at_any_moment_the_files_hold_whole_rounds(tmp_path, monkeypatch, moment):
    """The process ends in the middle of its n-th write, of which half is on the disk."""
    writes = iter(range(1000))
    whole = RunFolder._put

    def cut(self, name, end, text):
        if next(writes) == moment:
            whole(self, name, end, text[: len(text) // 2])
            raise KilledError
        return whole(self, name, end, text)

    monkeypatch.setattr(RunFolder, "_put", cut)

    def write():
        folder = RunFolder(tmp_path / "run", "seed = 0\n")
        for round in range(20):
            folder.add(record(round + 1, (7, 1, 2), (9, 3, 4)))

    with pytest.raises(KilledError):
        write()
    assert tomllib.loads((tmp_path / "run" / "settings.toml").read_text()) == {"seed": 0}
    if not (tmp_path / "run" / "history.jsonl").exists():
        assert moment < 2
        return
    history = read_history(tmp_path / "run")
    assert [one.round for one in history] == list(range(1, len(history) + 1))
    assert len(history) == max(0, (moment - 2) // 2)
    traffic = (tmp_path / "run" / "traffic.csv").read_text().splitlines()
    for one in history:
        mine = [line for line in traffic if line.startswith(f"{one.round},")]
        assert mine == [f"{one.round},7,0,0,1,2,0", f"{one.round},9,1,0,3,4,0"]


def test_a_killed_run_leaves_what_was_written(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    words = ["run", "--rounds", "100000", "--evaluate-every", "1", "--out", "cut"]
    with subprocess.Popen(
        [sys.executable, "-m", "fedcat", *words], cwd=tmp_path, env=environment, stdout=-3
    ) as process:
        history = tmp_path / "cut" / "history.jsonl"
        until = time.monotonic() + 120
        while time.monotonic() < until and not (history.exists() and history.read_text().count("\n") >= 3):
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    rounds = [record.round for record in read_history(tmp_path / "cut")]
    assert rounds == list(range(1, len(rounds) + 1))
    assert len(rounds) >= 3
    assert not (tmp_path / "cut" / "run.json").exists()
    lines = (tmp_path / "cut" / "traffic.csv").read_text().splitlines()
    assert {int(line.split(",")[0]) for line in lines[1:]} >= set(rounds)


def test_the_summary_is_written_last(tmp_path, monkeypatch):
    written = []
    whole = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (written.append(Path(to).name), whole(self, to))[1])
    fedcat.run(method="fedavg", out=tmp_path / "run", per_client=True, average=0.9, **SHORT)
    assert written == ["last.safetensors", "model.safetensors", "average.safetensors", "clients.json", "run.json"]


# Status, notes and the result


def test_a_run_in_which_no_hop_arrived_is_untrained(tmp_path):
    with pytest.warns(UserWarning, match="no hop arrived: the model is the initial one; the first hop was refused"):
        result = fedcat.run(method="fedavg", lr=1e30, out=tmp_path / "run", **{**SHORT, "epochs": 3, "min_samples": 20})
    assert result.status == "untrained"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "untrained"
    again = Builder().build({**SHORT, "method": "fedavg", "min_samples": 20}).method.row
    assert torch.equal(result._rows["global"].cpu(), again.cpu())


def test_notes_are_warnings_in_python(recwarn):
    fedcat.run(method="fedcat", lr_decay=0.1, **{**SHORT, "rounds": 3})
    told = [str(warning.message) for warning in recwarn]
    assert "lr_decay has no effect with lr_schedule 'constant'" in told
    assert any("rounds = 3 is not a multiple of 2" in text for text in told)
    assert all(warning.filename == __file__ for warning in recwarn)


def test_a_note_of_a_comparison_names_its_runs():
    with pytest.warns(UserWarning, match=r"^fedcat: FedCat aggregates every K = 2 rounds, and rounds = 3"):
        fedcat.compare(["fedavg", "fedcat"], 2, **{**SHORT, "rounds": 3})


def test_a_note_of_one_seed_names_the_seed():
    made = fedcat.Comparison(["fedavg", "fedcat"], [3, 5], **SHORT)
    assert made.named_notes([["a", "b"], ["a"], ["a", "c"], ["a", "c"]]) == ["a", "fedavg seed 3: b", "fedcat: c"]


def test_progress_from_python(capsys):
    seen = []

    class Noted(fedcat.Callback):
        def on_round(self, run, record):
            seen.append(record.round)

    fedcat.run(method="fedavg", progress=True, callbacks=[Noted], **SHORT)
    assert "round 4/4  fedavg " in capsys.readouterr().out
    assert seen == [1, 2, 3, 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedcat.run(method="fedavg", **SHORT)
    assert capsys.readouterr().out == ""


def test_a_result_is_short_in_print_and_survives_pickling():
    import pickle

    result = fedcat.run(method="fedavg", **SHORT)
    assert repr(result) == (
        f"<Result: fedavg on digits, finished after 4 of 4 rounds, accuracy {result.accuracy:.4g}, "
        f"best {result.best:.4g}>"
    )
    back = pickle.loads(pickle.dumps(result))
    assert back.accuracies == result.accuracies
    assert torch.equal(back.model().head.weight, result.model().head.weight)


def test_the_summary_names_the_versions_that_matter():
    versions = fedcat.run(method="fedavg", **SHORT).summary.versions
    assert versions["numpy"] == np.__version__
    assert set(versions) == {"fedcat", "torch", "numpy", "python"}


# Time


def test_a_method_that_trains_longer_takes_longer_in_a_comparison():
    """FedGen's launches are timed by themselves: per step it costs several times as much as FedAvg."""
    options = {"fedgen": {"generator_steps": 1, "generator_batch": 2}}
    words = {**SHORT, "rounds": 6, "workers": 1, "threads": 1, "options": options}
    avg, gen = fedcat.compare(["fedavg", "fedgen"], 1, **words)
    assert gen.seconds > 1.5 * avg.seconds
    assert avg.seconds_estimated
    assert json.loads(json.dumps(avg.as_dict(avg)))["seconds_estimated"] is True


@pytest.mark.parametrize("method", ["fedavg", "fedgen"])
def test_the_seconds_of_a_run_alone_are_measured(method):
    begin = time.perf_counter()
    result = fedcat.run(method=method, **SHORT)
    assert 0 < result.summary.seconds <= time.perf_counter() - begin
    assert result.summary.seconds_estimated is False
    seconds = [record.seconds for record in result.history]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_the_seconds_of_runs_side_by_side_add_up_to_the_time_that_passed():
    runs = prepared(3, workers=1)
    begin = time.perf_counter()
    Driver(runs).run()
    passed = time.perf_counter() - begin
    assert 0.8 * passed < sum(run.seconds for run in runs) <= passed


# Evaluations


@pytest.mark.parametrize(("k", "interval"), [(1, 10), (3, 12), (5, 10), (10, 10), (18, 18)])
def test_evaluations_fall_on_the_ends_of_cycles(k, interval):
    settings = Builder().build({"dataset": "digits", "clients": 20, "per_round": k, "rounds": 40}).settings
    assert settings.evaluation_interval == interval


def test_methods_of_a_comparison_are_evaluated_at_the_same_rounds():
    lines = fedcat.compare(["fedavg", "fedcat"], 1, dataset="digits", clients=30, per_round=3, rounds=24, epochs=1)
    rounds = [[r.round for r in line.results[0].history if r.accuracy is not None] for line in lines]
    assert rounds == [[12, 24], [12, 24]]


# Batch normalization and owners


def owned():
    x = torch.rand(41, 6)
    return fedcat.Dataset.from_arrays(
        x, torch.arange(41) % 2, (x[:4], torch.arange(4) % 2), owner=[0] * 20 + [1] * 20 + [2], name="owned"
    )


def test_an_owner_of_one_sample_can_be_left_out_for_batch_normalization():
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    words = {"dataset": owned(), "net": net, "rounds": 2, "epochs": 1, "fraction": 1.0, "method": "fedavg"}
    with pytest.raises(SettingError, match=r"a client holds a single sample.*: set min_samples to 2 or more"):
        fedcat.run(**words)
    with pytest.warns(UserWarning, match="left out: 1 owner with fewer than min_samples = 2"):
        result = fedcat.run(min_samples=2, **words)
    assert result.settings.clients == 2
    assert result.federation.sizes.tolist() == [20, 20]
    assert result.federation.client_names == ("0", "1")


def test_a_partition_that_fails_names_its_seed():
    with pytest.raises(SettingError, match="in 3 tries with seed 7 "):
        fedcat.run(dataset="digits", alpha=0.001, min_samples=25, partition_tries=3, seed=7)


def sized(*sizes):
    owner = np.repeat(np.arange(len(sizes)), sizes)
    x = torch.rand(len(owner), 4)
    y = torch.arange(len(owner)) % 2
    return fedcat.Dataset.from_arrays(x, y, (x[:6], y[:6]), owner=owner, name="sized")


def test_no_owner_with_enough_samples_is_an_error_with_the_largest():
    with pytest.raises(SettingError, match="min_samples must be at most 12, the samples of the largest owner"):
        fedcat.run(dataset=sized(1, 3, 12), net="mlp", min_samples=100)


def test_owners_are_counted_again_if_a_files_min_samples_is_replaced(tmp_path):
    data = sized(1, 3, 5, 8, 10, 12)
    words = {"dataset": data, "net": "mlp", "rounds": 2, "epochs": 1, "method": "fedavg"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = fedcat.run(min_samples=4, out=tmp_path / "a", fraction=0.5, **words)
        again = fedcat.run(settings=tmp_path / "a" / "settings.toml", dataset=data)
        wider = fedcat.run(settings=tmp_path / "a" / "settings.toml", dataset=data, min_samples=2)
    assert first.federation.sizes.tolist() == again.federation.sizes.tolist() == [5, 8, 10, 12]
    assert again.federation.hash == first.federation.hash
    assert wider.federation.sizes.tolist() == [3, 5, 8, 10, 12]


def test_a_comparison_whose_directory_vanishes_keeps_its_results(tmp_path):
    class Remove(fedcat.Callback):
        def on_round(self, run, record):
            if (run.settings.method, record.round) == ("fedprox", 2):
                shutil.rmtree(tmp_path / "c")

    with pytest.warns(UserWarning, match="the table is not written: .*No such file or directory"):
        found = fedcat.compare(["fedavg", "fedprox"], 1, out=tmp_path / "c", callbacks=[Remove()], **SHORT)
    assert [line.results[0].status for line in found] == ["finished", "finished"]


@pytest.mark.parametrize("name", ["history.jsonl", "traffic.csv"])
def test_a_file_that_vanishes_is_told(tmp_path, name):
    class Remove(fedcat.Callback):
        def on_round(self, run, record):
            if record.round == 2:
                (tmp_path / "run" / name).unlink()

    with pytest.warns(UserWarning, match="cannot be written: No such file.*; the run goes on"):
        (result,) = execute(prepared(1), [tmp_path / "run"], [Remove()])
    assert "No such file" in result.unwritten
    (note,) = json.loads((tmp_path / "run" / "run.json").read_text())["notes"]
    assert note == f"the run is not completely written: {result.unwritten}" == result.summary.notes[-1]


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "nowhere" / "place")
    with pytest.raises(SettingError, match="cannot be written"):
        reserve("stem", tmp_path / "runs")


def test_a_run_of_which_nothing_could_be_written_starts_with_its_columns_later(tmp_path, monkeypatch):
    whole = RunFolder._put
    monkeypatch.setattr(RunFolder, "_put", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.warns(UserWarning, match="No space left"):
        folder = RunFolder(tmp_path / "run", "")
    assert folder.trouble
    monkeypatch.setattr(RunFolder, "_put", whole)
    assert folder.add(record(1, (3, 10, 20)))
    assert (folder.path / "traffic.csv").read_text() == COLUMNS + "1,3,0,0,10,20,0\n"


def test_each_clients_accuracy_is_written_only_if_it_is_asked_for(tmp_path):
    for name, per_client in (("a", False), ("b", True)):
        result = fedcat.run(method="fedavg", out=tmp_path / name, per_client=per_client, **SHORT)
        assert (tmp_path / name / "clients.json").exists() == per_client == (result.clients is not None)


def test_names_of_directories_have_no_separators(tmp_path):
    assert reserve("mine:Method-a/b", tmp_path).name == "mine-Method-a-b-1"


def test_three_seeds_unless_another_number_is_asked_for():
    assert fedcat.Comparison(["fedavg"], **SHORT).seeds == [0, 1, 2]


def test_a_method_sees_one_blank_input():
    (run,) = prepared(1)
    assert run.method.context.blank.shape == (1, 1, 8, 8)
    assert torch.count_nonzero(run.method.context.blank) == 0
