import pytest
import torch

from fedcat.protocol.hop import Hop, hop_id
from fedcat.protocol.reply import Reply, Status
from fedcat.protocol.reply_check import ReplyCheck


def hop(id=0, **more):
    return Hop(id, round=0, client=3, start=torch.zeros(4), epochs=1, lr=0.1, **more)


def good(id=0, end=None, **more):
    return Reply(id, torch.ones(4) if end is None else end, **{"samples": 5, "steps": 2, **more})


@pytest.fixture
def door():
    made = ReplyCheck(4, torch.float32, bound=10.0)
    made.expect([hop(0), hop(1)])
    return made


def test_a_sound_reply_passes_as_it_is(door):
    reply = good()
    ((sent, admitted),) = door.admit([reply])
    assert sent.client == 3
    assert admitted is reply


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (good(end=torch.ones(5)), r"row of shape (5,), expected (4,)"),
        (good(end=torch.ones(4, dtype=torch.float64)), "row of torch.float64"),
        (good(end=torch.tensor([1.0, 2.0, torch.nan, 0.0])), "not finite"),
        (good(end=torch.tensor([1.0, -torch.inf, 0.0, 0.0])), "not finite"),
        (good(uploads={"c": torch.tensor([torch.nan])}), "not finite"),
        (good(memory={"c": torch.tensor([torch.inf])}), "not finite"),
        (good(end=torch.full((4,), 6.0)), "an update of norm 12, above the bound 10"),
        (good(samples=0), "0 samples and 2 steps"),
        (good(steps=0), "5 samples and 0 steps"),
        (Reply(0, None, samples=1, steps=1), "no row came back"),
    ],
)
def test_an_unsound_reply_is_refused_without_its_content(door, reply, why):
    ((_, admitted),) = door.admit([reply])
    assert admitted.status is Status.REFUSED
    assert why in admitted.why
    assert (admitted.end, admitted.uploads, admitted.memory, admitted.samples) == (None, {}, {}, 0)
    assert admitted.bytes_up == reply.bytes_up


def test_a_bad_reply_does_not_harm_a_good_one(door):
    admitted = door.admit([good(0, torch.full((4,), torch.nan)), good(1)])
    assert [reply.arrived for _, reply in admitted] == [False, True]


def test_each_hop_ends_once(door):
    assert len(door.admit([good(0), good(0)])) == 1
    assert door.admit([good(0), good(77)]) == []
    assert len(door.admit([good(1)])) == 1


def test_a_lost_hop_passes_with_its_reason(door):
    ((_, admitted),) = door.admit([Reply.lost(hop(0), Status.LATE, "no answer in 60 s")])
    assert (admitted.status, admitted.why, admitted.bytes_up) == (Status.LATE, "no answer in 60 s", 0)


def test_what_comes_with_a_late_reply_is_left_out(door):
    late = good(0, torch.ones(7), status=Status.LATE, memory={"c": torch.ones(2)})
    ((_, admitted), _) = door.admit([late, good(1)])
    assert (admitted.status, admitted.end, admitted.memory, admitted.samples) == (Status.LATE, None, {}, 0)
    assert admitted.bytes_up == late.bytes_up


def test_ids_of_two_rounds_never_meet():
    assert len({hop_id(r, s) for r in range(5) for s in (0, 1, 999_999)}) == 15


def test_bytes_are_those_of_the_row_and_of_what_travels_beside_it():
    sent = {"generator": torch.zeros(10, dtype=torch.float32), "labels": torch.zeros(3, dtype=torch.int64)}
    assert hop(sent=sent, memory={"c": torch.zeros(100)}).bytes_down == 16 + 40 + 24
    assert good(uploads={"c": torch.zeros(4)}, memory={"c": torch.zeros(100)}).bytes_up == 16 + 16
