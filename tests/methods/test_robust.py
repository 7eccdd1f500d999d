"""Robust aggregators: what they return, what they let through, and what they do with few rows."""

import math

import pytest
import torch
from helpers import DEVICES, drive, federation, layout_of, simulate

import fedcat
from fedcat.core.errors import SettingError
from fedcat.methods import FedAvg
from fedcat.methods.aggregation import AGGREGATORS, make_aggregator
from fedcat.methods.average import weighted_mean

NAMES = ["clipped", "geometric-median", "krum", "median", "trimmed-mean"]
FED = federation([3, 9, 5, 12, 7, 4])


def made(name, size=None, **options):
    aggregator = make_aggregator(name, AGGREGATORS.get(name), options)
    aggregator.parameter_size = size
    return aggregator


def reduced(name, rows, weights=None, start=None, size=None, **options):
    rows = torch.as_tensor(rows, dtype=torch.float64) if isinstance(rows, list) else rows
    weights = [1] * len(rows) if weights is None else weights
    start = torch.zeros_like(rows[0]) if start is None else start
    return made(name, size, **options).aggregate(rows, weights, start)


def cloud(count, dtype=torch.float32, size=50, seed=0):
    """Return a global row and honest rows about one unit away from it, half a unit apart."""
    rng = torch.Generator().manual_seed(seed)
    start = torch.randn(size, generator=rng, dtype=torch.float64)
    way = torch.ones(size).double() / size**0.5
    rows = start + way + 0.3 * torch.randn(count, size, generator=rng, dtype=torch.float64) / size**0.5
    return start.to(dtype), rows.to(dtype)


def test_clipped_scales_long_updates_to_the_limit():
    rows = [[1.0, 1.0 + 30.0], [1.0 + 0.6, 1.0 + 0.8], [1.0, 1.0]]
    found = reduced("clipped", rows, [1, 2, 1], torch.ones(2).double(), norm=3.0)
    assert found.tolist() == pytest.approx([1 + 2 * 0.6 / 4, 1 + (3 + 2 * 0.8) / 4])
    exact = reduced("clipped", rows, [1, 2, 1], torch.ones(2).double(), norm=30.0)
    assert torch.equal(exact, weighted_mean(torch.tensor(rows, dtype=torch.float64), [1, 2, 1]))


def test_clipped_takes_the_median_norm_by_default():
    assert reduced("clipped", [[1.0], [2.0], [90.0]]).item() == pytest.approx((1 + 2 + 2) / 3)
    assert reduced("clipped", [[1.0], [2.0], [4.0], [90.0]]).item() == pytest.approx((1 + 2 + 3 + 3) / 4)
    assert reduced("clipped", [[0.0], [0.0], [5.0]]).item() == 0.0


def test_clipped_leaves_buffers_and_does_not_measure_them():
    rows = [[3.0, 4.0, 1000.0], [0.3, 0.4, 500.0], [0.3, 0.4, 0.0]]
    assert reduced("clipped", rows, size=2).tolist() == pytest.approx([0.3, 0.4, 500.0])
    assert reduced("clipped", rows, size=2, norm=5.0).tolist() == pytest.approx([1.2, 1.6, 500.0])
    assert reduced("clipped", rows, norm=5.0)[2] < 5


@pytest.mark.parametrize("size", [1e15, 1e30])
def test_clipped_keeps_the_direction_of_an_update_whose_square_overflows(size):
    rows = size * torch.tensor([[1.0, -1.0, 1.0, 1.0]])
    assert reduced("clipped", rows, norm=2.0).tolist() == pytest.approx([1.0, -1.0, 1.0, 1.0])


def test_the_median_of_an_odd_and_of_an_even_count():
    rows = [[5.0, -1.0], [1.0, -7.0], [2.0, 80.0], [4.0, 0.0]]
    assert reduced("median", rows[:3], [1, 50, 1]).tolist() == [2.0, -1.0]
    assert reduced("median", rows, [1, 50, 1, 1]).tolist() == [3.0, -0.5]


@pytest.mark.parametrize(
    ("trim", "count", "left"),
    [
        *[(0.0, 10, 10), (0.2, 10, 6), (0.25, 10, 6), (0.3, 10, 4), (0.49, 10, 2), (0.01, 10, 8), (0.29, 100, 42)],
        *[(0.2, 4, 2), (0.2, 3, 1), (0.2, 2, 2), (0.4999999999, 2, 2), (0.4999999999, 4, 2), (0.4, 1, 1)],
    ],
)
def test_the_trimmed_mean_leaves_out_a_share_at_either_end(trim, count, left):
    values = torch.arange(count).double() ** 3
    out = (count - left) // 2
    rows = values.flip(0)[:, None]
    found = reduced("trimmed-mean", rows, [*range(1, count + 1)], trim=trim)
    assert found.item() == pytest.approx(values[out : count - out].mean().item())


def test_the_geometric_median_of_a_quadrilateral_is_where_its_diagonals_cross():
    rows = [[0.0, 0.0], [4.0, 4.0], [0.0, 2.0], [3.0, -1.0]]
    found = reduced("geometric-median", rows, iterations=200)
    assert found.tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    rough = reduced("geometric-median", rows)
    assert (rough - 1).norm() < 0.1
    assert (weighted_mean(torch.tensor(rows), [1] * 4) - 1).norm() > 0.7


def test_the_geometric_median_uses_weights_and_ends_at_a_row_that_outweighs_the_rest():
    rows = [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    assert reduced("geometric-median", rows, [5, 1, 2], iterations=60).abs().max() < 1e-5
    assert reduced("geometric-median", rows, [1, 1, 5], iterations=60).tolist() == pytest.approx([0, 1], abs=1e-5)


def test_one_step_of_the_geometric_median_by_hand():
    # norms 1, 2, 3: the last row is clipped to 2, the start is 5/3; distances 2/3, 1/3, 4/3
    found = reduced("geometric-median", [[1.0], [2.0], [3.0]], iterations=1)
    pulls = [1 / (2 / 3), 1 / (1 / 3), 1 / (4 / 3)]
    assert found.item() == pytest.approx((pulls[0] + 2 * pulls[1] + 3 * pulls[2]) / sum(pulls))
    smooth = reduced("geometric-median", [[1.0], [2.0], [3.0]], iterations=1, smoothing=100.0)
    assert smooth.item() == pytest.approx(2.0)


def test_a_client_that_sends_back_what_it_got_does_not_hold_the_geometric_median():
    start, rows = cloud(10)
    rows[3] = start
    found = reduced("geometric-median", rows, None, start)
    assert (found - rows[[i for i in range(10) if i != 3]].mean(0)).norm() < 0.2


def test_the_geometric_median_and_krum_do_not_measure_buffers():
    rows = [[0.0, 0.0, 900.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.6, 0.7, 200.0], [40.0, 40.0, 0.0]]
    for name in ("geometric-median", "krum"):
        plain = reduced(name, [row[:2] for row in rows])
        whole = reduced(name, rows, size=2)
        assert torch.equal(whole[:2], plain)
        assert whole[2] > 100  # of (900, 0, 0, 200, 0)


def test_krum_keeps_the_rows_with_the_nearest_neighbours():
    # K = 6, f = 2, so that two neighbours count: scores 1 + 9, 1 + 4, 4 + 4, 4 + 9, ...
    rows, weights = [[0.0], [1.0], [3.0], [5.0], [30.0], [70.0]], [4, 1, 2, 3, 9, 9]
    options = {"liars": 0.33}
    assert reduced("krum", rows, weights, **options, keep=1).item() == 1.0
    assert reduced("krum", rows, weights, **options, keep=2).item() == pytest.approx((1 + 2 * 3) / 3)
    assert reduced("krum", rows, weights, **options, keep=3).item() == pytest.approx((1 + 2 * 3) / 7)
    assert reduced("krum", rows, weights, **options).item() == pytest.approx((1 + 2 * 3 + 3 * 5) / 10)
    for many in (6, 50):
        assert reduced("krum", rows, weights, **options, keep=many) == weighted_mean(
            torch.tensor(rows).double(), weights
        )


def test_krum_takes_the_first_of_equal_scores_and_rounds_liars_up():
    rows = [[10.0], [0.0], [1.0], [11.0]]
    assert reduced("krum", rows, keep=1).item() == 10.0
    assert reduced("krum", rows[::-1], keep=1).item() == 11.0
    fifteen = torch.tensor([*range(12), 300, 400, 500]).double()[:, None]
    assert reduced("krum", fifteen, liars=0.2).item() == pytest.approx(5.5)
    assert reduced("krum", fifteen, liars=0.19).item() == pytest.approx(5.5)
    assert reduced("krum", fifteen, liars=0.13).item() == pytest.approx((66 + 300) / 13)
    hundred = torch.tensor([*range(93), *range(10000, 80000, 10000)]).double()[:, None]
    assert reduced("krum", hundred, liars=0.07).item() == pytest.approx(46.0)
    assert reduced("krum", fifteen, liars=0.0).item() == pytest.approx((66 + 1200) / 15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_equal_rows_give_exactly_that_row(name, dtype):
    start, rows = cloud(1, dtype)
    for count in (1, 2, 3, 7, 10):
        for size in (None, 30, 50):
            found = reduced(name, rows.repeat(count, 1), [*range(3, 3 + count)], start, size)
            assert torch.equal(found, rows[0])
            assert found.dtype == dtype


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_rows_does_not_matter(name):
    start, rows = cloud(9, torch.float64)
    rows[4] *= -30
    weights, order = [*range(1, 10)], [4, 8, 1, 0, 7, 2, 3, 6, 5]
    one = reduced(name, rows, weights, start)
    other = reduced(name, rows[order], [weights[i] for i in order], start)
    if name in ("median", "trimmed-mean"):
        assert torch.equal(one, other)
    assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_rows_give_the_same_bits_again(name):
    start, rows = cloud(9)
    aggregator = made(name, 40)
    first = aggregator.aggregate(rows, [1] * 9, start)
    aggregator.aggregate(-3 * rows, [1] * 9, start)
    before = rows.clone(), start.clone()
    assert torch.equal(aggregator.aggregate(rows, [1] * 9, start), first)
    assert torch.equal(rows, before[0])
    assert torch.equal(start, before[1])


@pytest.mark.parametrize("lie", [1e12, -1e15, 3e38])
@pytest.mark.parametrize("place", [0, 6, 9])
@pytest.mark.parametrize("name", NAMES)
def test_one_row_that_is_far_off_does_not_move_it_far(name, place, lie):
    start, rows = cloud(10)
    honest = rows[[i for i in range(10) if i != place]].mean(0)
    rows[place] = lie
    found = reduced(name, rows, None, start, 40)
    assert torch.isfinite(found[:40]).all()
    moved = (found - honest)[:40].norm()
    assert moved < 0.3
    assert (weighted_mean(rows, [1] * 10) - honest).norm(dtype=torch.float64) > 1e10
    if name != "clipped":
        assert (found - honest)[40:].norm() < 0.3


@pytest.mark.parametrize("strength", [1, 10])
@pytest.mark.parametrize("name", NAMES)
def test_a_fifth_of_liars_that_turn_their_sign_moves_it_less_than_the_mean(name, strength):
    start, rows = cloud(20, seed=3)
    honest = rows[4:].mean(0)
    rows[:4] = start - strength * (rows[:4] - start)
    error = (reduced(name, rows, None, start) - honest).norm()
    mean = (weighted_mean(rows, [1] * 20) - honest).norm()
    assert mean > 0.38
    if name != "clipped":
        assert error < 0.6 * mean
    elif strength > 1:
        assert error < 0.25 * mean


@pytest.mark.parametrize("name", NAMES)
def test_rows_whose_squares_overflow_are_told_apart(name):
    start, rows = cloud(10)
    rows[7] = -9.0
    scale, weights = 2.0**80, [*range(1, 11)]
    found = reduced(name, scale * rows, weights, scale * start)
    assert torch.allclose(found / scale, reduced(name, rows, weights, start), rtol=1e-6)


@pytest.mark.parametrize("name", ["geometric-median", "krum"])
def test_far_rows_in_double_precision_are_left_out_too(name):
    start, rows = cloud(10, torch.float64)
    rows[0] = 1e200
    assert (reduced(name, rows, None, start) - rows[1:].mean(0)).norm() < 0.1


@pytest.mark.parametrize(
    ("name", "one", "two", "three"),
    [
        ("clipped", 2.0, (2 + 3 * 4) / 4, (2 + 3 * 6 + 4 * 6) / 8),
        ("median", 2.0, 4.0, 6.0),
        ("trimmed-mean", 2.0, 4.0, 6.0),
        ("krum", 2.0, 5.0, 5.0),
    ],
)
def test_few_rows(name, one, two, three):
    rows, weights = [[2.0], [6.0], [90.0]], [1, 3, 4]
    for count, wanted in enumerate((one, two, three), start=1):
        assert reduced(name, rows[:count], weights[:count]).item() == pytest.approx(wanted)
    if name == "krum":
        assert [reduced(name, rows[:n], keep=1).item() for n in (1, 2, 3)] == [2.0, 2.0, 2.0]


def test_the_geometric_median_of_few_rows():
    rows = [[2.0], [6.0], [90.0]]
    assert reduced("geometric-median", rows[:1]).item() == 2.0
    assert 2 <= reduced("geometric-median", rows[:2]).item() <= 6
    assert reduced("geometric-median", rows[:2], [1, 3], iterations=60).item() == pytest.approx(6, abs=1e-4)
    assert reduced("geometric-median", rows, iterations=60).item() == pytest.approx(6, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_weight_zero_does_not_count(name):
    start, rows = cloud(8)
    rows[[0, 3, 4, 5]] = 70.0
    weights = [0, 2, 1, 0, 0, 0, 5, 3]
    kept = [i for i, weight in enumerate(weights) if weight]
    found = reduced(name, rows, weights, start)
    assert torch.equal(found, reduced(name, rows[kept], [weights[i] for i in kept], start))
    alone = [0, 0, 0, 0, 0, 0, 4, 0]
    assert torch.equal(reduced(name, rows, alone, start), rows[6])


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gives_what_a_cpu_gives(name):
    start, rows = cloud(11)
    rows[2] = 1e15
    found = reduced(name, rows.cuda(), [*range(11)], start.cuda(), 40)
    assert found.is_cuda
    assert torch.allclose(found.cpu()[:40], reduced(name, rows, [*range(11)], start, 40)[:40], atol=1e-5)
    assert torch.equal(found, reduced(name, rows.cuda(), [*range(11)], start.cuda(), 40))


@pytest.mark.parametrize(
    ("name", "option", "bad"),
    [("clipped", "norm", value) for value in (-1.0, float("inf"), "big")]
    + [("trimmed-mean", "trim", value) for value in (-0.1, 0.5, True)]
    + [("geometric-median", "iterations", value) for value in (0, 2.5)]
    + [("geometric-median", "smoothing", value) for value in (0.0, float("nan"))]
    + [("krum", "liars", value) for value in (-0.1, 0.5)]
    + [("krum", "keep", value) for value in (-1, 1.5)],
)
def test_bad_options_are_refused_by_name(name, option, bad):
    with pytest.raises(SettingError, match=f"aggregator_{option} must be"):
        made(name, **{option: bad})


def test_options_of_another_aggregator_are_refused():
    with pytest.raises(SettingError, match="aggregator_trim"):
        made("krum", trim=0.1)
    with pytest.raises(SettingError, match="aggregator 'median' has no options"):
        made("median", trim=0.1)


def test_the_method_says_how_many_numbers_are_parameters():
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10))
    layout = layout_of(net)
    aggregator = made("clipped")
    run = simulate(FedAvg, FED, layout, rounds=2, aggregator=aggregator)
    assert aggregator.parameter_size == layout.parameter_size < layout.size
    assert torch.isfinite(drive(run).method.row).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedcat"])
def test_a_run_with_it_finishes(method, name):
    result = fedcat.run(method=method, dataset="digits", clients=20, rounds=4, epochs=1, aggregator=name)
    assert len(result.history) == 4
    assert math.isfinite(result.history[-1].loss)


def test_runs_beside_each_other_give_the_bits_that_each_gives_alone():
    words = {"dataset": "digits", "per_round": 6, "rounds": 2, "epochs": 1, "exact": True}
    beside = fedcat.compare(["fedavg"], 1, {"aggregator": NAMES}, **words)
    losses = [variant.results[0].history[-1].loss for variant in beside]
    assert losses == [fedcat.run(method="fedavg", aggregator=name, **words).history[-1].loss for name in NAMES]
    assert len(set(losses)) == len(NAMES)


def test_liars_in_a_run_spoil_the_mean_only():
    class Liars(FedAvg):
        def reduce(self, hops, replies):
            for reply in replies[:2]:
                reply.end.copy_(self.row - 20 * (reply.end - self.row))
            return super().reduce(hops, replies)

    words = {"dataset": "digits", "clients": 20, "rounds": 5, "epochs": 2, "per_round": 10, "partition": "iid"}
    accuracy = {
        name: fedcat.run(method=Liars, aggregator=name, **words).history[-1].accuracy for name in ["mean", *NAMES]
    }
    assert accuracy["mean"] < 0.4
    assert all(accuracy[name] > accuracy["mean"] + 0.2 for name in NAMES), accuracy
