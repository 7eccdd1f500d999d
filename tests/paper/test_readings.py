"""What is read off runs: by hand."""

import math

import pytest

from fedcat.paper.case import Case
from fedcat.paper.readings import (
    Cell,
    Paired,
    average_best,
    average_last_five,
    best,
    chosen,
    last_five,
    reached,
    validation_last_five,
    within,
)

A, B = Case("cifar10", "fedcat", 0.1), Case("cifar10", "fedavg", 0.1)
RISING = [0.1, 0.2, 0.3, 0.4, 0.5, 0.9, 0.7]


def test_readings_of_a_run(make_run):
    run = make_run(A, 10, RISING, average=[0.2, 0.4], validation=[0.1, 0.8, 0.3, 0.8, 0.2, 0.2, 0.2])
    assert best(run) == pytest.approx(90)
    assert last_five(run) == pytest.approx(100 * (0.3 + 0.4 + 0.5 + 0.9 + 0.7) / 5)
    assert chosen(run) == pytest.approx(20)  # the first of the two best validation accuracies
    assert (average_best(run), average_last_five(run)) == pytest.approx((40, 30))
    assert validation_last_five(run) == pytest.approx(100 * (0.3 + 0.8 + 0.2 * 3) / 5)


def test_what_is_not_there_is_not_a_number(make_run):
    assert math.isnan(best(make_run(A, 10)))
    assert math.isnan(chosen(make_run(A, 10, RISING)))
    assert best(make_run(A, 10, [0.2, math.nan])) == pytest.approx(20)
    assert chosen(make_run(A, 10, [0.3, 0.2], validation=[math.nan, 0.1])) == pytest.approx(20)
    assert Cell(A, []).text(best) == ""


def test_a_run_that_ends_when_bytes_are_spent(make_run):
    run = make_run(A, 10, RISING, price=200)
    assert within(1400)(run) == pytest.approx(last_five(run))
    assert within(600)(run) == pytest.approx(20)
    assert within(599)(run) == pytest.approx(15)
    assert math.isnan(within(100)(run))


def test_when_an_accuracy_is_reached(make_run):
    run = make_run(A, 10, RISING)
    means = [30, 46, 56]
    assert [reached(run, mean) for mean in means] == [4, 5, 6]
    assert reached(run, 5) == 4
    assert reached(run, 56.1) is None


def test_differences_are_paired_by_seed(make_run):
    one = Cell(A, [make_run(A, seed, [value]) for seed, value in ((10, 0.5), (11, 0.6), (12, 0.7), (13, 0.1))])
    other = Cell(B, [make_run(B, seed, [value]) for seed, value in ((12, 0.4), (10, 0.4), (11, 0.4))])
    paired = Paired.of(one, other, best)
    assert paired.differences == pytest.approx([10, 20, 30])
    assert (paired.mean, paired.error) == pytest.approx((20, 10 / math.sqrt(3)))
    assert paired.needed == pytest.approx(2.92 * 10 / math.sqrt(3), abs=0.01)
    assert (paired.verdict, paired.text) == ("ahead", "**+20.00 ± 5.77**")


@pytest.mark.parametrize(
    ("differences", "verdict", "text"),
    [
        ([1.0, 1.1, 0.9], "ahead", "**+1.00 ± 0.06**"),
        ([-1.0, -1.1, -0.9], "behind", "**-1.00 ± 0.06**"),
        ([3.0, -1.0, 1.0], "open", "+1.00 ± 1.15"),
        ([1.0, 1.0, 1.0], "ahead", "**+1.00 ± 0.00**"),
        ([2.0], "open", "+2.00"),
        ([], "open", ""),
    ],
)
def test_a_difference_counts_from_2_9_standard_errors_on(differences, verdict, text):
    assert (Paired(differences).verdict, Paired(differences).text) == (verdict, text)


def test_mean_and_deviation_over_seeds(make_run):
    cell = Cell(A, [make_run(A, seed, [value]) for seed, value in ((10, 0.5), (11, 0.6), (12, 0.7))])
    assert cell.mean_std(best) == pytest.approx((60, 10))
    assert cell.text(best) == "60.00 ± 10.00"
    assert Cell(A, cell.runs[:1]).text(best) == "50.00"
