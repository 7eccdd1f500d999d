"""Cases: their settings, names and commands, and which cases a study needs."""

from dataclasses import replace

import pytest

from fedcat.paper import study
from fedcat.paper.case import Case, default_rounds, has_alpha
from fedcat.runs.build import Builder


def test_settings_of_a_case():
    case = Case("cifar10", "fedcat", 0.1, rounds=500, precision="bf16", validation=0.1, options=(("epsilon", 0.0),))
    assert case.given() == {
        "method": "fedcat",
        "dataset": "cifar10",
        "rounds": 500,
        "preset": "lab",
        "alpha": 0.1,
        "validation": 0.1,
        "precision": "bf16",
        "average": 0.95,
        "options": {"fedcat": {"epsilon": 0.0}},
    }
    assert "average" not in replace(case, choosing=True).given()
    assert "preset" not in Case("digits", "fedavg", 0.1).given()


def test_the_command_of_a_case():
    case = Case("cifar10", "fedcat", 1.0, exact=True, options=(("lambda", 2.0),))
    (command,) = case.commands([10, 11])
    assert command == (
        "fedcat compare --methods fedcat --seed 10 --seeds 2 --dataset cifar10 --rounds 1000 --preset lab --alpha 1.0 "
        "--exact --average 0.95 -o fedcat.lambda=2"
    )


def test_options_reach_the_run():
    case = Case("digits", "scaffold", 1.0, rounds=1, options=(("clip", 10.0), ("variant", "after-step")))
    settings = Builder().build({**case.given(), "workers": 1}).settings
    assert (settings.clip, settings.options["scaffold"]["variant"]) == (10.0, "after-step")
    assert case.label == "SCAFFOLD (clip 10, variant after-step)"
    assert case.file_parts == ["scaffold-clip-10", "scaffold-variant-after-step"]
    assert case.commands([10])[0].endswith("-o scaffold.clip=10 -o scaffold.variant=after-step")


@pytest.mark.parametrize(
    ("value", "text"), [(10.0, "10"), (0.012345678, "0.012345678"), (True, "true"), (3, "3"), ("a", "a")]
)
def test_options_are_printed_as_one_types_them(value, text):
    (command,) = Case("mnist", "fedavg", options=(("lr", value),)).commands([10])
    assert command.endswith(f"-o fedavg.lr={text}")


def test_a_case_comes_back_from_its_plain_values():
    for case in (Case("mnist", "fedavg"), Case("mnist", "fedcat", 0.5, "paper", 3, options=(("epsilon", 1.0),))):
        assert Case.from_dict(case.as_dict()) == case
    assert Case("mnist", "fedavg").as_dict() == {"dataset": "mnist", "method": "fedavg"}


def test_names_as_the_paper_writes_them():
    case = Case("cifar100", "fedcat-gc", 0.5, options=(("epsilon", 1.0),))
    assert (case.row, case.label) == ("CIFAR-100, alpha 0.5", "w/ GC (epsilon 1)")
    assert (Case("femnist", "fedavg").row, Case("digits", "mine").label) == ("FEMNIST", "mine")


def test_rows_of_a_table():
    found = study.rows(("femnist", "cifar10"), ("fedavg", "fedcat"), (0.1, 1.0))
    assert [(row[0].dataset, row[0].alpha, row[0].rounds) for row in found] == [
        ("femnist", None, 1008),
        ("cifar10", 0.1, 1000),
        ("cifar10", 1.0, 1000),
    ]
    assert [case.method for case in found[0]] == ["fedavg", "fedcat"]
    assert not has_alpha("femnist", "lab")
    assert has_alpha("digits", "lab")
    assert default_rounds("cifar10", "paper") == 300
    hsu = study.rows(("femnist", "cifar10"), ("fedavg",), (0.1,), "paper", None, "bf16", "dirichlet-hsu")
    assert [(row[0].partition, row[0].precision) for row in hsu] == [("", "bf16"), ("dirichlet-hsu", "bf16")]


def test_choices_try_every_number_without_the_test_data():
    first, second = study.choices()
    assert (first[0].alpha, second[0].alpha, first[0].rounds) == (0.1, 1.0, 500)
    tried = [dict(case.options) for case in first if case.method == "fedcat"]
    assert len(tried) == 12
    assert {one["epsilon"] for one in tried} == {0.0, 0.5, 1.0}
    assert {one["lambda"] for one in tried} == {1.0, 2.0, 5.0, 10.0}
    assert [case.options for case in first if case.method == "scaffold"] == [(), (("clip", 10.0),)]
    assert all(case.choosing and case.validation == 0.1 for case in (*first, *second))


def test_seeds_that_are_missing_are_not_in_the_commands():
    found = [line.split(" --dataset")[0] for line in Case("mnist", "fedavg").commands([10, 12, 13])]
    start = "fedcat compare --methods fedavg"
    assert found == [f"{start} --seed 10 --seeds 1", f"{start} --seed 12 --seeds 2"]


def test_a_partition_without_alpha_has_one_row():
    found = study.rows(("cifar10",), ("fedavg",), (0.1, 1.0), partition="iid")
    assert [(row[0].alpha, row[0].partition) for row in found] == [(None, "iid")]
