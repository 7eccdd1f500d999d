from types import SimpleNamespace

import pytest
import torch

from fedcat.protocol.hop import Hop, HopId
from fedcat.protocol.reply import Reply, Status
from fedcat.protocol.reply_check import ReplyCheck

LAYOUT = SimpleNamespace(size=4, parameter_size=4, dtype=torch.float32)


def anything(hop):
    """Let a hop's reply upload what it wants."""


def hop(copy=0, **more):
    return Hop(round=0, copy=copy, client=3, start=torch.zeros(4), epochs=1, lr=0.1, **more)


def good(copy=0, end=None, **more):
    return Reply(HopId(0, copy), torch.ones(4) if end is None else end, **{"samples": 5, "steps": 2, **more})


@pytest.fixture
def door():
    made = ReplyCheck(LAYOUT, bound=10.0)
    made.expect([hop(0), hop(1)], anything)
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
        (good(end=torch.tensor([1.0, 2e15, 0.0, 0.0])), "or above 1e+15"),
        (good(end=torch.tensor([1.0, -2e15, 0.0, 0.0])), "or above 1e+15"),
        (good(uploads={"c": torch.tensor([torch.nan])}), "not finite"),
        (good(memory={"c": torch.tensor([torch.inf])}), "not finite"),
        (good(end=torch.full((4,), 6.0)), "an update of norm 12, above the bound 10"),
        (good(samples=0), "0 samples and 2 steps"),
        (good(steps=0), "5 samples and 0 steps"),
        (Reply(HopId(0, 0), None, samples=1, steps=1), "no row came back"),
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


def test_another_attempt_is_another_hop(door):
    again = Reply(HopId(0, 0, attempt=1), torch.ones(4), samples=5, steps=2)
    assert door.admit([again]) == []
    door.expect([hop(attempt=1)], anything)
    assert [h.attempt for h, _ in door.admit([again, good(0)])] == [1, 0]


def test_bytes_are_those_of_the_row_and_of_what_travels_beside_it():
    sent = {"generator": torch.zeros(10, dtype=torch.float32), "labels": torch.zeros(3, dtype=torch.int64)}
    assert hop(sent=sent, memory={"c": torch.zeros(100)}).bytes_down == 16 + 40 + 24
    assert good(uploads={"c": torch.zeros(4)}, memory={"c": torch.zeros(100)}).bytes_up == 16 + 16


def from_row(start, bound=5.0):
    made = ReplyCheck(LAYOUT, bound)
    made.expect([Hop(round=0, client=3, start=start, epochs=1, lr=0.1)], anything)
    return made


def test_the_bound_is_on_the_update_and_not_on_the_row():
    start = torch.full((4,), 100.0)
    ((_, small),) = from_row(start).admit([good(0, start + 2.0)])
    assert small.arrived
    ((_, large),) = from_row(start).admit([good(0, torch.zeros(4))])
    assert large.why == "an update of norm 200, above the bound 5"


@pytest.mark.parametrize(("size", "bound", "arrived"), [(2.5, 5.0, True), (2.501, 5.0, False), (1e9, None, True)])
def test_an_update_as_long_as_the_bound_passes(size, bound, arrived):
    ((_, reply),) = from_row(torch.ones(4), bound).admit([good(0, torch.ones(4) + size)])
    assert reply.arrived == arrived


def test_each_update_is_measured_from_its_own_start():
    made, starts = ReplyCheck(LAYOUT, 5.0), [torch.full((4,), float(10 * i)) for i in range(3)]
    made.expect(
        [Hop(copy=i, round=0, client=i, start=start, epochs=1, lr=0.1) for i, start in enumerate(starts)], anything
    )
    found = made.admit([good(2, starts[2] + 1), good(0, starts[0] + 9), good(1, starts[1] - 1)])
    assert [(hop.copy, hop.client, reply.arrived) for hop, reply in found] == [
        (2, 2, True),
        (0, 0, False),
        (1, 1, True),
    ]


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("place", ["end", "uploads", "memory"])
def test_only_the_client_that_sent_the_bad_number_is_refused(which, place):
    """Among replies that bring several tensors each, and others that bring no row at all."""
    made = ReplyCheck(LAYOUT)
    hops = [Hop(copy=i, round=0, client=10 + i, start=torch.zeros(4), epochs=1, lr=0.1) for i in range(6)]
    made.expect(hops, anything)
    replies = []
    for i in range(4):
        parts = {"end": torch.ones(4), "uploads": torch.ones(3), "memory": torch.ones(2)}
        if i == which:
            parts[place][-1] = float("nan")
        uploads = {"a": torch.ones(2), "b": parts["uploads"], "n": torch.ones(2, dtype=torch.int64)}
        replies.append(good(i, parts["end"], uploads=uploads, memory={"c": parts["memory"]}))
    replies.insert(1, Reply.lost(hops[4], Status.FAILED, "gone"))
    replies.insert(0, good(5, torch.ones(3)))
    found = made.admit(replies[::-1])
    assert [hop.id for hop, _ in found] == [reply.hop for reply in replies[::-1]]
    whys = {hop.client: reply.why for hop, reply in found if not reply.arrived}
    assert whys.pop(10 + which) == "numbers that are not finite, or above 1e+15"
    assert whys == {14: "gone", 15: "row of shape (3,), expected (4,)"}


def test_one_sample_and_one_step_are_enough(door):
    ((_, admitted),) = door.admit([good(samples=1, steps=1)])
    assert admitted.arrived


def test_a_hop_that_was_refused_has_ended(door):
    door.admit([good(0, torch.ones(5))])
    assert door.admit([good(0)]) == []


def test_hops_that_are_expected_later_are_accepted_too(door):
    door.expect([hop(2)], anything)
    assert [h.copy for h, _ in door.admit([good(2), good(1), good(0)])] == [2, 1, 0]
    assert door.admit([]) == []


def test_what_an_engine_has_looked_at_is_not_read_again():
    door = ReplyCheck(LAYOUT)
    door.expect([hop(copy) for copy in range(4)], anything)
    nan = torch.tensor([1.0, torch.nan, 0.0, 0.0])
    replies = [good(0, finite=True), good(1, finite=False), good(2), good(3, nan)]
    found = [reply.status for _, reply in door.admit(replies)]
    assert found == [Status.ARRIVED, Status.REFUSED, Status.ARRIVED, Status.REFUSED]


@pytest.mark.parametrize(
    ("uploads", "why"),
    [
        ({"control": torch.ones(3)}, ""),
        ({}, "uploads of nothing, expected control"),
        ({"control": torch.ones(3), "more": torch.ones(1)}, "uploads of control, more, expected control"),
        ({"contro1": torch.ones(3)}, "uploads of contro1, expected control"),
        ({"control": torch.ones(4)}, "upload 'control' is torch.float32 of shape (4,), expected torch.float32 of"),
        ({"control": torch.ones(3, dtype=torch.int64)}, "upload 'control' is torch.int64 of shape (3,), expected"),
    ],
)
def test_uploads_have_the_names_shapes_and_types_that_the_method_expects(uploads, why):
    made = ReplyCheck(LAYOUT)
    made.expect([hop()], lambda hop: {"control": torch.zeros(3)})
    ((_, reply),) = made.admit([good(uploads=uploads)])
    assert reply.arrived == (not why)
    assert why in reply.why


def test_the_bound_leaves_running_statistics_out():
    layout = SimpleNamespace(size=4, parameter_size=2, dtype=torch.float32)
    for end, arrived in (([1.0, 1.0, 900.0, 900.0], True), ([9.0, 9.0, 0.0, 0.0], False)):
        made = ReplyCheck(layout, 5.0)
        made.expect([hop()], anything)
        ((_, reply),) = made.admit([good(end=torch.tensor(end))])
        assert reply.arrived == arrived
