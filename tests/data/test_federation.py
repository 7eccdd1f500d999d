import hashlib

import numpy as np
import pytest
import torch
from helpers import philox

from fedcat.core.errors import SettingError
from fedcat.data.builtin import digits
from fedcat.data.dataset import DATASETS, Dataset
from fedcat.data.federation import Federation
from fedcat.data.pool import Normalize, Pool


def pool(n, shape=(2,), classes=3, seed=0):
    rng = np.random.default_rng(seed)
    return Pool(rng.normal(size=(n, *shape)), rng.integers(classes, size=n))


def test_clients_hold_what_the_owners_say():
    train = Pool(np.arange(6.0)[:, None], [0, 1, 1, 2, 0, 1])
    fed = Federation(train, Pool(np.zeros((1, 1)), [0]), [1, 0, 1, 2, 1, 0])
    assert (fed.clients, fed.classes) == (3, 3)
    assert [fed.indices(d).tolist() for d in range(3)] == [[1, 5], [0, 2, 4], [3]]
    assert fed.sizes.tolist() == [2, 3, 1]
    assert fed.class_counts.tolist() == [[0, 2, 0], [2, 1, 0], [0, 0, 1]]


def test_the_hash_knows_data_and_owners():
    train, test = pool(6), pool(4, seed=1)
    owner = [0, 0, 1, 1, 2, 2]
    first = Federation(train, test, owner).hash
    assert first == Federation(pool(6), pool(4, seed=1), owner).hash
    assert first != Federation(train, test, [0, 0, 1, 2, 1, 2]).hash
    assert first != Federation(pool(6, seed=2), test, owner).hash
    assert first != Federation(train, pool(4, seed=2), owner).hash


def test_the_hash_knows_labels_types_and_how_many_clients_there_are():
    x, owner = np.arange(12, dtype=np.uint8).reshape(6, 2), [0, 0, 1, 1, 2, 2]
    train, test = Pool(x, [0, 1, 2, 0, 1, 2]), Pool(x[:4], [0, 1, 2, 0])
    first = Federation(train, test, owner).hash
    others = [
        Federation(Pool(x, [0, 1, 2, 0, 2, 1]), test, owner),
        Federation(train, Pool(x[:4], [0, 1, 2, 1]), owner),
        Federation(train, test, [0, 0, 1, 1, 2, 1]),
        Federation(train, test, [2, 2, 1, 1, 0, 0]),
        Federation(Pool(x.astype(np.int64), train.y), Pool(x[:4].astype(np.int64), test.y), owner),
        Federation(Pool(x.reshape(6, 2, 1), train.y), Pool(x[:4].reshape(4, 2, 1), test.y), owner),
        Federation(test, train, owner[:4]),
    ]
    assert len({first, *(fed.hash for fed in others)}) == 1 + len(others)


def test_the_hash_is_a_file_format():
    """The SHA-256 of the digests of both pools, the samples in the order of their clients, and where each begins."""
    x, y = np.array([[1, 2], [3, 4], [5, 6]], np.uint8), np.array([0, 1, 0])
    digests = [
        hashlib.sha256(
            b"torch.uint8(%d, 2)" % n + x[:n].tobytes() + b"torch.int64(%d,)" % n + y[:n].astype("<i8").tobytes()
        ).hexdigest()
        for n in (3, 1)
    ]
    order, begins = np.array([1, 0, 2], "<i8"), np.array([0, 1, 3], "<i8")
    wanted = hashlib.sha256("".join(digests).encode() + order.tobytes() + begins.tobytes()).hexdigest()
    assert Federation(Pool(x, y), Pool(x[:1], y[:1]), [1, 0, 1]).hash == wanted


def test_names_must_be_as_many_as_there_are_clients_and_classes():
    words = {"train": pool(3), "test": pool(2, seed=5), "owner": [0, 1, 1], "classes": 3}
    made = Federation(**words, client_names=["a", "b"], class_names=["x", "y", "z"])
    assert (made.client_names, made.class_names) == (("a", "b"), ("x", "y", "z"))
    for kind, names, count in (("client_names", ["a"], 2), ("class_names", ["x", "y", "z", "u"], 3)):
        with pytest.raises(SettingError, match=f"{kind} must hold {count} names, got {len(names)}"):
            Federation(**words, **{kind: names})


def test_classes_and_clients_are_counted_from_labels_and_owners():
    train, test = Pool(np.zeros((3, 1)), [0, 1, 1]), Pool(np.zeros((1, 1)), [4])
    made = Federation(train, test, [0, 1, 2])
    assert (made.classes, made.clients, made.name, made.largest) == (5, 3, "custom", 1)
    assert Federation(train, test, [0, 1, 1], 9).class_counts.shape == (2, 9)
    assert Federation(train, test, [0, 1, 1], 5).largest == 2
    with pytest.raises(SettingError, match="classes must be at least 5 for these labels, got 4"):
        Federation(train, test, [0, 1, 1], 4)


def test_test_inputs_must_be_of_the_kind_of_training_inputs():
    with pytest.raises(SettingError, match="test inputs must be floating-point numbers, as in training, got bytes"):
        Federation(Pool(np.zeros((2, 1)), [0, 1]), Pool(np.zeros((1, 1), np.uint8), [0]), [0, 1])


def test_a_million_clients_are_no_burden():
    n = 1_000_000
    train = Pool(np.zeros((n, 1), np.uint8), np.zeros(n, np.uint8))
    fed = Federation(train, Pool(train.x[:1], train.y[:1]), np.arange(n)[::-1].copy(), classes=3)
    assert fed.indices(0).tolist() == [n - 1]
    assert fed.class_counts.shape == (n, 3)


@pytest.mark.parametrize(
    ("owner", "more", "message"),
    [
        ([0, 1], {}, "owner must hold one client index for each of the 3 training samples"),
        ([0.0, 1.0, 2.0], {}, "of float64"),
        ([0, 0, 2], {}, "owner gives client 1 no training sample"),
        ([0, 1, 2], {"clients": 2}, r"owner must be in 0 \.\. 1, got 0 \.\. 2"),
        ([-1, 0, 1], {}, r"got -1 \.\. 1"),
        ([0, 1, 1], {"classes": 1}, "classes must be at least"),
    ],
)
def test_bad_owners_are_refused(owner, more, message):
    with pytest.raises(SettingError, match=message):
        Federation(pool(3), pool(2, seed=5), owner, **more)


def test_test_inputs_must_look_like_training_inputs():
    with pytest.raises(SettingError, match=r"test inputs must have shape \(2,\)"):
        Federation(pool(3), pool(3, (4,)), [0, 1, 2])


def test_bytes_are_normalised_by_channel_when_a_batch_is_taken():
    x = np.array([[[[0, 255]], [[51, 102]]]], dtype=np.uint8)
    stored = Pool(x, [0], Normalize(mean=(0.5, 0.2), std=(0.5, 0.1)))
    assert stored.x.dtype == torch.uint8
    batch = stored.inputs(torch.tensor([[0], [0]]), torch.float64)
    assert batch.shape == (2, 1, 2, 1, 2)
    assert torch.allclose(batch[1, 0], torch.tensor([[[-1.0, 1.0]], [[0.0, 2.0]]], dtype=torch.float64))


def test_numbers_without_a_rule():
    whole = torch.tensor([0])
    assert Pool(np.array([[255]], np.uint8), [0]).inputs(whole, torch.float32).item() == 1.0
    assert Pool(np.array([[7.5]]), [0]).inputs(whole, torch.float32).dtype == torch.float32
    assert Pool(np.array([[7]]), [0]).inputs(whole, torch.float32).dtype == torch.int64


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[1.0]], [0, 1], "one target for each of the 1 samples"),
        (np.zeros((0, 2)), [], "at least one sample"),
        ([[1.0]], [-1], "class labels >= 0, got -1"),
        ([["a"]], [0], "x must hold numbers"),
        ([[float("nan")]], [0], "x must hold finite numbers"),
        ([[1.0], [1.0, 2.0]], [0, 1], "x must be one array"),
        ([[1.0]], [float("nan")], "y must hold finite numbers"),
    ],
)
def test_bad_arrays_are_refused(x, y, message):
    with pytest.raises(SettingError, match=message):
        Pool(x, y)


def test_a_drawn_test_set_shares_no_sample_with_training():
    data = Dataset.from_arrays(np.arange(100.0)[:, None], np.zeros(100, int), test_fraction=0.25, seed=3)
    train, test = set(data.train.x.flatten().tolist()), set(data.test.x.flatten().tolist())
    assert (len(train), len(test)) == (75, 25)
    assert not train & test
    again = Dataset.from_arrays(np.arange(100.0)[:, None], np.zeros(100, int), test_fraction=0.25, seed=3)
    assert torch.equal(again.test.x, data.test.x)


@pytest.mark.parametrize(("fraction", "held"), [(0.25, 25), (0.251, 26), (0.29, 29), (0.01, 1), (0.99, 99)])
def test_the_test_set_is_the_first_of_the_samples_in_the_order_of_the_splits_own_stream(fraction, held):
    """Purpose 8; a fraction of a sample counts as one."""
    data = Dataset.from_arrays(np.arange(100.0)[:, None], np.zeros(100, int), test_fraction=fraction, seed=3)
    order = philox(3, 8).permutation(100)
    assert data.test.x.flatten().tolist() == order[:held].tolist()
    assert data.train.x.flatten().tolist() == order[held:].tolist()


def test_of_every_owner_the_same_share_is_held_out_and_one_sample_stays():
    owner = np.repeat([2, 0, 1], [10, 1, 4])
    data = Dataset.from_arrays(np.arange(15.0)[:, None], np.zeros(15, int), owner=owner, test_fraction=0.4, seed=3)
    order = [int(i) for i in philox(3, 8).permutation(15)]
    by_owner = [[i for i in order if owner[i] == client] for client in range(3)]
    quota = [0, 2, 4]
    held = [i for mine, count in zip(by_owner, quota, strict=True) for i in mine[:count]]
    kept = [i for mine, count in zip(by_owner, quota, strict=True) for i in mine[count:]]
    assert data.test.x.flatten().tolist() == held
    assert data.train.x.flatten().tolist() == kept
    assert data.owner.tolist() == owner[kept].tolist()
    assert data.defaults == {"partition": "natural", "clients": 3, "min_samples": 1}
    half = Dataset.from_arrays(np.zeros((6, 1)), np.zeros(6, int), owner=[0, 0, 0, 1, 1, 1], test_fraction=0.9)
    assert np.bincount(half.owner).tolist() == [1, 1]


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 0.999999])
def test_a_split_that_leaves_nothing_is_refused(fraction):
    with pytest.raises(SettingError, match="test_fraction"):
        Dataset.from_arrays(np.zeros((10, 1)), np.zeros(10, int), test_fraction=fraction)


def test_the_digits():
    data = DATASETS.get("digits")()
    assert data is digits()
    assert (len(data.train), len(data.test), data.classes) == (1437, 360, 10)
    both = torch.cat([data.train.y, data.test.y])
    assert torch.bincount(both).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert int(data.train.x.max()) == 16
    inputs = data.train.inputs(slice(None), torch.float32)
    assert abs(float(inputs.mean())) < 0.01
    assert abs(float(inputs.std()) - 1) < 0.01


def test_training_never_touches_the_test_pool():
    fed = digits().divide(10, "iid")
    used = np.concatenate([fed.indices(d) for d in range(10)])
    assert sorted(used.tolist()) == list(range(1437))
    assert fed.train.x.data_ptr() != fed.test.x.data_ptr()


def test_constants_of_a_normalisation_may_be_numpys_and_must_be_numbers():
    made = Normalize(255, np.array([0.5, 0.25], dtype=np.float32), np.float32(2))
    assert (made.mean, made.std) == ((0.5, 0.25), (2.0,))
    for words in ({"scale": 0}, {"scale": float("inf")}, {"mean": "a"}, {"std": [1, 0]}, {"std": True}, {"mean": []}):
        with pytest.raises(SettingError, match=r"must be a (list of numbers|number other than 0)"):
            Normalize(**words)
