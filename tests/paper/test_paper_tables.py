"""Tables of runs that were made up: cells, differences, reach and claims, each known by hand."""

from dataclasses import replace

import pytest

from fedcat.paper import claims, readings, tables
from fedcat.paper.archive import Archive
from fedcat.paper.case import Case
from fedcat.paper.choices import choices_sheet
from fedcat.paper.fairness import client_sheets, participation_sheets
from fedcat.paper.readings import Cell
from fedcat.paper.study import choices, rows
from fedcat.paper.tables import Row

SEEDS = [10, 11, 12]
NAMES = ("fedavg", "scaffold", "fedcat-gc", "fedcat-dc", "fedcat")


def archive_of(tmp_path, make_run, levels, prices=None, **more):
    """Return an archive of CIFAR-10 at alpha 0.1: each method rises to its level and stays there."""
    archive = Archive(tmp_path)
    for method, level in levels.items():
        case = Case("cifar10", method, 0.1, **more.get("case", {}))
        for place, seed in enumerate(SEEDS):
            curve = [level / 2, *[level + 0.001 * place] * 9]
            archive.add([make_run(case, seed, curve, price=(prices or {}).get(method, 100))])
    return archive


def row_of(archive, names=NAMES):
    (cases,) = rows(("cifar10",), names, (0.1,))
    return Row.of(archive, cases, SEEDS)


LEVELS = {"fedavg": 0.50, "scaffold": 0.60, "fedcat-gc": 0.49, "fedcat-dc": 0.55, "fedcat": 0.56}


def test_the_papers_number_stands_beside_ours(tmp_path, make_run):
    row = row_of(archive_of(tmp_path, make_run, {"fedavg": 0.5, "fedcat": 0.56}))
    sheet = tables.accuracy_sheet([row], "Best", readings.best, "note", paper=True)
    assert list(sheet.columns) == ["", "FedAvg", "SCAFFOLD", "w/ GC", "w/ DC", "FedCat"]
    assert sheet.rows == [
        [
            *("CIFAR-10, alpha 0.1", "50.10 ± 0.10 (51.01, -0.91)", "not run (52.81)", "not run (51.02)"),
            *("not run (55.06)", "56.10 ± 0.10 (56.16, -0.06)"),
        ]
    ]
    detail = tables.detail_sheet(row)
    assert detail.title == "CIFAR-10, alpha 0.1, 1,000 rounds, 3 seeds"
    assert list(detail.rows[-1][:5]) == ["FedCat", "56.10 ± 0.10", "56.16", "-0.06", "56.10 ± 0.10"]


def test_cells_with_another_number_of_seeds_are_named(tmp_path, make_run):
    archive = archive_of(tmp_path, make_run, LEVELS)
    assert tables.accuracy_sheet([row_of(archive)], "Best", readings.best, "note").notes == ["note"]
    archive.add([make_run(Case("cifar10", "scaffold", 0.1), seed, [0.5]) for seed in (13, 14)])
    (cases,) = rows(("cifar10",), NAMES, (0.1,))
    sheet = tables.accuracy_sheet([Row.of(archive, cases, [*SEEDS, 13, 14])], "Best", readings.best, "note")
    assert sheet.notes == ["note", "Means are over 3 seeds, but for CIFAR-10, alpha 0.1, SCAFFOLD: 5."]


def test_a_dataset_that_the_paper_lacks_has_no_column_of_it(tmp_path, make_run):
    archive = Archive(tmp_path)
    archive.add([make_run(Case("digits", "fedavg", 0.1), 10, [0.5])])
    (cases,) = rows(("digits",), ("fedavg",), (0.1,))
    sheet = tables.detail_sheet(Row.of(archive, cases, SEEDS))
    assert list(sheet.columns) == ["method", "best", "last five", "average: best", "average: last five"]


def test_fedcat_against_rivals_at_equal_rounds_and_bytes(tmp_path, make_run):
    archive = archive_of(tmp_path, make_run, LEVELS, {"scaffold": 500})
    rounds, moved, *_ = tables.champion_sheets([row_of(archive)])
    assert rounds.rows == [
        ["CIFAR-10, alpha 0.1", "**+6.00 ± 0.00**", "**-4.00 ± 0.00**", "**+7.00 ± 0.00**", "**+1.00 ± 0.00**"]
    ]
    # SCAFFOLD has moved FedCat's 1,000 bytes after two evaluations, 30 % and 60 %
    assert moved.rows[0][2] == "**+11.05 ± 0.03**"
    assert moved.rows[0][1] == rounds.rows[0][1]


def test_rounds_and_bytes_to_the_accuracy_of_fedavg(tmp_path, make_run):
    archive = archive_of(tmp_path, make_run, {**LEVELS, "fedcat-gc": 0.4}, {"scaffold": 2_000_000})
    sheet = claims.reach_sheet([row_of(archive)])
    # FedAvg: 25 % once, then 50 %: the mean of five is 50 % from the sixth evaluation on
    assert sheet.rows[0][1:] == ["50.10", "60; 0 MB", "50; 10 MB", "never", "60; 0 MB", "50; 0 MB"]
    traffic = claims.traffic_sheet([row_of(archive)])
    assert traffic.rows[0][2:4] == ["1.00", "20000.00"]


@pytest.mark.parametrize(
    ("changed", "best", "order"),
    [
        ({}, "no (higher: SCAFFOLD)", "no (but: FedAvg > GC)"),
        ({"scaffold": 0.3, "fedcat-gc": 0.51}, "yes", "yes"),
        ({"scaffold": 0.3, "fedcat-dc": 0.57}, "no (higher: w/ DC)", "no (but: FedAvg > GC, DC > FedCat)"),
    ],
)
def test_claims_hold_or_not(tmp_path, make_run, changed, best, order):
    sheet = claims.claims_sheet([row_of(archive_of(tmp_path, make_run, LEVELS | changed))], list(claims.CLAIMS))
    assert sheet.rows[0][:4] == ["CIFAR-10, alpha 0.1", "last five", best, order]


def test_a_method_that_never_gets_there_is_not_the_fastest(tmp_path, make_run):
    row = row_of(archive_of(tmp_path, make_run, {**LEVELS, "fedcat": 0.3}))
    assert claims.claims_sheet([row], list(claims.CLAIMS)).rows[0][4:] == ["no (not with every seed)"] * 2
    without = row_of(archive_of(tmp_path / "b", make_run, {"fedavg": 0.5, "fedcat": 0.6}), ("fedavg", "fedcat"))
    sheet = claims.claims_sheet([without], (claims.BEST, claims.ROUNDS, claims.TRAFFIC))
    assert sheet.rows == [["CIFAR-10, alpha 0.1", "last five", "yes", "yes", "yes"]]


def test_chosen_comes_from_the_runs_with_validation_data(tmp_path, make_run):
    archive = archive_of(tmp_path, make_run, {"fedavg": 0.5, "fedcat": 0.6})
    for method, value in (("fedavg", 0.45), ("fedcat", 0.44)):
        case = Case("cifar10", method, 0.1, validation=0.1)
        archive.add(make_run(case, seed, [0.3, value], validation=[0.1, 0.2]) for seed in SEEDS)
    row = row_of(archive, ("fedavg", "fedcat"))
    assert tables.accuracy_sheet([row], "", readings.chosen, "").rows[0][1:] == ["45.00 ± 0.00", "44.00 ± 0.00"]
    found = {line[1]: line[2] for line in claims.claims_sheet([row], [claims.BEST]).rows}
    assert found == {"last five": "yes", "chosen": "no (higher: FedAvg)"}
    assert [sheet.title for sheet in tables.champion_sheets([row])][2] == "FedCat minus rival: chosen, equal rounds"


def test_variants_of_a_cell_stand_beside_the_table(tmp_path, make_run):
    archive = archive_of(tmp_path, make_run, {"fedavg": 0.5, "scaffold": 0.6, "fedcat": 0.56})
    archive.add(make_run(Case("cifar10", "fedavg", 0.1, precision="tf32"), seed, [0.51] * 5) for seed in SEEDS)
    archive.add([make_run(Case("cifar10", "fedavg", 0.1, exact=True), 10, [0.5] * 5)])
    clipped = Case("cifar10", "scaffold", 0.1, options=(("clip", 10.0),))
    archive.add(make_run(clipped, seed, [0.61] * 5, average=[0.63] * 5) for seed in SEEDS)
    archive.add([make_run(clipped, 13, [0.99] * 5)])  # of a seed that is not asked for
    lines = tables.variants_sheet([row_of(archive)]).rows
    assert [line[1] for line in lines] == ["FedAvg, exact", "FedAvg, tf32", "SCAFFOLD (clip 10)"]
    assert lines[1][2:] == [*["51.00 ± 0.00", "**+0.90 ± 0.06**"] * 2, "", "**+5.10 ± 0.06**"]
    assert lines[2][2:] == [*["61.00 ± 0.00", "**+0.90 ± 0.06**"] * 2, "63.00 ± 0.00", "**-4.90 ± 0.06**"]


def test_a_choice_counts_if_it_gains_on_validation_data(tmp_path, make_run):
    archive, table = Archive(tmp_path), choices()
    for number, row in enumerate(table):
        for case in row:
            gain = {(("epsilon", 1.0), ("lambda", 5.0)): 0.02, (("epsilon", 0.0), ("lambda", 1.0)): -0.01}
            for place, seed in enumerate(SEEDS):
                value = 0.5 + 0.1 * number + 0.01 * place + gain.get(case.options, 0.0)
                archive.add([make_run(case, seed, validation=[value] * 6)])
    lines = {line[0]: line[1:] for line in choices_sheet(archive, table, SEEDS).rows}
    assert lines["FedCat (epsilon 0.5, lambda 1)"] == ["51.00 ± 1.00", "61.00 ± 1.00", "the default", ""]
    assert lines["FedCat (epsilon 1, lambda 5)"] == ["53.00 ± 1.00", "63.00 ± 1.00", "**+2.00 ± 0.00**", "0.00"]
    assert lines["FedCat (epsilon 0, lambda 1)"][2] == "**-1.00 ± 0.00**"
    assert lines["SCAFFOLD"][2] == "the default"


def test_fairness_shows_participation_and_clients(tmp_path, make_run):
    archive = Archive(tmp_path)
    for method, mean in (("fedavg", 0.5), ("fedcat", 0.6)):
        clients = {"mean": mean, "worst_decile": 0.25, "std": 0.1}
        archive.add(make_run(Case("cifar10", method, 0.1), s, [0.5] * 6, clients=clients) for s in SEEDS)
    row = row_of(archive, ("fedavg", "fedcat"))
    (shown,) = participation_sheets([row])
    assert list(shown.columns)[1:] == [
        "coverage, 10 rounds",
        "coverage, 50 rounds",
        "least",
        "most",
        "entropy",
        "distinct",
    ]
    assert [line[1:] for line in shown.rows] == [
        ["50.0", "50.0", "1", "3", "0.9000", ""],
        ["50.0", "50.0", "1", "3", "0.9000", "2.00"],
    ]
    (clients,) = client_sheets([row])
    assert clients.rows[0][4:] == ["**+10.00 ± 0.00**", "+0.00 ± 0.00"]
    assert clients.rows[1] == ["FedCat", "60.00 ± 0.00", "25.00 ± 0.00", "10.00 ± 0.00", "", ""]


def test_cells_that_differ_from_the_paper_are_listed(tmp_path, make_run):
    levels = {"fedavg": 0.505, "scaffold": 0.60, "fedcat": 0.5641}  # the paper has 51.01, 52.81 and 56.16
    sheet = tables.differing_sheet([row_of(archive_of(tmp_path, make_run, levels))])
    assert sheet.rows == [
        ["CIFAR-10, alpha 0.1, FedAvg", "50.50, 50.60, 50.70", "51.01", "-0.41"],
        ["CIFAR-10, alpha 0.1, SCAFFOLD", "60.00, 60.10, 60.20", "52.81", "+7.29"],
        ["CIFAR-10, alpha 0.1, FedCat", "56.41, 56.51, 56.61", "56.16", "+0.35"],
    ]
    close = {"fedavg": 0.5095, "fedcat": 0.56}
    assert tables.differing_sheet([row_of(archive_of(tmp_path / "b", make_run, close))]).rows == []


def test_runs_that_fell_apart_are_named(tmp_path, make_run):
    case = Case("cifar10", "scaffold", 0.1)
    runs = [
        make_run(case, 10, [0.2, 0.6, 0.4, 0.2, 0.5, *[0.1] * 5]),
        make_run(case, 11, [0.3, 0.6, *[0.31] * 5]),
        make_run(case, 12, [0.1, 0.1, 0.1, 0.1, 0.6]),  # rises late
        make_run(case, 13, [0.1] * 9),
    ]
    held = make_run(replace(case, validation=0.1, precision="bf16", exact=True), 12, [0.5, *[0.1] * 5])
    sheet = tables.failed_sheet([Row([Cell(case, runs)], [Cell(held.case, [held])])])
    assert sheet.rows == [
        ["CIFAR-10, alpha 0.1, SCAFFOLD, fp32, seed 10", "60.00", "40", "10.00"],
        ["CIFAR-10, alpha 0.1, SCAFFOLD, fp32, seed 13", "10.00", "learned nothing", "10.00"],
        ["CIFAR-10, alpha 0.1, SCAFFOLD, bf16, exact, seed 12, with data held out", "50.00", "20", "10.00"],
    ]


@pytest.mark.parametrize(
    ("dataset", "accuracy", "failed"),
    [
        ("mnist", [0.098, 0.1135, 0.1028, 0.1135, 0.0892, 0.098], True),  # always one digit, not always the same
        ("mnist", [0.098, 0.1135, 0.1028, 0.1135, 0.0892, 0.1136], False),
        ("cifar100", [0.05] * 6, True),
        ("cifar100", [0.1, *[0.05] * 5], False),
        ("cifar10", [0.1] * 5, False),  # too short to tell
        ("femnist", [0.07] * 6, True),  # the largest class depends on the sample, but nothing changed
        ("femnist", [0.07, *[0.06] * 5], False),
    ],
)
def test_a_run_no_better_than_a_constant_answer_learned_nothing(make_run, dataset, accuracy, failed):
    assert readings.stuck(make_run(Case(dataset, "fedcat", 0.1), 10, accuracy)) is failed


def test_every_method_against_fedavg(tmp_path, make_run):
    sheet = tables.fedavg_sheet([row_of(archive_of(tmp_path, make_run, LEVELS))])
    assert sheet.rows[0][1:] == ["**+10.00 ± 0.00**", "**-1.00 ± 0.00**", "**+5.00 ± 0.00**", "**+6.00 ± 0.00**"]


def test_claims_say_what_is_not_significant_and_what_is_equal(tmp_path, make_run):
    archive = Archive(tmp_path)
    for seed, fedavg, fedcat in ((10, 0.50, 0.52), (11, 0.51, 0.50), (12, 0.50, 0.52)):
        archive.add([make_run(Case("cifar10", "fedavg", 0.1), seed, [fedavg] * 12)])
        archive.add([make_run(Case("cifar10", "fedcat", 0.1), seed, [fedcat] * 12)])
    row = row_of(archive, ("fedavg", "fedcat"))
    (line,) = claims.claims_sheet([row], (claims.BEST, claims.ROUNDS)).rows
    assert line[2:] == ["yes (not significant: FedAvg)", "no (not with every seed)"]
    equal = row_of(archive_of(tmp_path / "b", make_run, {"fedavg": 0.5, "fedcat": 0.5}), ("fedavg", "fedcat"))
    (line,) = claims.claims_sheet([equal], (claims.BEST, claims.ROUNDS)).rows
    assert line[2:] == ["yes (equal: FedAvg; not significant: FedAvg)", "yes (equal: FedAvg)"]


def test_short_runs_are_not_asked_when_they_reached_an_accuracy(tmp_path, make_run):
    archive = Archive(tmp_path)
    for method in ("fedavg", "fedcat"):
        archive.add(make_run(Case("cifar10", method, 0.1), seed, [0.5] * 5) for seed in SEEDS)
    row = row_of(archive, ("fedavg", "fedcat"))
    assert claims.reach_sheet([row]).rows == []
    assert claims.claims_sheet([row], (claims.ROUNDS,)).rows == []
    assert list(claims.claims_sheet([row], (claims.BEST, claims.ROUNDS)).columns) == ["", "by", claims.BEST]
