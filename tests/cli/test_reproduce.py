"""`fedcat reproduce`: tables, pages and figures of runs on the digits, and the command that runs a cell again."""

import json
from pathlib import Path

import pytest
from PIL import Image

from fedcat.paper import case_runner
from fedcat.runs.run_files import read_history

FEW = ["--dataset", "digits", "--alpha", "1.0", "--seeds", "1", "--rounds", "10", "--workers", "1", "--out", "r"]


@pytest.fixture(autouse=True)
def _small_canary(monkeypatch):
    monkeypatch.setattr(case_runner, "canary_methods", lambda method: ("fedavg",))


def test_table_1_of_the_digits(fedcat_command):
    code, out, _ = fedcat_command("reproduce", "table1", "--methods", "fedavg,fedcat", *FEW)
    assert code == 0
    assert "digits, alpha 1.0, 10 rounds, 1 seed" in out
    assert "paper" not in out.partition("The paper's claims")[0]
    assert "**" not in out
    assert "written: r/figures/methods-lab-digits.png" in out
    page = Path("r/table1.md").read_text()
    written = json.loads(Path("r/table1.json").read_text())
    cells = written["cells"]
    assert "Mean of the last five evaluations" in [table["title"] for table in written["tables"]]
    assert [(cell["method"], cell["seeds"], cell["paper"]) for cell in cells] == [
        ("fedavg", [10], None),
        ("fedcat", [10], None),
    ]
    assert f"{cells[1]['best']['mean']:.2f}" in page
    for suffix in (".png", ".pdf"):
        assert Path(f"r/figures/methods-lab-digits{suffix}").stat().st_size > 1000
    with Image.open("r/figures/methods-lab-digits.png") as image:
        assert image.width > 500

    command = next(line for line in page.splitlines() if line.startswith("fedcat compare --methods fedcat"))
    code, _, _ = fedcat_command(*command.split()[1:], "--workers", "1", "--out", "again")
    assert code == 0
    (folder,) = (path for path in Path("again").iterdir() if path.is_dir())
    again = [100 * record.accuracy for record in read_history(folder) if record.evaluated]
    assert cells[1]["runs"]["10"]["best"] == pytest.approx(max(again), abs=1e-3)

    code, out, _ = fedcat_command("reproduce", "table1", "--methods", "fedavg,fedcat", *FEW)
    assert code == 0
    assert "side by side" not in out  # both cells are there


def test_other_studies_use_the_same_runs(fedcat_command):
    assert fedcat_command("reproduce", "table2", "--methods", "fedavg,fedcat", *FEW)[0] == 0
    for name, shown in (("traffic", "Traffic of a run"), ("fairness", "Participation: digits"), ("curves", "written:")):
        code, out, _ = fedcat_command("reproduce", name, "--methods", "fedavg,fedcat", *FEW)
        assert code == 0
        assert shown in out
        assert "side by side" not in out
        assert Path(f"r/{name}.md").exists()
    assert Path("r/figures/traffic-lab-digits.png").exists()
    assert Path("r/figures/participation-lab-digits.png").exists()


def test_options_of_a_method_are_variants_of_its_cell(fedcat_command):
    few = ["--methods", "fedavg,scaffold", *FEW]
    assert fedcat_command("reproduce", "table1", *few)[0] == 0
    code, out, _ = fedcat_command("reproduce", "table1", *few, "-o", "scaffold.clip=10")
    assert code == 0
    assert "1 run side by side" in out  # FedAvg's is there
    assert "SCAFFOLD (clip 10)" in Path("r/table1-scaffold-clip-10.md").read_text()
    assert Path("r/figures/methods-lab-digits-scaffold-clip-10.png").exists()
    assert fedcat_command("reproduce", "table1", *few, "--minutes", "0")[0] == 0
    page = Path("r/table1.md").read_text()
    assert "| digits, alpha 1.0 | SCAFFOLD (clip 10) |" in page
    assert page.count("-o scaffold.clip=10") == 1
    assert "3 runs" in page
    assert "Lines are means" in page
    other = fedcat_command("reproduce", "table1", *few, "--minutes", "0", "--seed", "11")
    assert other[0] == 2  # no run of this seed, not even of the variant
    assert "no run of table1 is there yet" in other[2]


def test_pages_say_what_they_show(fedcat_command):
    few = ["--methods", "fedavg", *FEW]
    assert fedcat_command("reproduce", "table1", *few, "--validation", "0.1")[0] == 0
    assert fedcat_command("reproduce", "curves", *few)[0] == 0
    assert "--validation" in Path("r/table1.md").read_text()
    assert "--validation" not in Path("r/curves.md").read_text()
    assert fedcat_command("reproduce", "table1", *few, "--partition", "iid")[0] == 0
    assert "Partition `iid`." in Path("r/table1-iid.md").read_text()


def test_choices_do_not_show_the_test_accuracy(fedcat_command):
    few = ["--dataset", "digits", "--alpha", "1.0", "--seeds", "1", "--rounds", "5", "--workers", "1", "--out", "r"]
    code, out, _ = fedcat_command("reproduce", "choices", *few)
    assert code == 0
    progress = [line for line in out.splitlines() if line.startswith("round ")]
    assert progress
    assert not any("%" in line for line in progress)
    lines = [json.loads(line) for line in Path("r/runs/lab-digits-choices.jsonl").read_text().splitlines()]
    assert len(lines) == 14
    assert all(line["accuracy"] == [] and len(line["validation"]) == 1 for line in lines)
    assert "the default" in Path("r/choices.md").read_text()


def test_fedcat_plus_against_its_rivals(fedcat_command):
    """Parts are taken away in turn, and rivals get its average, in runs that tables of other studies do not have."""
    code, out, _ = fedcat_command("reproduce", "plus", "--methods", "fedavg,fedcat-plus", *FEW)
    assert code == 0
    assert "2 runs side by side" in out
    assert "7 runs side by side" in out
    page = Path("r/plus.md").read_text()
    titles = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert titles[:3] == ["Rows won", "The first rounds", "Each part taken away"]
    assert "| FedCat-Plus (lead 0) |" in page
    assert "| FedAvg (average 4) |" in page
    assert "| 1.00 | 1.50 |" in page
    assert Path("r/figures/plus-lab-digits.png").exists()
    assert Path("r/figures/plus-traffic-lab-digits.png").exists()
    code, out, _ = fedcat_command("reproduce", "plus", "--methods", "fedavg,fedcat-plus", *FEW, "--validation", "0.1")
    assert code == 0
    assert "2 runs side by side" in out
    assert "| chosen |" in Path("r/plus.md").read_text()


def test_choices_of_fedcat_plus(fedcat_command):
    few = ["--dataset", "digits", "--alpha", "1.0", "--seeds", "1", "--rounds", "5", "--workers", "1", "--out", "r"]
    code, _, _ = fedcat_command("reproduce", "choices", "--methods", "fedcat-plus", *few)
    assert code == 0
    page = Path("r/choices-fedcat-plus.md").read_text()
    assert "| FedCat-Plus (gain 0.5) |" in page
    assert "| the default |" in page


def test_the_theorem(fedcat_command):
    code, out, _ = fedcat_command("reproduce", "theorem", "--rounds", "20", "--seeds", "1", "--out", "r")
    assert code == 0
    assert "bound / measured" in out
    found = json.loads(Path("r/theorem.json").read_text())
    assert found["steps"][-1] == 140
    assert found["gaps"]["FedCat"][0][-1] < found["bounds"]["FedCat"][-1]
    assert Path("r/figures/theorem.pdf").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table1", "--dataset", "cifar"], "unknown dataset 'cifar'"),
        (["table1", "--methods", "fedcot"], "unknown methods 'fedcot': did you mean 'fedcat'"),
        (["table1", "--alpha", "a"], "alpha must be numbers such as 0.1,0.5, got 'a'"),
        (["table1", "--preset", "x"], "unknown preset 'x'"),
        (["table1", "--seeds", "0"], "seeds must be at least 1"),
        (["table1", "--alpha", "0"], "alpha must be > 0, got 0"),
        (["table1", "--rounds", "0"], "rounds must be at least 1"),
        (["table1", "--validation", "1"], "validation must be"),
        (["curves", "--validation", "0.1"], "validation is for table1, table2, plus: curves shows"),
        (["table1", "-o", "clip=10"], "option must have the form METHOD.NAME=VALUE, got 'clip'"),
        (["table1", "-o", "scafold.clip=10"], "unknown method 'scafold': did you mean 'scaffold'"),
        (
            ["table1", "-o", "fedcat-dc.local_steps=1"],
            "option of fedcat-dc has no effect: the methods are fedavg, fedprox",
        ),
        (["table1", "-o", "scaffold.clip=[1,2]"], "clip must be a number"),
        (["table1", "-o", "scaffold.clip=-1"], "clip must be"),
        (["table1", "-o", "fedcat.epsilom=1"], "unknown option of fedcat 'epsilom': did you mean 'epsilon'"),
        (["table1", "--partition", "x"], "unknown partition 'x'"),
        (["choices", "--minutes", "0", "--out", "empty"], "no run of choices is there yet"),
        (["table1", "--minutes", "-1"], "minutes must be at least 0"),
        (["table1", "--minutes", "0", "--out", "empty"], "no run of table1 is there yet"),
    ],
)
def test_mistakes_are_named(fedcat_command, words, message):
    code, _, err = fedcat_command("reproduce", *words)
    assert code == 2
    assert message in err
