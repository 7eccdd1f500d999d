"""Augmentation: what it changes, where its random numbers come from, and that the engines agree."""

import numpy as np
import pytest
import torch
from helpers import DEVICES, apart, digits_net, drive, federation, layout_of, philox, simulate

import fedcat
from fedcat.core.errors import SettingError
from fedcat.data.augment import AUGMENTATIONS, Augment, Augmentation, make_augment
from fedcat.engines.batch_order import augment_numbers
from fedcat.methods import FedCat

FED = federation([3, 9, 5, 12, 7, 4])
SHORT = {"dataset": "digits", "method": "fedavg", "rounds": 2, "epochs": 1}
FLIP, CROP = (AUGMENTATIONS.get(name) for name in ("flip", "crop"))


def test_flip_mirrors_the_images_whose_number_is_below_one_half():
    x = torch.arange(12.0).view(2, 1, 2, 3)
    found = FLIP(x, torch.tensor([[0.49], [0.5]]))
    assert found[0, 0].tolist() == [[2.0, 1.0, 0.0], [5.0, 4.0, 3.0]]
    assert torch.equal(found[1], x[1])


def test_crop_shifts_by_up_to_an_eighth_and_mirrors_the_border():
    x = torch.arange(64.0).view(1, 1, 8, 8)
    assert torch.equal(CROP(x, torch.tensor([[0.5, 0.5]])), x)
    down = CROP(x, torch.tensor([[0.9, 0.5]]))
    assert torch.equal(down[0, 0, :7], x[0, 0, 1:])
    assert torch.equal(down[0, 0, 7], x[0, 0, 6])
    left = CROP(x, torch.tensor([[0.5, 0.1]]))
    assert torch.equal(left[0, 0, :, 1:], x[0, 0, :, :7])
    assert torch.equal(left[0, 0, :, 0], x[0, 0, :, 1])
    wide = torch.randn(1000, 2, 16, 16)
    moved = CROP(wide, torch.rand(1000, 2))
    center = moved[:, :, 2:-2, 2:-2]
    found = {
        (dy, dx)
        for dy in range(-3, 4)
        for dx in range(-3, 4)
        if (center[:, :, 2:-2, 2:-2] == wide[:, :, 4 + dy : 12 + dy, 4 + dx : 12 + dx]).flatten(1).all(1).any()
    }
    assert found == {(dy, dx) for dy in range(-2, 3) for dx in range(-2, 3)}


def test_numbers_come_from_a_stream_of_their_own():
    layout = layout_of(digits_net())
    run = simulate(FedCat, FED, layout, k=3, seed=4, augment=Augment((Augmentation(FLIP), Augmentation(CROP, 2))))
    task, hop = run.plan()[1]
    own = min(4, task.samples(hop.client))
    found = augment_numbers((task, hop), 3, 10)
    drawn = philox(4, 12, hop.round, hop.client, hop.visit).random((3, own, 6), dtype=np.float32)
    assert np.array_equal(found[:, :own].numpy(), drawn)
    assert not found[:, own:].any()
    plain = simulate(FedCat, FED, layout, k=3)
    assert augment_numbers(plain.plan()[0], 3) is None


def noise(x, u):
    return x + 0.5 * (u[:, :1, None, None] - 0.5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [(FLIP,), (CROP, noise)])
def test_the_engines_agree(parts, device):
    augment = Augment(tuple(map(Augmentation, parts)))
    rows = []
    for engine in ("sequential", "stacked"):
        layout = layout_of(digits_net(), torch.float64, device)
        rows.append(drive(simulate(FedCat, FED, layout, engine, k=3, rounds=3, augment=augment)).method.row)
    plain = drive(simulate(FedCat, FED, layout_of(digits_net(), torch.float64, device), k=3, rounds=3)).method.row
    assert apart(rows[1], rows[0]) < 1e-11
    assert apart(plain, rows[0]) > 1e-3


def test_exact_mode_gives_the_same_bits_beside_other_runs():
    words = {**SHORT, "augment": ["flip", "crop"], "exact": True}
    alone = fedcat.run(**words)
    beside = fedcat.compare(["fedavg", "fedcat"], 2, **{n: v for n, v in words.items() if n != "method"})
    assert beside[0].results[0].history[-1].metrics == alone.history[-1].metrics
    assert fedcat.run(**SHORT).history[-1].metrics != alone.history[-1].metrics
    assert alone.settings.augment == ["flip", "crop"]


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        ("flip", "augment must be a list, got 'flip'"),
        (["flop"], "unknown augment 'flop': did you mean 'flip'"),
        ([lambda x: x], r"augment 'lambda' must be a function of \(inputs, random numbers\)"),
        ([lambda x, u: x[:, :, :4]], r"augment 'lambda' must return inputs of torch.float32 of shape \(4, 1, 8, 8\)"),
        ([lambda x, u: x.double()], "must return inputs of torch.float32"),
    ],
)
def test_what_is_no_augmentation_is_refused(augment, message):
    with pytest.raises(SettingError, match=message):
        fedcat.run(augment=augment, **SHORT)


def test_the_trial_leaves_the_data_alone():
    x = np.random.default_rng(0).normal(size=(60, 1, 4, 4)).astype(np.float32)
    data = fedcat.Dataset.from_arrays(x, (x[:, 0, 0, 0] > 0).astype(int))
    before = data.train.x.clone()

    def in_place(x, u):
        x += u[:, 0, None, None, None]
        return x

    fedcat.run(dataset=data, net="mlp", augment=[in_place], clients=4, rounds=1, method="fedavg", min_samples=1)
    assert torch.equal(data.train.x, before)


def test_more_numbers_can_be_asked_for():
    def last(x, u):
        return x + u[:, 7, None, None, None]

    with pytest.raises(SettingError, match=r"augment 'last' fails .* numbers=N\) asks for N numbers per sample"):
        fedcat.run(augment=[last], **SHORT)
    assert fedcat.run(augment=[Augmentation(last, numbers=8)], **SHORT).settings.augment == ["<last>"]


def test_flips_need_images():
    with pytest.raises(SettingError, match=r"'flip' needs images \[channels, height, width\], got shape \(5,\)"):
        make_augment([FLIP], torch.zeros(4, 5))
