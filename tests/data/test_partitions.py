import numpy as np
import pytest

from fedcat.core.errors import SettingError
from fedcat.data.builtin import digits
from fedcat.data.partitions import PARTITIONS, partition

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

LABELS = np.random.default_rng(0).integers(10, size=2000)
NAMES = [name for name, _ in PARTITIONS if name != "natural"]


@pytest.mark.parametrize("name", NAMES)
@hypothesis.given(
    labels=st.lists(st.integers(0, 6), min_size=40, max_size=120),
    clients=st.integers(1, 8),
    alpha=st.floats(0.2, 50),
    seed=st.integers(0, 2**63 - 1),
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_every_sample_has_one_owner_and_every_client_its_minimum(name, labels, clients, alpha, seed):
    labels = np.array(labels)
    try:
        given = {"alpha": alpha} if name.startswith("dirichlet") else {}
        owner = partition(name, labels, clients, seed, min_samples=2, tries=200, **given)
    except SettingError:
        hypothesis.reject()
    assert owner.shape == labels.shape
    sizes = np.bincount(owner, minlength=clients)
    assert len(sizes) == clients
    assert sizes.min() >= 2


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_same_partition_and_another_seed_another(name):
    first = partition(name, LABELS, 20, 5)
    assert np.array_equal(first, partition(name, LABELS, 20, 5))
    assert not np.array_equal(first, partition(name, LABELS, 20, 6))


@pytest.mark.parametrize("name", ["iid", "dirichlet-hsu", "shards"])
def test_sizes_are_near_equal(name):
    sizes = np.bincount(partition(name, LABELS[:1003], 50, 0, **({"alpha": 0.1} if name == "dirichlet-hsu" else {})))
    assert sizes.max() - sizes.min() <= (2 if name == "shards" else 1)


def test_the_cap_stops_a_client_that_has_its_share():
    """A client may pass its share with one class only: before that class it held less than the share."""
    labels = np.repeat([0, 1], 500)
    owner = partition("dirichlet", labels, 10, 1, alpha=0.5, min_samples=1)
    first = np.bincount(owner[labels == 0], minlength=10)
    second = np.bincount(owner[labels == 1], minlength=10)
    assert (first >= 100).any()
    assert (second[first >= 100] == 0).all()
    free = partition("dirichlet-uncapped", labels, 10, 1, alpha=0.5, min_samples=1)
    f0, f1 = np.bincount(free[labels == 0], minlength=10), np.bincount(free[labels == 1], minlength=10)
    assert (f1[f0 >= 100] > 0).any()


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-uncapped", "dirichlet-hsu"])
def test_a_smaller_alpha_means_fewer_classes_a_client(name):
    def classes(alpha):
        owner = partition(name, LABELS, 20, 0, alpha=alpha, min_samples=1)
        return np.mean([len(np.unique(LABELS[owner == d])) for d in range(20)])

    assert classes(0.05) < classes(0.5) < classes(100)


def test_dirichlet_shares_have_the_variance_of_the_distribution():
    """The share of one class on one of N clients under Dir(a) has variance (N - 1) / (N^2 (N a + 1))."""
    labels = np.zeros(10_000, dtype=int)
    shares = [
        np.bincount(partition("dirichlet-uncapped", labels, 4, s, alpha=2.0), minlength=4)[0] / 10_000
        for s in range(800)
    ]
    assert np.mean(shares) == pytest.approx(0.25, abs=0.02)
    assert np.var(shares) == pytest.approx(3 / (16 * 9), rel=0.15)


def test_hsu_mixes_have_the_variance_of_the_paper():
    """A class share under Dir(a * prior), prior 1/2 of two classes, has variance 1 / (4 (a + 1))."""
    labels = np.repeat([0, 1], 100_000)
    owner = partition("dirichlet-hsu", labels, 1000, 0, alpha=1.0)[:100_000]
    shares = np.bincount(owner, minlength=1000)[:300] / 200  # before a class runs out
    assert np.var(shares) == pytest.approx(1 / 8, rel=0.25)


def test_shards_hold_few_classes():
    labels = np.repeat(np.arange(10), 100)
    owner = partition("shards", labels, 50, 0, shards=2)
    assert max(len(np.unique(labels[owner == d])) for d in range(50)) <= 2
    assert np.bincount(owner).tolist() == [20] * 50


def test_iid_clients_see_all_classes_alike():
    owner = partition("iid", LABELS, 4, 0)
    counts = np.bincount(owner * 10 + LABELS, minlength=40).reshape(4, 10)
    assert counts.min() > 20


def test_the_digits_give_fifty_clients_one_sample_each_but_never_ten():
    labels = digits().train.y.numpy()
    assert np.bincount(partition("dirichlet", labels, 50, 0, alpha=0.1)).min() >= 1
    with pytest.raises(SettingError, match=r"no draw with at least min_samples = 10 .* in 50 tries"):
        partition("dirichlet", labels, 50, 0, alpha=0.1, min_samples=10, tries=50)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": 2001}, "clients must be at most the 2000 training samples, got 2001"),
        ({"min_samples": 101}, "min_samples must be at most 100 .* got 101"),
        ({"how": "shards", "shards": 200}, "shards must be at most 100 .* got 200"),
        ({"how": "dirichle"}, "unknown partition 'dirichle': did you mean 'dirichlet'"),
        ({"alpha": 1e-6, "tries": 3}, "alpha 1e-06 found no draw"),
        ({"alpha": -0.5}, "alpha must be > 0, got -0.5"),
        ({"alpha": float("inf")}, "alpha must be > 0 and finite, got inf"),
        ({"how": "iid", "alpha": 0.5}, "partition 'iid' has no options, got 'alpha'"),
        ({"how": lambda labels, clients, rng: [0, 1]}, "must return one client index for each of the 2000 samples"),
        ({"how": lambda labels, clients, rng: labels + 90}, r"must return clients in 0 \.\. 19, got 90 \.\. 99"),
        ({"how": lambda labels: labels}, r"must be a function of \(labels, clients, rng"),
    ],
)
def test_what_cannot_be_drawn_is_said(changes, message):
    words = {"how": "dirichlet", "labels": LABELS, "clients": 20, "seed": 0, **changes}
    with pytest.raises(SettingError, match=message):
        partition(**words)
