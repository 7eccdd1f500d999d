"""`fedcat resume` and `fedcat list` as a user types them."""

import json
from pathlib import Path

import pytest

from fedcat.core.files import locked

SHORT = ["--rounds", "4", "--epochs", "1", "--clients", "20"]


@pytest.fixture
def runs(fedcat_command):
    """Make a run that is complete, one that was killed, and a comparison; return the command."""
    assert fedcat_command("run", "--method", "fedavg", *SHORT)[0] == 0
    assert fedcat_command("run", "--method", "fedcat", *SHORT, "--checkpoint-every", "2r")[0] == 0
    killed = Path("runs/fedcat-digits-1")
    (killed / "run.json").unlink()
    assert fedcat_command("compare", "--methods", "fedavg,fedprox", "--seeds", "1", *SHORT)[0] == 0
    return fedcat_command


def test_runs_are_listed(runs):
    (Path("runs") / "mine").mkdir()
    broken = Path("runs") / "broken"
    broken.mkdir()
    (broken / "settings.toml").write_text("rounds = [")
    with locked(Path("runs/compare-digits-1")):
        (Path("runs/compare-digits-1/fedprox-seed0/run.json")).unlink()
        code, out, _ = runs("list")
    assert code == 0
    *rows, why = [line.split() for line in out.splitlines()[2:]]
    assert " ".join(why).startswith("broken: settings file 'runs/broken/settings.toml' is not valid TOML")
    assert [(row[0], row[1]) for row in rows] == [
        ("broken", "damaged"),
        ("compare-digits-1/fedavg-seed0", "finished"),
        ("compare-digits-1/fedprox-seed0", "running"),
        ("fedavg-digits-1", "finished"),
        ("fedcat-digits-1", "killed"),
    ]
    last = json.loads(Path("runs/fedavg-digits-1/history.jsonl").read_text().splitlines()[-1])["metrics"]["accuracy"]
    assert rows[3][2:6] == ["4/4", "accuracy", f"{100 * last:.2f}", "%"]
    assert runs("list", "runs/mine")[1] == "no runs in runs/mine\n"
    assert runs("list", "nowhere")[2] == "error: directory 'nowhere' does not exist\n"
    assert "fedavg-digits-1" in runs("list", "runs/fedavg-digits-1")[1]


def test_a_killed_run_goes_on(runs):
    code, out, err = runs("resume", "runs/fedcat-digits-1")
    assert (code, err) == (0, "note: resumed after round 3\n")
    assert "round 4/4" in out
    assert json.loads(Path("runs/fedcat-digits-1/run.json").read_text())["status"] == "finished"


def test_a_complete_run_says_so_and_goes_on_with_more_rounds(runs):
    code, out, _ = runs("resume", "runs/fedavg-digits-1")
    assert code == 0
    assert out.startswith("complete after 4 rounds; --rounds lets it go on for more\n")
    code, out, _ = runs("resume", "runs/fedavg-digits-1", "--rounds", "6")
    assert code == 0
    assert "round 6/6" in out
    assert "rounds = 6" in Path("runs/fedavg-digits-1/settings.toml").read_text()


def test_a_comparison_goes_on(runs):
    code, out, _ = runs("resume", "runs/compare-digits-1")
    assert code == 0
    assert "2 runs of them complete" in out
    Path("runs/compare-digits-1/fedprox-seed0/run.json").unlink()
    code, out, err = runs("resume", "runs/compare-digits-1")
    assert (code, err) == (0, "note: fedprox: resumed after round 3\n")
    assert "1 run of them complete" in out
    assert "fedprox: goes on after round 3 of 4" in out
    assert "fedprox" in out.split("traffic")[1]


def test_one_line_for_a_mistake(runs):
    for words in (
        ["resume", "nowhere"],
        ["resume", "runs"],
        ["resume", "runs/fedavg-digits-1", "--rounds", "2"],
        ["resume", "runs/fedavg-digits-1", "--rounds", "many"],
        ["resume", "runs/fedavg-digits-1", "--net", "mlp"],
        ["resume", "runs/fedavg-digits-1", "--checkpoint-every", "often"],
    ):
        code, _, err = runs(*words)
        assert code == 2
        assert err.startswith("error: ")
        assert err.count("\n") == 1
    with locked(Path("runs/compare-digits-1")):
        code, _, err = runs("resume", "runs/compare-digits-1/fedavg-seed0")
    assert "is in use by" in err
