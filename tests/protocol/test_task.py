import pytest
import torch
from helpers import federation, layout_of, small_net

from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.task import Task, stack

LAYOUT = layout_of(small_net())


def task(sizes, batch_size, **more):
    fed = federation(sizes)
    return Task(0, LAYOUT, fed, fed.train, LocalRule(), batch_size, **more)


def test_a_task_knows_how_many_samples_each_client_holds():
    made = task([7, 3, 8], 4)
    assert [made.samples(client) for client in range(3)] == [7, 3, 8]
    assert type(made.samples(0)) is int


def test_what_is_not_set_is_plain_sgd():
    made = task([7], 4)
    assert (made.momentum, made.weight_decay, made.clip, made.join_lone) == (0.0, 0.0, None, False)


@pytest.mark.parametrize(
    ("sizes", "batch_size", "join", "wanted"),
    [
        ([7, 3, 8], 4, False, 4),
        ([7, 3, 8], 4, True, 5),
        ([7, 3, 8], 50, False, 8),
        ([7, 3, 8], 8, True, 8),
        ([7, 3, 8], 1, False, 2),
        ([1, 1], 50, False, 2),
    ],
)
def test_the_padding_is_the_longest_batch_of_any_client_and_at_least_two(sizes, batch_size, join, wanted):
    assert task(sizes, batch_size, join_lone=join).padding == wanted


def test_tensors_of_several_hops_are_stacked_in_order_and_what_all_share_is_not_copied():
    shared, own = torch.arange(3.0), [torch.full((2,), float(i)) for i in range(4)]
    found = stack([{"shared": shared, "own": tensor} for tensor in own])
    assert found["own"].tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert found["shared"].shape == (4, 3)
    assert found["shared"].data_ptr() == shared.data_ptr()
    alike = stack([{"a": shared}, {"a": shared}, {"a": shared.clone()}])["a"]
    assert alike.stride(0) == 3
    assert alike.tolist() == [[0.0, 1.0, 2.0]] * 3


def test_one_hop_is_a_stack_as_well():
    assert stack([{"a": torch.ones(2)}])["a"].tolist() == [[1.0, 1.0]]
    assert stack([{}, {}]) == {}


@pytest.mark.parametrize("last", [{}, {"b": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}])
def test_hops_that_bring_different_tensors_are_an_error(last):
    with pytest.raises(ValueError, match="hops of one rule must bring the same tensors"):
        stack([{"a": torch.ones(1)}, {"a": torch.ones(1)}, last])
