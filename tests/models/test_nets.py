import pytest
import torch
from torch import nn

from fedcat.core.errors import SettingError
from fedcat.models.layout import Layout
from fedcat.models.losses import cross_entropy
from fedcat.models.nets import NETS, CenterCrop, check_outputs

SHAPES = {
    "digits-cnn": (1, 8, 8),
    "lab-cifar": (3, 32, 32),
    "lab-mnist": (1, 28, 28),
    "lab-femnist": (1, 28, 28),
    "mcmahan-mnist": (1, 28, 28),
    "mcmahan-cifar": (3, 32, 32),
}


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    [
        ("digits-cnn", 10, 13_706),
        ("lab-cifar", 10, 62_006),
        ("lab-cifar", 20, 62_856),
        ("lab-mnist", 10, 66_130),
        ("lab-femnist", 62, 160_510),
        ("mcmahan-mnist", 10, 1_663_370),
        ("mcmahan-mnist", 62, 1_690_046),
        ("mcmahan-cifar", 10, 1_068_298),
        ("mcmahan-cifar", 20, 1_070_228),
    ],
)
def test_every_net_has_exactly_its_parameters(name, classes, parameters):
    net = NETS.get(name)(SHAPES[name], classes)
    layout = Layout(net)
    assert layout.size == layout.parameter_size == parameters
    check_outputs(net, torch.randn(2, *SHAPES[name]), torch.zeros(2).long(), classes, cross_entropy)


def test_the_list_of_nets_is_complete():
    assert {name for name, _ in NETS} == {*SHAPES, "mlp", "cnn", "char-lstm"}


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("mlp", (20,), 20 * 200 + 200 + 200 * 200 + 200 + 200 * 7 + 7),
        ("mlp", (3, 5, 4), None),
        ("cnn", (3, 9, 4), None),
    ],
)
def test_nets_for_any_data(name, shape, count):
    net = NETS.get(name)(shape, 7)
    assert net(torch.zeros(2, *shape)).shape == (2, 7)
    assert count is None or sum(p.numel() for p in net.parameters()) == count
    assert torch.equal(net.head(net.features(torch.ones(2, *shape))), net(torch.ones(2, *shape)))


@pytest.mark.parametrize("shape", [(20,), (3, 2, 8)])
def test_the_cnn_says_which_data_it_takes(shape):
    with pytest.raises(SettingError, match=r"'cnn' takes images of shape .* choose mlp"):
        NETS.get("cnn")(shape, 3)


def test_the_lstm_predicts_a_character_from_all_before_it():
    net = NETS.get("char-lstm")((12,), 80).eval()
    assert sum(p.numel() for p in net.parameters()) == 819_920
    x = torch.randint(80, (3, 12))
    found = net(x)
    assert found.shape == (3, 80)
    assert torch.equal(net.head(net.features(x)), found)
    for place in (0, 11):
        other = x.clone()
        other[:, place] = (other[:, place] + 1) % 80
        assert not torch.allclose(net(other), found, atol=1e-9)
    with pytest.raises(SettingError, match="takes sequences of characters"):
        NETS.get("char-lstm")((1, 8, 8), 10)


def test_the_crop_is_central():
    image = torch.arange(32 * 32.0).view(1, 1, 32, 32)
    assert torch.equal(CenterCrop(24)(image), image[..., 4:28, 4:28])


def test_the_far_sides_of_mcmahans_pooling_are_padded():
    pool = NETS.get("mcmahan-cifar")((3, 32, 32), 10).features[3]
    x = torch.randn(1, 1, 24, 24)
    padded = nn.functional.pad(x, (0, 1, 0, 1), value=-torch.inf)
    assert torch.equal(pool(x), nn.functional.max_pool2d(padded, 3, 2))


def test_data_of_another_shape_is_refused():
    with pytest.raises(SettingError, match=r"'lab-cifar' takes inputs of shape \(3, 32, 32\), got data of shape"):
        NETS.get("lab-cifar")((1, 8, 8), 10)


def test_a_wrong_number_of_outputs_is_refused():
    with pytest.raises(SettingError, match=r"shape \(12,\), but the dataset has 10 classes"):
        check_outputs(nn.Linear(4, 12), torch.zeros(2, 4), torch.zeros(2).long(), 10, cross_entropy)
    with pytest.raises(SettingError, match="does not take inputs of shape"):
        check_outputs(nn.Linear(5, 10), torch.zeros(2, 4), torch.zeros(2).long(), 10, cross_entropy)
