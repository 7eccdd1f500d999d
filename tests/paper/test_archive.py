"""The archive keeps runs, and refuses to mix those of versions that compute other numbers."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import fedcat
from fedcat.core.errors import SettingError
from fedcat.paper.archive import Archive, Machine, StoredRun
from fedcat.paper.case import Case
from fedcat.paper.participation import entropy, participation

CASE = Case("digits", "fedavg", 0.5, rounds=4)
MACHINE = Machine("a GPU", "2.0", "abc1234", "0123456789ab")
SHORT = {"dataset": "digits", "alpha": 0.5, "rounds": 4, "clients": 12, "per_round": 3, "epochs": 1, "min_samples": 2}


def test_runs_come_back(tmp_path, make_run):
    runs = [make_run(CASE, seed, [0.25, math.nan], clients={"mean": 0.5}) for seed in (10, 11)]
    Archive(tmp_path / "runs").add(runs)
    again = Archive(tmp_path / "runs")
    assert len(again) == 2
    (first,) = again.runs(CASE, [10, 12])
    assert first.accuracy[0] == 0.25
    assert math.isnan(first.accuracy[1])
    assert replace(first, accuracy=[]) == replace(runs[0], accuracy=[])
    assert again.get(replace(CASE, rounds=5), 10) is None


def test_a_run_is_kept_once(tmp_path, make_run):
    archive = Archive(tmp_path)
    archive.add([make_run(CASE, 10, [0.1]), make_run(CASE, 10, [0.2])])
    archive.add([make_run(CASE, 10, [0.3])])
    assert [run.accuracy for run in Archive(tmp_path)] == [[0.1]]
    assert len((tmp_path / "lab-digits.jsonl").read_text().splitlines()) == 1


def test_several_may_add_at_once(tmp_path, make_run):
    def add(first):
        archive = Archive(tmp_path)
        for seed in range(first, first + 40):
            archive.add([make_run(CASE, seed, [0.1] * 200)])

    with ThreadPoolExecutor() as pool:
        list(pool.map(add, (0, 100, 200)))
    assert len(Archive(tmp_path)) == 120


def test_runs_that_choose_numbers_have_a_file_of_their_own(tmp_path):
    archive = Archive(tmp_path)
    assert archive.path(CASE).name == "lab-digits.jsonl"
    assert archive.path(replace(CASE, choosing=True)).name == "lab-digits-choices.jsonl"


def test_a_damaged_line_is_named(tmp_path, make_run):
    Archive(tmp_path).add([make_run(CASE, 10, [0.1])])
    with (tmp_path / "lab-digits.jsonl").open("a") as file:
        file.write('{"case": {"dataset": "digits"\n')
    with pytest.raises(SettingError, match=r"lab-digits\.jsonl', line 2, is not a run"):
        Archive(tmp_path)


def test_a_line_that_is_being_written_is_left_for_later(tmp_path, make_run):
    Archive(tmp_path).add([make_run(CASE, 10, [0.1])])
    with (tmp_path / "lab-digits.jsonl").open("a") as file:
        file.write('{"case": {"dataset": "digits"')
    assert len(Archive(tmp_path)) == 1


def test_versions_with_other_bits_do_not_share_a_table(tmp_path, make_run):
    archive = Archive(tmp_path)
    archive.add([make_run(CASE, 10, [0.1], machine=MACHINE)])
    methods = (CASE.method, "fedcat")
    archive.check(replace(MACHINE, commit="other"), CASE, methods)
    archive.check(replace(MACHINE, canary="x", device="another GPU"), CASE, methods)  # other bits are no surprise there
    archive.check(replace(MACHINE, canary="x"), replace(CASE, precision="bf16"), methods)
    archive.check(replace(MACHINE, canary="x"), replace(CASE, method="fedcm"), ["fedcm"])  # it covers that method alone
    with pytest.raises(SettingError, match="computes other numbers"):
        archive.check(replace(MACHINE, canary="x"), replace(CASE, method="fedcat"), methods)


def test_what_is_kept_of_a_result():
    result = fedcat.run(method="fedcat", average=0.9, validation=0.3, evaluate_every=3, **{**SHORT, "rounds": 6})
    kept = StoredRun.of(replace(CASE, method="fedcat"), result, MACHINE)
    assert kept.rounds == [3, 6]
    assert kept.accuracy == pytest.approx(result.accuracies, abs=1e-5)
    assert kept.average == pytest.approx(result.values("accuracy", "average"), abs=1e-5)
    assert kept.validation == [
        round(r.validation["accuracy"]["weighted_mean"], 5) for r in result.history if r.evaluated
    ]
    assert kept.traffic[-1] == result.summary.bytes["up"] + result.summary.bytes["down"]
    assert kept.settings["partition_options"] == {"alpha": 0.5}
    assert not {"device", "data_dir", "threads"} & kept.settings.keys()
    assert json.loads(json.dumps(kept.as_dict()))["case"]["method"] == "fedcat"


def test_test_accuracies_are_not_kept_of_runs_that_choose_numbers():
    result = fedcat.run(method="fedavg", validation=0.3, **SHORT)
    kept = StoredRun.of(replace(CASE, choosing=True), result, MACHINE)
    assert (kept.accuracy, kept.average, kept.clients) == ([], [], {})
    assert len(kept.validation) == 1


def test_participation_by_hand():
    result = fedcat.run(method="fedcat", evaluate_every=3, **{**SHORT, "rounds": 6})
    found = participation(result.history, 12, 3)
    counts = [sum(record.clients.count(client) for record in result.history) for client in range(12)]
    assert found.counts == counts
    assert sum(counts) == 18
    assert found.distinct == 3.0  # no copy meets a client twice in a cycle
    assert found.coverage[-1] == round(sum(count > 0 for count in counts) / 12, 4)
    assert (found.least[-1], found.most[-1]) == (min(counts), max(counts))


def test_entropy_of_counts():
    assert entropy(np.array([5, 5, 5, 5])) == pytest.approx(1)
    assert entropy(np.array([5, 0, 0, 0])) == pytest.approx(0)
    assert entropy(np.array([2, 2, 0, 0])) == pytest.approx(0.5)
    assert entropy(np.array([0, 0])) == 0
