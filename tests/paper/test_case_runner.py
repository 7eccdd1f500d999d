"""Cells are run once, side by side, and only as many as fit into the time."""

from dataclasses import replace

import pytest
from rich.console import Console

from fedcat.core.errors import SettingError
from fedcat.paper import case_runner
from fedcat.paper.archive import Archive
from fedcat.paper.case import Case
from fedcat.paper.case_runner import CaseRunner

CASES = [Case("digits", method, 1.0, rounds=10) for method in ("fedavg", "fedcat")]


@pytest.fixture
def make_runner(tmp_path, monkeypatch):
    """Return a function that makes runners over one directory; their canary costs nothing."""
    monkeypatch.setattr(CaseRunner, "_canary", lambda self, case, methods: "canary")

    def make(minutes=None, pace=None):
        if pace is not None:
            monkeypatch.setattr(
                CaseRunner, "_pace", lambda self, cases, seeds: {case: pace[case.method] for case in cases}
            )
        console = Console(file=(tmp_path / "out").open("a"), width=200)
        return CaseRunner(Archive(tmp_path / "runs"), {"workers": 1, "threads": 1}, minutes, console)

    return make


def test_what_is_there_is_not_run_again(make_runner, monkeypatch):
    make_runner().run([CASES[:1]], [10])
    counts = []
    execute = case_runner.execute
    monkeypatch.setattr(case_runner, "execute", lambda runs, *more: counts.append(len(runs)) or execute(runs, *more))
    made = make_runner()
    made.run([CASES], [10])
    assert counts == [1]
    made.run([CASES], [10, 11])
    assert counts == [1, 2]
    make_runner().run([CASES], [10, 11])
    assert counts == [1, 2]
    assert {(run.case.method, run.seed) for run in made.archive} == {(c.method, s) for c in CASES for s in (10, 11)}
    assert {len(run.accuracy) for run in made.archive} == {1}


@pytest.mark.parametrize(("minutes", "expected"), [(0, []), (0.05, []), (0.2, ["fedavg"]), (10, ["fedavg", "fedcat"])])
def test_whole_cells_are_planned_into_the_time(make_runner, minutes, expected):
    # two seeds of ten rounds at a third of a second, with a margin of a quarter: 8.3 s for each cell
    made = make_runner(minutes, {"fedavg": 1 / 3, "fedcat": 1 / 3})
    made.run([CASES], [10, 11])
    assert [case.method for case in CASES if len(made.archive.runs(case, [10, 11])) == 2] == expected
    assert len(made.archive) == 2 * len(expected)


def test_the_speed_is_measured_by_short_runs(make_runner, monkeypatch):
    rounds = []
    execute = case_runner.execute

    def keep(runs, *more):
        rounds.extend(run.rounds for run in runs)
        return execute(runs, *more)

    monkeypatch.setattr(case_runner, "execute", keep)
    pace = make_runner(5)._pace([replace(case, rounds=100) for case in CASES], [10, 11])
    assert rounds == [15] * 4  # three cycles of K = 5
    assert all(0 < value < 5 for value in pace.values())


def test_the_canary_tells_versions_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(case_runner, "EVERY", ("fedavg", "fedcat"))
    console = Console(file=(tmp_path / "out").open("a"))
    made = CaseRunner(Archive(tmp_path / "runs"), {"workers": 1}, None, console)
    first = made.machine(CASES[0])
    again = CaseRunner(Archive(tmp_path / "runs"), {"workers": 1}, None, console).machine(CASES[0])
    assert first.canary == again.canary
    assert len(first.canary) == 12
    console.file.flush()
    said = (tmp_path / "out").read_text()
    assert "canary of digits: 2 methods, 10 rounds" in said
    assert "round 10/10" in said  # on MNIST it takes minutes: whoever waits sees it move
    made.run([CASES[:1]], [10])
    monkeypatch.setattr(case_runner, "EVERY", ("fedavg", "fedcat-dc"))  # stands for a version that computes otherwise
    with pytest.raises(SettingError, match="computes other numbers"):
        CaseRunner(Archive(tmp_path / "runs"), {"workers": 1}, None, console).run([[replace(CASES[0], rounds=5)]], [10])


def test_a_method_that_the_paper_lacks_has_a_canary_of_its_own(make_runner, monkeypatch):
    """A change of that method does not touch the runs of others."""
    monkeypatch.setattr(CaseRunner, "_canary", lambda self, case, methods: "-".join(methods))
    made = make_runner()
    case = replace(CASES[0], method="fedcm")
    assert [made.machine(one).canary for one in (case, replace(CASES[0], method="fedcross"))] == ["fedcm", "fedcross"]
    assert made.machine(CASES[0]).canary == "-".join(case_runner.EVERY)
    made.run([[*CASES[:1], case]], [10])
    assert [run.machine.canary for run in made.archive] == ["-".join(case_runner.EVERY), "fedcm"]
    monkeypatch.setattr(CaseRunner, "_canary", lambda self, case, methods: f"{len(methods)} new")
    with pytest.raises(SettingError, match="computes other numbers"):
        make_runner().machine(replace(case, rounds=5))


def test_a_run_that_fails_is_told_and_not_kept(make_runner, monkeypatch, tmp_path):
    execute = case_runner.execute

    def failing(runs, *more):
        runs[0].stop("the power went off")
        return execute(runs, *more)

    monkeypatch.setattr(case_runner, "execute", failing)
    made = make_runner()
    made.run([CASES], [10])
    assert [run.case.method for run in made.archive] == ["fedcat"]
    made.console.file.flush()
    said = (tmp_path / "out").read_text()
    assert "not kept: digits, alpha 1.0, FedAvg, seed 10: stopped" in said
    assert "the power went off" in said
