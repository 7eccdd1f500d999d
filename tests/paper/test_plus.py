"""FedCat-Plus against its rivals: rows won, the first rounds, and parts taken away."""

from dataclasses import replace

import pytest

from fedcat.paper import plus
from fedcat.paper.archive import Archive
from fedcat.paper.case import Case
from fedcat.paper.study import rows, variants
from fedcat.paper.tables import Row

SEEDS = (10, 11, 12)
METHODS = ("fedavg", "scaffold", "fedcat-plus")


def archive_of(path, make_run, levels):
    """Return runs of methods, or of cases, whose accuracy is a level, a little higher with every seed."""
    archive = Archive(path)
    for key, (level, average) in levels.items():
        case = key if isinstance(key, Case) else Case("cifar10", key, 0.1)
        for place, seed in enumerate(SEEDS):
            value = level + 0.001 * place
            archive.add([make_run(case, seed, [value / 2, *[value] * 59], average=[average + 0.001 * place] * 60)])
    return archive


def row_of(archive):
    (cases,) = rows(("cifar10",), METHODS, (0.1,))
    return Row.of(archive, cases, SEEDS)


LEVELS = {"fedavg": (0.5, 0.52), "scaffold": (0.55, 0.54), "fedcat-plus": (0.6, 0.7)}
CLIPPED = Case("cifar10", "scaffold", 0.1, options=(("clip", 10.0),))


@pytest.mark.parametrize(
    ("changed", "rival", "difference", "verdict"),
    [
        ({}, "SCAFFOLD", "**+5.00 ± 0.00**", "won"),
        ({"fedavg": (0.5, 0.58)}, "FedAvg, average", "**+2.00 ± 0.00**", "won"),
        ({CLIPPED: (0.61, 0.3)}, "SCAFFOLD (clip 10)", "**-1.00 ± 0.00**", "lost"),
        ({"scaffold": (0.6, 0.3)}, "SCAFFOLD", "+0.00 ± 0.00", "tie"),
        ({replace(CLIPPED, precision="bf16"): (0.9, 0.9)}, "SCAFFOLD", "**+5.00 ± 0.00**", "won"),
        (
            {Case("cifar10", "fedcat-plus", 0.1, options=(("lead", 0.0),)): (0.9, 0.9)},
            "SCAFFOLD",
            "**+5.00 ± 0.00**",
            "won",
        ),
    ],
)
def test_a_row_is_won_against_the_best_of_all_rivals(tmp_path, make_run, changed, rival, difference, verdict):
    sheet = plus.won_sheet([row_of(archive_of(tmp_path, make_run, LEVELS | changed))])
    ((name, by, seeds, _, found, _, paired, word),) = sheet.rows
    assert (name, by, seeds) == ("CIFAR-10, alpha 0.1", "last five", "3")
    assert (found, paired, word) == (rival, difference, verdict)


def test_a_row_is_lost_if_any_rival_is_better_beyond_chance(tmp_path, make_run):
    """Another one with a higher mean varies so much that the difference to it says nothing."""
    archive = archive_of(tmp_path, make_run, LEVELS | {"scaffold": (0.605, 0.3)})
    noisy = Case("cifar10", "fedavg", 0.1, options=(("clip", 10.0),))
    archive.add(make_run(noisy, seed, [value] * 60) for seed, value in zip(SEEDS, (0.66, 0.55, 0.64), strict=True))
    ((*_, found, _, _, word),) = plus.won_sheet([row_of(archive)]).rows
    assert (found, word) == ("SCAFFOLD", "lost")


def test_a_rival_that_lacks_seeds_does_not_decide(tmp_path, make_run):
    archive = archive_of(tmp_path, make_run, LEVELS)
    archive.add([make_run(CLIPPED, 10, [0.9] * 60)])
    ((*_, found, _, _, word),) = plus.won_sheet([row_of(archive)]).rows
    assert (found, word) == ("SCAFFOLD", "won")


def test_a_rival_far_behind_needs_three_of_five_seeds(tmp_path, make_run):
    archive = archive_of(tmp_path, make_run, LEVELS | {"fedavg": (0.65, 0.5)})
    for method in ("scaffold", "fedcat-plus"):
        archive.add([make_run(Case("cifar10", method, 0.1), seed, [0.58] * 60) for seed in (13, 14)])
    (cases,) = rows(("cifar10",), METHODS, (0.1,))
    (line,) = plus.won_sheet([Row.of(archive, cases, (*SEEDS, 13, 14))]).rows
    assert line[2:] == ["3", "60.10 ± 0.10", "FedAvg", "65.10 ± 0.10", "**-5.00 ± 0.00**", "lost"]


def test_chosen_is_judged_in_the_runs_with_data_held_out(tmp_path, make_run):
    archive = archive_of(tmp_path, make_run, LEVELS)
    for method, value in (("scaffold", 0.45), ("fedcat-plus", 0.44)):
        case = Case("cifar10", method, 0.1, validation=0.1)
        found = {"average": [0.46, 0.9, 0.1], "validation": [0.2, 0.1, 0.1]}
        archive.add(make_run(case, seed, [value, 0.1, 0.1], **found) for seed in SEEDS)
    last = plus.won_sheet([row_of(archive)]).rows[-1]
    assert last[1:] == [
        "chosen",
        "3",
        "44.00 ± 0.00",
        "SCAFFOLD, average",
        "46.00 ± 0.00",
        "**-2.00 ± 0.00**",
        "lost",
    ]


def test_without_runs_nothing_is_judged(tmp_path, make_run):
    row = row_of(archive_of(tmp_path, make_run, {"fedcat-plus": (0.5, 0.5)}))
    assert [sheet([row]).rows for sheet in (plus.won_sheet, plus.early_sheet, plus.parts_sheet)] == [[], [], []]


def test_the_first_rounds_against_fedavg(tmp_path, make_run):
    archive = archive_of(tmp_path, make_run, {"fedavg": (0.5, 0.5)})
    archive.add(make_run(Case("cifar10", "fedcat-plus", 0.1), seed, [i / 100 for i in range(60)]) for seed in SEEDS)
    (line,) = plus.early_sheet([row_of(archive)]).rows
    values = [float(text.strip("*").split(" ")[0]) for text in line[1:]]
    assert values == pytest.approx([4 - 50.1, 9 - 50.1, 19 - 50.1, 49 - 50.1], abs=0.006)
    short = Archive(tmp_path / "short")
    for method in ("fedavg", "fedcat-plus"):
        short.add(make_run(Case("cifar10", method, 0.1), seed, [0.5] * 12) for seed in SEEDS)
    (line,) = plus.early_sheet([row_of(short)]).rows
    assert line[3:] == ["not run", "not run"]  # they ended after 120 rounds


def test_parts_are_taken_away_in_turn(tmp_path, make_run):
    (cases,) = variants(rows(("cifar10",), METHODS, (0.1,)))
    assert [case.label for case in cases] == [
        *("FedAvg (average 4)", "SCAFFOLD (clip 10)", "SCAFFOLD (lr 0.015)", "SCAFFOLD (average 4)"),
        *(f"FedCat-Plus ({part} 0)" for part in ("spread", "lead", "own", "gain", "smoothing")),
        "FedCat-Plus (grouping false)",
    ]
    archive = archive_of(tmp_path, make_run, {**LEVELS, cases[5]: (0.57, 0.5), cases[1]: (0.4, 0.4)})
    sheet = plus.parts_sheet([row_of(archive)])
    assert sheet.rows == [["FedCat-Plus", "60.10 ± 0.10"], ["FedCat-Plus (lead 0)", "**-3.00 ± 0.00**"]]
    (held,) = variants(rows(("cifar10",), METHODS, (0.1,), validation=0.1))
    assert [case.label for case in held] == ["SCAFFOLD (clip 10)"]
    (easy,) = variants(rows(("mnist",), METHODS, (0.1,)))
    assert [case.label for case in easy] == ["FedAvg (average 4)", "SCAFFOLD (clip 10)", "SCAFFOLD (average 4)"]
    assert variants(rows(("mnist",), ("fedcat-plus",), (0.1,))) == []
    (nearest,) = variants(rows(("femnist",), ("fedmr", "fedcm")))
    assert [case.label for case in nearest] == ["FedMR (lr 0.015)", "FedMR (average 4)", "FedCM (average 4)"]
