from dataclasses import replace

import pytest
import torch

from fedcat.protocol.hop import Hop, HopId
from fedcat.protocol.reply import Reply, Status

HOP = Hop(round=2, copy=7, client=3, start=torch.zeros(4), epochs=1, lr=0.1)


def full(**more):
    uploads, memory = {"c": torch.ones(2)}, {"c": torch.ones(3)}
    return Reply(HOP.id, torch.ones(4), 5, 7, 0.25, uploads, memory, **more)


def test_a_hop_is_named_by_round_copy_and_attempt():
    assert HOP.id == HopId(2, 7) == (2, 7, 0)
    assert replace(HOP, attempt=1).id == (2, 7, 1)


def test_a_hop_is_the_first_attempt_and_visit_and_brings_nothing_unless_told():
    assert (HOP.attempt, HOP.visit, HOP.sent, HOP.memory) == (0, 0, {}, {})
    assert HOP.bytes_down == 16


def test_bytes_are_counted_from_what_came_unless_they_are_known():
    assert full().bytes_up == 16 + 8
    assert full(bytes_up=1000).bytes_up == 1000
    assert Reply(HOP.id).bytes_up == 0
    assert Reply(HOP.id, uploads={"c": torch.ones(2)}).bytes_up == 0


@pytest.mark.parametrize("status", Status)
def test_only_what_arrived_may_be_used(status):
    assert full(status=status).arrived == (status == "arrived")


def test_the_words_of_the_statuses_are_a_file_format():
    assert [status.value for status in Status] == ["arrived", "late", "failed", "refused"]


def test_a_hop_that_brought_nothing_back():
    lost = Reply.lost(HOP, Status.FAILED, "battery")
    assert (lost.hop, lost.end, lost.samples, lost.steps, lost.bytes_up) == (HOP.id, None, 0, 0, 0)
    assert (lost.status, lost.why, lost.arrived) == (Status.FAILED, "battery", False)


@pytest.mark.parametrize("empty", [Reply.emptied, lambda reply: reply.refused("too large")])
def test_what_is_emptied_keeps_its_hop_and_its_bytes_and_nothing_of_its_content(empty):
    found = empty(full(status=Status.LATE, why="late"))
    assert (found.hop, found.bytes_up, found.loss) == (HOP.id, 24, 0.25)
    assert (found.end, found.uploads, found.memory, found.samples, found.steps) == (None, {}, {}, 0, 0)


def test_a_refusal_says_why():
    refused = full().refused("too large")
    assert (refused.status, refused.why) == (Status.REFUSED, "too large")
    emptied = full(status=Status.LATE, why="60 s").emptied()
    assert (emptied.status, emptied.why) == (Status.LATE, "60 s")
