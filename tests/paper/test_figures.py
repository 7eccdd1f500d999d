"""Figures of runs that were made up: which lines they have, and on which axis."""

import pytest

from fedcat.paper import figures
from fedcat.paper.archive import Archive
from fedcat.paper.case import Case
from fedcat.paper.pages import study_page
from fedcat.paper.study import rows
from fedcat.paper.tables import Row
from fedcat.report.curves import Curve, draw_panels

SEEDS = [10, 11, 12]
RISING = [0.5, 0.6, 0.7, 0.7, 0.7, 0.7]


@pytest.fixture
def drawn(monkeypatch):
    """Return what is drawn instead of drawing it: the panels, the file and the axis of each figure."""
    found = []

    def keep(panels, path, *labels, log, log_error):
        found.append((panels, path, log_error))

    monkeypatch.setattr(figures, "draw_panels", keep)
    return found


def row_of(folder, make_run, **accuracies):
    """Return a row of CIFAR-10 at alpha 0.1: for each method, the accuracies of each seed."""
    archive = Archive(folder)
    methods = [name.replace("_", "-") for name in accuracies]
    for method, seeds in zip(methods, accuracies.values(), strict=True):
        archive.add([make_run(Case("cifar10", method, 0.1), 10 + n, list(mine)) for n, mine in enumerate(seeds)])
    (cases,) = rows(("cifar10",), methods, (0.1,))
    return Row.of(archive, cases, SEEDS)


def draw(row, folder, *methods):
    figures.draw_rows([row], folder / "f", methods, figures.accuracy_over_rounds, "x", "y")


@pytest.mark.parametrize("bad", [[0.5, *[0.1] * 5], [0.1] * 6], ids=["fell apart", "learned nothing"])
def test_a_method_of_which_a_run_failed_has_a_line_for_each_seed(tmp_path, make_run, drawn, bad):
    fell = [bad, [0.5] * 6, [0.5] * 6]
    row = row_of(tmp_path, make_run, fedavg=[RISING] * 3, scaffold=fell, fedcat=[RISING] * 3)
    draw(row, tmp_path, "fedavg", "scaffold")
    (curves,) = drawn[0][0].values()
    assert len({curve.color for curve in curves[1:]}) == 1
    assert curves[1].width < curves[0].width
    assert [curve.label for curve in curves] == ["FedAvg", "SCAFFOLD", "_", "_"]
    assert [len(curve.values) for curve in curves] == [3, 1, 1, 1]


def test_accuracies_near_100_are_drawn_by_their_errors(tmp_path, make_run, drawn):
    high, higher = [0.5, *[0.97] * 5], [0.5, *[0.99] * 5]
    draw(row_of(tmp_path / "a", make_run, fedavg=[high] * 3, fedcat=[higher] * 3), tmp_path, "fedavg", "fedcat")
    fallen = [high, high, [0.5, 0.9, *[0.1] * 4]]
    draw(row_of(tmp_path / "b", make_run, fedavg=fallen, fedcat=[higher] * 3), tmp_path, "fedavg", "fedcat")
    draw(row_of(tmp_path / "c", make_run, fedavg=[RISING] * 3, fedcat=[higher]), tmp_path, "fedavg", "fedcat")
    assert [log_error for _, path, log_error in drawn if path.suffix == ".png"] == [True, True, False]


def test_an_axis_by_errors_has_room_and_ticks_for_all_values(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("fedcat.report.curves.save", lambda figure, path: seen.append(figure.axes[0]))
    curves = [Curve("a", [1, 2], [[60.0, 99.2]]), Curve("b", [1, 2], [[80.0, 100.0]])]
    draw_panels({"": curves}, tmp_path / "f.png", "x", "y", log_error=True)
    (axes,) = seen
    low, high = axes.get_ylim()
    assert low < 60
    assert 99.98 < high < 100
    ticks = [label.get_text() for label in axes.get_yticklabels()]
    assert ticks == ["70", "80", "85", "90", "95", "98", "99", "99.5", "99.8", "99.9"]
    at = [axes.transData.transform((0, value))[1] for value in (80, 90, 95)]
    assert at[2] - at[1] == pytest.approx(at[1] - at[0])
    assert axes.get_ylabel() == "y, log error"


def test_there_is_no_ablation_figure_without_ablations(tmp_path, make_run, drawn):
    some = row_of(tmp_path / "a", make_run, fedavg=[RISING], fedcat=[RISING], fedcat_gc=[])
    both = row_of(tmp_path / "b", make_run, fedavg=[RISING], fedcat=[RISING], fedcat_gc=[RISING])
    for row in (some, both):
        study_page("curves", [row], tmp_path)
    names = [path.stem for _, path, _ in drawn if path.suffix == ".png"]
    assert names == ["methods-lab-cifar10", "methods-lab-cifar10", "ablation-lab-cifar10"]
