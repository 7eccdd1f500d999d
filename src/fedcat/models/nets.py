"""The built-in nets: one for the digits, two for any data, and the five nets of the FedCat experiments."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from math import prod

import torch
from torch import Tensor, nn

from fedcat.core.errors import SettingError
from fedcat.core.registry import Registry, accepts_call, label_of
from fedcat.models.losses import LossFunction, check_loss_shape

Factory = Callable[[tuple[int, ...], int], nn.Module]
"""Builds a net for an input shape (without the batch dimension) and a number of classes."""

NETS: Registry[Factory] = Registry("net")


class Net(nn.Module):
    """A net in two parts: everything up to the input of the last layer, and the last layer."""

    def __init__(self, features: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the inputs `x`."""
        out: Tensor = self.head(self.features(x))
        return out


class CenterCrop(nn.Module):
    """Crops the central `size` x `size` pixels of an image."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Return the cropped images."""
        top = (x.shape[-2] - self.size) // 2
        left = (x.shape[-1] - self.size) // 2
        return x[..., top : top + self.size, left : left + self.size]


def _expect(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(shape) != wanted:
        raise SettingError(
            f"net {name!r} takes inputs of shape {wanted}, got data of shape {tuple(shape)}: "
            "choose mlp, or cnn for images"
        )


def _pooled(convolution: nn.Conv2d) -> tuple[nn.Module, ...]:
    """Return a convolution, 2 x 2 pooling and ReLU: the same bits as with ReLU before pooling, for less work."""
    return convolution, nn.MaxPool2d(2), nn.ReLU()


@NETS.register("digits-cnn", "13,706 parameters for the 8 x 8 digits: two convolutions, two linear layers")
def digits_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a small CNN for the 8 x 8 digits."""
    _expect("digits-cnn", shape, (1, 8, 8))
    features = nn.Sequential(
        *_pooled(nn.Conv2d(1, 16, 3, padding=1)),
        *_pooled(nn.Conv2d(16, 32, 3, padding=1)),
        *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU()),
    )
    return Net(features, nn.Linear(64, classes))


@NETS.register("mlp", "two hidden layers of 200, for inputs of any shape")
def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a multilayer perceptron, the 2NN of McMahan et al. 2017."""
    features = nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU())
    return Net(features, nn.Linear(200, classes))


@NETS.register("cnn", "two 3 x 3 convolutions (32, 64) and a hidden layer of 128, for images of any size from 4 x 4 on")
def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a small CNN for images [channels, height, width]."""
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise SettingError(
            f"net 'cnn' takes images of shape (channels, height, width) of at least 4 x 4 pixels, got data of shape "
            f"{tuple(shape)}: add a channel axis to gray images, x[:, None], or choose mlp"
        )
    flat = 64 * (shape[1] // 4) * (shape[2] // 4)
    features = nn.Sequential(
        *_pooled(nn.Conv2d(shape[0], 32, 3, padding=1)),
        *_pooled(nn.Conv2d(32, 64, 3, padding=1)),
        *(nn.Flatten(), nn.Linear(flat, 128), nn.ReLU()),
    )
    return Net(features, nn.Linear(128, classes))


def _lab(channels: tuple[int, int, int], flat: int, hidden: tuple[int, ...], classes: int) -> nn.Module:
    """Build a net of two pooled 5 x 5 convolutions and linear layers."""
    into, first, second = channels
    layers: list[nn.Module] = [
        *_pooled(nn.Conv2d(into, first, 5)),
        *_pooled(nn.Conv2d(first, second, 5)),
        nn.Flatten(),
    ]
    inputs = flat
    for units in hidden:
        layers += [nn.Linear(inputs, units), nn.ReLU()]
        inputs = units
    return Net(nn.Sequential(*layers), nn.Linear(inputs, classes))


@NETS.register("lab-cifar", "62,006 parameters with 10 classes: LeNet for 32 x 32 color images")
def lab_cifar(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build LeNet for CIFAR."""
    _expect("lab-cifar", shape, (3, 32, 32))
    return _lab((3, 6, 16), 400, (120, 84), classes)


@NETS.register("lab-mnist", "66,130 parameters with 10 classes: LeNet for 28 x 28 grayscale images")
def lab_mnist(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build LeNet for MNIST."""
    _expect("lab-mnist", shape, (1, 28, 28))
    return _lab((1, 20, 50), 800, (50,), classes)


@NETS.register("lab-femnist", "160,510 parameters with 62 classes: LeNet for 28 x 28 handwriting")
def lab_femnist(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build LeNet for FEMNIST."""
    _expect("lab-femnist", shape, (1, 28, 28))
    return _lab((1, 16, 32), 512, (256,), classes)


@NETS.register("mcmahan-mnist", "1,663,370 parameters with 10 classes: the MNIST CNN of McMahan et al. 2017")
def mcmahan_mnist(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the CNN that McMahan et al. trained on MNIST."""
    _expect("mcmahan-mnist", shape, (1, 28, 28))
    features = nn.Sequential(
        *_pooled(nn.Conv2d(1, 32, 5, padding=2)),
        *_pooled(nn.Conv2d(32, 64, 5, padding=2)),
        *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()),
    )
    return Net(features, nn.Linear(512, classes))


@NETS.register("mcmahan-cifar", "1,068,298 parameters with 10 classes: the CIFAR CNN of McMahan et al. 2017")
def mcmahan_cifar(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the CNN that McMahan et al. trained on CIFAR-10, with its 24 x 24 center crop.

    Its pooling uses TensorFlow's "same" padding: one line of pixels at the bottom and one at the right.
    """
    _expect("mcmahan-cifar", shape, (3, 32, 32))
    features = nn.Sequential(
        CenterCrop(24),
        *(nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0),
        *(nn.Conv2d(64, 64, 5, padding=2), nn.ReLU()),
        nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        *(nn.Flatten(), nn.Linear(2304, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU()),
    )
    return Net(features, nn.Linear(192, classes))


class _CharLstm(nn.Module):
    """Predicts the character after a sequence of characters."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, letters)

    def features(self, x: Tensor) -> Tensor:
        """Return what the LSTM holds after the last character."""
        out: Tensor = self.lstm(self.embed(x))[0][:, -1]
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next character."""
        out: Tensor = self.head(self.features(x))
        return out


@NETS.register("char-lstm", "819,920 parameters with 80 characters: the two-layer LSTM of McMahan et al. 2017 and LEAF")
def char_lstm(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the LSTM that predicts the next character of a line."""
    if len(shape) != 1:
        raise SettingError(f"net 'char-lstm' takes sequences of characters, got data of shape {tuple(shape)}")
    return _CharLstm(classes)


def check_outputs(net: nn.Module, sample: Tensor, targets: Tensor, classes: int, loss: LossFunction) -> None:
    """Raise a `SettingError` unless `net` maps a batch to one logit per class, or to what the loss of values takes."""
    name = type(net).__name__
    net.eval()
    try:
        with torch.no_grad():
            out = net(sample)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        first = str(error).strip().splitlines()[0]
        raise SettingError(
            f"net {name} does not take inputs of shape {tuple(sample.shape[1:])} and type {sample.dtype}: {first}"
        ) from error
    if not classes and isinstance(out, Tensor):
        check_loss_shape(loss, out, targets)
        return
    if not isinstance(out, Tensor) or tuple(out.shape) != (len(sample), classes):
        got = tuple(out.shape[1:]) if isinstance(out, Tensor) else type(out).__name__
        raise SettingError(
            f"net {name} has output shape {got}, but the dataset has {classes} classes: "
            f"the output shape must be ({classes},)"
        )
    check_loss_shape(loss, out, targets)


def net_builder(part: object, shape: tuple[int, ...], outputs: int) -> Callable[[], nn.Module]:
    """Return a function that builds a net from `part`: a net, or a callable that takes nothing or (shape, outputs)."""
    if isinstance(part, nn.Module):
        module = part
        return lambda: deepcopy(module)
    if not callable(part):
        raise SettingError(f"net must be a name, a torch.nn.Module or a function that returns one, got {part!r}")
    factory = part
    arguments: tuple[object, ...] = () if accepts_call(factory) else (shape, outputs)
    if not accepts_call(factory, *arguments):
        raise SettingError(f"net {label_of(part)} must take no arguments or (input shape, number of classes)")

    def build() -> nn.Module:
        net = factory(*arguments)
        if not isinstance(net, nn.Module):
            raise SettingError(f"net must be a torch.nn.Module, got {type(net).__name__} from {label_of(part)}")
        return net

    return build
