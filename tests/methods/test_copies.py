"""FedCross and FedMR: copies of the model that learn from each other, but are not averaged."""

import numpy as np
import pytest
import torch
from helpers import drive, federation, layout_of, philox, simulate, small_net
from torch import nn

from fedcat.core.errors import SettingError
from fedcat.methods import FedAvg
from fedcat.methods.fedcross import FedCross
from fedcat.methods.fedmr import FedMR
from fedcat.protocol.reply import Reply, Status

FED = federation([3, 9, 5, 12, 7, 4, 8, 6])
LAYOUT = layout_of(small_net())


def rows(k, seed=0):
    return torch.randn(k, LAYOUT.size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def answer(method, ends, lost=()):
    """End a round: the copies come back as given, but for those that are lost. Return who trained which copy."""
    hops = method.plan(method.round + 1)
    method.absorb(
        [
            Reply.lost(hop, Status.FAILED, "away") if hop.copy in lost else Reply(hop.id, ends[hop.copy], 1, steps=1)
            for hop in hops
        ]
    )
    return hops


@pytest.mark.parametrize(("method", "options"), [(FedCross, {"alpha": 1.0}), (FedCross, {}), (FedMR, {})])
def test_every_client_gets_the_copy_that_the_last_round_left(method, options):
    made = simulate(method, FED, LAYOUT, k=3, options=options).method
    for r in range(4):
        copies = made.copies
        for hop in answer(made, rows(3, r)):
            assert torch.equal(hop.start, copies[hop.copy])


@pytest.mark.parametrize("method", [FedCross, FedMR])
def test_the_global_model_is_the_equal_mean_and_a_lost_copy_stays(method):
    made = simulate(method, FED, LAYOUT, k=3).method
    answer(made, rows(3))
    before, ends = made.copies, rows(3, 1)
    answer(made, ends, lost=[1])
    assert torch.allclose(made.row, (ends[0] + before[1] + ends[2]) / 3, atol=1e-14)
    copies, row = made.copies, made.row
    answer(made, ends, lost=[0, 1, 2])
    assert torch.equal(made.row, row)
    assert torch.equal(made.copies, copies)


def test_collaborators_in_order_change_from_round_to_round_and_leave_the_mean_as_it_is():
    made = simulate(FedCross, FED, LAYOUT, k=4, options={"collaborator": "in-order", "alpha": 0.75}).method
    for r, ahead in enumerate([1, 2, 3, 1, 2]):
        ends = rows(4, r)
        answer(made, ends)
        wanted = torch.stack([0.75 * ends[i] + 0.25 * ends[(i + ahead) % 4] for i in range(4)])
        assert torch.allclose(made.copies, wanted, atol=1e-14)
        assert torch.allclose(made.copies.mean(0), made.row, atol=1e-14)


@pytest.mark.parametrize(("collaborator", "wanted"), [("least-similar", [2, 3, 3, 2]), ("most-similar", [1, 0, 1, 0])])
def test_collaborators_by_the_angle_between_copies(collaborator, wanted):
    """Four copies in a plane, at 0, 30, 100 and 290 degrees, of different lengths."""
    made = simulate(FedCross, FED, LAYOUT, k=4, options={"collaborator": collaborator}).method
    angles, lengths = np.radians([0, 30, 100, 290]), [1, 5, 2, 3]
    copies = torch.zeros(4, LAYOUT.size, dtype=torch.float64)
    copies[:, 0] = torch.tensor(np.cos(angles) * lengths)
    copies[:, 7] = torch.tensor(np.sin(angles) * lengths)
    assert made.collaborators(copies).tolist() == wanted


def test_two_copies_that_give_half_are_fedavg_with_equal_weights():
    words = {"k": 2, "rounds": 3}
    cross = drive(simulate(FedCross, FED, LAYOUT, options={"alpha": 0.5, "collaborator": "in-order"}, **words))
    plain = drive(simulate(FedAvg, FED, LAYOUT, options={"weighting": "equal"}, **words))
    assert torch.allclose(cross.method.row, plain.method.row, atol=1e-12)


@pytest.mark.parametrize("method", [FedCross, FedMR])
def test_one_copy_walks_alone(method):
    made = simulate(method, FED, LAYOUT, k=1).method
    ends = rows(1)
    answer(made, ends)
    assert torch.equal(made.copies, ends)
    assert torch.equal(made.row, ends[0])


def test_layers_are_dealt_out_whole_each_by_its_own_order():
    """Weights go with their biases and running statistics; the mean of the copies does not change."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 10))
    layout = layout_of(net)
    made = simulate(FedMR, federation([3, 9, 5, 12], shape=(1, 4, 4)), layout, k=4, seed=9).method
    assert made.layers == 3
    for r in range(3):
        ends = torch.randn(4, layout.size, dtype=torch.float64)
        answer(made, ends)
        rng = philox(9, 9, round=r)
        orders = {name: rng.permutation(4) for name in ("1", "2", "4")}
        found, given = layout.unpack(made.copies), layout.unpack(ends)
        for name, tensor in found.items():
            assert torch.equal(tensor, given[name][torch.from_numpy(orders[name.split(".")[0]])])
        assert torch.allclose(made.copies.mean(0), made.row, atol=1e-14)


def test_in_the_first_stage_all_copies_are_made_their_mean():
    made = simulate(FedMR, FED, LAYOUT, k=3, options={"first_stage": 2}).method
    for r in range(3):
        ends = rows(3, r)
        answer(made, ends)
        assert all(torch.equal(copy, made.row) for copy in made.copies) == (r < 2)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (FedCross, {"alpha": 0.4}, "alpha must be"),
        (FedCross, {"collaborator": "nearest"}, "collaborator"),
        (FedMR, {"first_stage": -1}, "first_stage must be"),
    ],
)
def test_options_outside_their_bounds_are_refused(method, options, message):
    with pytest.raises(SettingError, match=message):
        simulate(method, FED, LAYOUT, options=options)


def test_the_copies_can_be_evaluated():
    made = simulate(FedCross, FED, LAYOUT, k=3).method
    answer(made, rows(3))
    assert list(made.models("copies")) == ["global", "copy 0", "copy 1", "copy 2"]
    assert list(made.models()) == ["global"]
