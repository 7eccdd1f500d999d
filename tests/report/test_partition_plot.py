import numpy as np
import pytest
from PIL import Image

from fedcat.core.errors import SettingError
from fedcat.data.builtin import digits
from fedcat.report.partition_plot import draw_partition


@pytest.mark.parametrize("clients", [12, 150])
def test_a_picture_is_drawn_and_shows_the_partition(tmp_path, clients):
    pictures = []
    for seed in (0, 1):
        path = tmp_path / f"{seed}.png"
        draw_partition(digits().divide(clients, "dirichlet", seed=seed, alpha=0.3), path)
        with Image.open(path) as image:
            pictures.append(np.asarray(image.convert("L")))
    assert pictures[0].shape == pictures[1].shape
    assert pictures[0].shape[1] >= 1000
    assert 0.02 < (pictures[0] < 250).mean() < 0.9
    assert not np.array_equal(*pictures)


def test_a_picture_can_be_a_drawing(tmp_path):
    draw_partition(digits().divide(5, "iid"), tmp_path / "a.svg", "five clients alike")
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    draw_partition(digits().divide(5, "iid"), tmp_path / "a.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


def test_a_picture_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(SettingError, match=r"must end in .png, .svg, .pdf, got 'a.gif'"):
        draw_partition(digits().divide(5, "iid"), "a.gif")
    with pytest.raises(SettingError, match="cannot be written: no directory"):
        draw_partition(digits().divide(5, "iid"), tmp_path / "nowhere" / "a.png")
