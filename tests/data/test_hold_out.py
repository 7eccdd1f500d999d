"""The clients' own held-out data: by fraction, and as the data brings it."""

import json

import numpy as np
import pytest
import torch
from helpers import federation
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import fedcat
from fedcat.core.errors import SettingError

SHORT = {"dataset": "digits", "clients": 20, "method": "fedavg", "rounds": 4, "epochs": 1, "evaluate_every": 2}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
OWNER = np.array(["ann", "bob", "cid"])[RNG.integers(3, size=120)]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    test=st.floats(0, 0.9),
    validation=st.floats(0, 0.9),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_every_sample_is_in_one_place_and_every_client_keeps_one_to_train(sizes, test, validation, seed):
    whole = federation(sizes)
    wanted = [name for name, part in (("client_test", test), ("validation", validation)) if part]
    if (max(sizes) == 1 and wanted) or (max(sizes) == 2 and len(wanted) == 2):
        with pytest.raises(SettingError, match="holds out nothing"):
            whole.hold_out(test, validation, seed)
        return
    made = whole.hold_out(test, validation, seed)
    for client, size in enumerate(sizes):
        parts = [made.indices(client)]
        for name in wanted:
            held = getattr(made, name)
            parts.append(held.index.numpy()[held.owner == client])
        assert sorted(np.concatenate(parts)) == whole.indices(client).tolist()
        assert len(parts[0]) >= 1
        if size > len(wanted):
            assert all(len(part) >= 1 for part in parts)
    if test and not validation:
        for client, size in enumerate(sizes):
            count = int((made.client_test.owner == client).sum())
            assert count == min(max(1, round(test * size)), size - 1)
    assert made.sizes.tolist() == [len(made.indices(client)) for client in range(len(sizes))]
    assert (made.hash == whole.hash) == (not wanted)
    assert whole.hold_out(test, validation, seed).hash == made.hash


def test_another_seed_holds_out_other_samples():
    whole = federation([40, 30])
    assert len({whole.hold_out(0.3, 0.2, seed).hash for seed in range(5)}) == 5


def test_held_out_samples_are_not_trained_on_and_are_evaluated_client_by_client(tmp_path):
    result = fedcat.run(client_test=0.2, validation=0.1, per_client=True, out=tmp_path / "run", **SHORT)
    fed = result.federation
    assert fed.sizes.sum() + len(fed.client_test) + len(fed.validation) == 1437
    net = result.model()
    by_client = []
    for client in range(20):
        index = fed.client_test.index[torch.from_numpy(fed.client_test.owner == client)]
        outputs = net(fed.train.inputs(index, torch.float32))
        by_client.append(float((outputs.argmax(1) == fed.train.y[index]).double().mean()))
    assert [row["accuracy"] for row in result.clients] == pytest.approx(by_client)
    spread = result.summary.client_test["accuracy"]
    counts = np.bincount(fed.client_test.owner)
    assert spread["mean"] == pytest.approx(np.mean(by_client))
    assert spread["weighted_mean"] == pytest.approx(np.average(by_client, weights=counts))
    assert spread["worst_decile"] == pytest.approx(np.sort(by_client)[:2].mean())
    assert spread["std"] == pytest.approx(np.std(by_client))
    assert result.history[-1].client_test["accuracy"] == spread
    written = json.loads((tmp_path / "run" / "run.json").read_text())
    assert written["client_test"]["accuracy"] == spread
    lines = (tmp_path / "run" / "traffic.csv").read_text().splitlines()
    assert lines[0] == "round,client,copy,attempt,down,up,evaluation"
    evaluated = [int(line.split(",")[-1]) for line in lines[1:] if line.split(",")[1] == ""]
    assert sum(evaluated) == result.summary.bytes["evaluation"] == 2 * 2 * 20 * (13_706 * 4 + 8 * 3)
    plain = fedcat.run(**SHORT)
    assert result.summary.relative_traffic == plain.summary.relative_traffic == 1.0
    assert plain.summary.bytes["evaluation"] == 0


def test_chosen_is_the_test_score_at_the_best_validation_score():
    result = fedcat.run(validation=0.2, **{**SHORT, "rounds": 12, "evaluate_every": 1, "lr": 0.1})
    scores = [record.validation["accuracy"]["weighted_mean"] for record in result.history]
    best = int(np.argmax(scores))
    chosen = result.summary.chosen
    assert (chosen.round, chosen.validation) == (best + 1, scores[best])
    assert chosen.metrics == result.history[best].metrics
    assert fedcat.run(**SHORT).summary.chosen is None
    low = fedcat.run(validation=0.2, monitor="loss", **{**SHORT, "evaluate_every": 1}).summary.chosen
    assert low.validation > 0


def test_owners_of_test_samples_are_evaluated_on_their_own():
    order = RNG.permutation(120)
    train, test = order[:80], order[80:]
    theirs = OWNER[test].copy()
    theirs[:3] = "nobody"
    data = fedcat.Dataset.from_arrays(
        X[train], Y[train], (X[test], Y[test]), owner=OWNER[train], test_owner=theirs, name="owned"
    )
    result = fedcat.run(dataset=data, net="mlp", method="fedavg", rounds=2, per_client=True, per_round=2)
    net = result.model()
    right = (net(torch.from_numpy(X[test])).argmax(1).numpy() == Y[test]).astype(float)
    assert [row["samples"] for row in result.clients] == [(theirs == name).sum() for name in ("ann", "bob", "cid")]
    expected = [right[theirs == name].mean() for name in ("ann", "bob", "cid")]
    assert [row["accuracy"] for row in result.clients] == pytest.approx(expected)
    assert result.accuracy == pytest.approx(right.mean())
    other = data.divide(4, "iid")
    assert other.client_test is None


def test_a_test_set_that_is_held_out_of_owners_knows_them():
    data = fedcat.Dataset.from_arrays(X, Y, owner=OWNER, name="owned")
    fed = data.divide()
    assert fed.client_test is fed.test_set
    sizes = [int((name == OWNER).sum()) for name in ("ann", "bob", "cid")]
    assert np.bincount(fed.client_test.owner).tolist() == [round(0.2 * size) for size in sizes]
    kept = data.divide(min_samples=max(np.bincount(data.owner)))
    assert set(kept.client_test.owner) == {-1, 0}
    by_fraction = fed.hold_out(client_test=0.5)
    assert by_fraction.client_test is not fed.test_set
    assert fed.hold_out(validation=0.5).client_test is fed.test_set


def test_clients_without_a_value_are_left_out_of_the_spread(tmp_path):
    def rare(outputs, labels):
        return (outputs.argmax(-1) == labels)[labels > 7].double().mean()

    words = {**SHORT, "alpha": 0.1, "client_test": 0.2, "validation": 0.2, "per_client": True}
    result = fedcat.run(metrics=[rare], monitor="rare", out=tmp_path / "run", **words)
    values = np.array([row["rare"] for row in result.clients])
    assert np.isnan(values).any()
    assert result.summary.client_test["rare"]["mean"] == pytest.approx(np.nanmean(values))
    assert result.summary.chosen is not None
    for name in ("run.json", "clients.json"):
        json.loads((tmp_path / "run" / name).read_text(), parse_constant=lambda text: pytest.fail(text))


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        ([0, 1], "one client index for each of the 12 test samples"),
        (["a"] * 12, "one client index for each"),
        ([9] * 12, r"test_owner must be in -1 .. 1, got 9 .. 9"),
    ],
)
def test_owners_of_test_samples_that_do_not_fit_are_refused(owner, message):
    fed = federation([5, 4])
    with pytest.raises(SettingError, match=message):
        fedcat.Federation(fed.train, fed.test, np.repeat([0, 1], [5, 4]), test_owner=owner)
    nobody = fedcat.Federation(fed.train, fed.test, np.repeat([0, 1], [5, 4]), test_owner=[-1] * 12)
    assert nobody.client_test is None


def test_what_a_federation_holds_out_has_a_seed_of_its_own():
    fed = federation([15, 14, 12])
    words = {"dataset": fed, "net": "mlp", "method": "fedavg", "rounds": 1, "client_test": 0.3, "dtype": "float64"}
    hashes = {fedcat.run(seed=seed, data_seed=0, **words).summary.partition_hash for seed in (0, 1)}
    assert len(hashes) == 1


def test_owners_in_items_and_in_a_file(tmp_path):
    number = np.unique(OWNER, return_inverse=True)[1]
    tensors = [torch.from_numpy(part) for part in (X, Y, number)]
    pairs = TensorDataset(*(part[:80] for part in tensors)), TensorDataset(*(part[80:] for part in tensors))
    data = fedcat.Dataset.from_torch(*pairs, owner=2)
    assert data.test_owner.tolist() == number[80:].tolist()
    parts = {"x": X[:80], "y": Y[:80], "owner": OWNER[:80], "x_test": X[80:], "y_test": Y[80:]}
    np.savez(tmp_path / "a.npz", **parts, owner_test=OWNER[80:])
    stored = fedcat.load_dataset("npz", path=str(tmp_path / "a.npz"))
    assert stored.test_owner.tolist() == number[80:].tolist()
    with pytest.raises(SettingError, match="test_owner needs the owners of the training samples"):
        fedcat.Dataset.from_arrays(X, Y, test_owner=OWNER)
