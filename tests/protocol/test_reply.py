import pytest
import torch

from fedcat.protocol.hop import Hop, hop_id
from fedcat.protocol.reply import Reply, Status

HOP = Hop(id=12, round=0, client=3, start=torch.zeros(4), epochs=1, lr=0.1)


def full(**more):
    uploads, memory = {"c": torch.ones(2)}, {"c": torch.ones(3)}
    return Reply(12, torch.ones(4), 5, 7, 0.25, uploads, memory, **more)


def test_the_id_of_a_hop_can_be_read():
    assert [hop_id(0, 0), hop_id(0, 7), hop_id(3, 7), hop_id(12, 999_999)] == [0, 7, 3_000_007, 12_999_999]


def test_a_hop_is_the_first_visit_of_copy_0_and_brings_nothing_unless_told():
    assert (HOP.copy, HOP.visit, HOP.sent, HOP.memory) == (0, 0, {}, {})
    assert HOP.bytes_down == 16


def test_bytes_are_counted_from_what_came_unless_they_are_known():
    assert full().bytes_up == 16 + 8
    assert full(bytes_up=1000).bytes_up == 1000
    assert Reply(12).bytes_up == 0
    assert Reply(12, uploads={"c": torch.ones(2)}).bytes_up == 0


@pytest.mark.parametrize("status", Status)
def test_only_what_arrived_may_be_used(status):
    assert full(status=status).arrived == (status == "arrived")


def test_the_words_of_the_statuses_are_a_file_format():
    assert [status.value for status in Status] == ["arrived", "late", "failed", "refused"]


def test_a_hop_that_brought_nothing_back():
    lost = Reply.lost(HOP, Status.FAILED, "battery")
    assert (lost.hop, lost.end, lost.samples, lost.steps, lost.bytes_up) == (12, None, 0, 0, 0)
    assert (lost.status, lost.why, lost.arrived) == (Status.FAILED, "battery", False)


@pytest.mark.parametrize("empty", [Reply.emptied, lambda reply: reply.refused("too large")])
def test_what_is_emptied_keeps_its_hop_and_its_bytes_and_nothing_of_its_content(empty):
    found = empty(full(status=Status.LATE, why="late"))
    assert (found.hop, found.bytes_up, found.loss) == (12, 24, 0.25)
    assert (found.end, found.uploads, found.memory, found.samples, found.steps) == (None, {}, {}, 0, 0)


def test_a_refusal_says_why():
    refused = full().refused("too large")
    assert (refused.status, refused.why) == (Status.REFUSED, "too large")
    emptied = full(status=Status.LATE, why="60 s").emptied()
    assert (emptied.status, emptied.why) == (Status.LATE, "60 s")
