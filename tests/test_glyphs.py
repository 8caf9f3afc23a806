"""Rendered letters and digits, and the random numbers of examples."""

import pytest
import torch

from regard.training.data import glyphs as glyphs_module
from regard.training.data.draws import draws as drawn
from regard.training.data.glyphs import CHARACTERS, FACES, glyphs
from regard.training.data.images import pixels


def draws(seed, epoch, indices, count):
    return torch.from_numpy(drawn(seed, epoch, indices, count)).float()


def test_random_numbers_are_even_and_their_own():
    numbers = draws(seed=3, epoch=1, indices=range(20_000), count=5)
    assert numbers.dtype == torch.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert (numbers.mean(0) - 0.5).abs().max() < 0.01
    assert (torch.histc(numbers, 10) / numbers.numel() - 0.1).abs().max() < 0.005
    assert (torch.corrcoef(numbers.T) - torch.eye(5)).abs().max() < 0.03
    assert (torch.corrcoef(torch.stack([numbers[1:, 0], numbers[:-1, 0]]))[0, 1]).abs() < 0.03
    for other in (draws(4, 1, range(20_000), 5), draws(3, 2, range(20_000), 5), draws(1, 3, range(20_000), 5)):
        assert (numbers == other).float().mean() < 1e-3
    shuffled = torch.randperm(20_000)
    assert torch.equal(draws(3, 1, shuffled.numpy(), 5), numbers[shuffled])


def test_glyphs_depend_on_split_seed_and_index_alone(monkeypatch):
    images, labels = glyphs("train", 40, seed=5)
    monkeypatch.setattr(glyphs_module, "TOGETHER", 7)
    again = glyphs("train", 90, seed=5)
    assert torch.equal(again.images[:40], images)
    assert torch.equal(again.labels[:40], labels)
    for other in (glyphs("test", 40, seed=5), glyphs("train", 40, seed=6)):
        assert all(not torch.equal(image, other_image) for image, other_image in zip(images, other.images, strict=True))
    assert not torch.equal(images[0], again.images[36])


def test_glyphs_are_legible_and_their_typefaces_held_out():
    assert not set(FACES["train"]) & set(FACES["test"])
    images, labels = glyphs("train", 720, size=32)
    assert images.shape == (720, 1, 32, 32)
    assert images.dtype == torch.uint8
    assert labels.bincount().tolist() == [20] * len(CHARACTERS)
    means = pixels(images).view(20, 36, -1).mean(0)
    nearest = torch.cdist(pixels(glyphs("train", 360, size=32, seed=1).images).flatten(1), means).argmin(1)
    assert (nearest == torch.arange(360) % 36).float().mean() > 0.4
    for name in FACES:
        ink = glyphs_module._rendered(FACES[name])
        assert ink.sum((2, 3)).min() > 100
        assert ink[:, :, 0].max() == ink[:, :, -1].max() == ink[..., 0].max() == ink[..., -1].max() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "valid", "count": 1}, "split: expected train, validation, test, got 'valid'"),
        ({"split": "train", "count": 0}, "count: expected a whole number of at least 1, got 0"),
        ({"split": "train", "count": 1, "size": 4}, "size: expected a whole number of at least 8, got 4"),
    ],
)
def test_bad_glyphs_say_so(arguments, message):
    with pytest.raises(ValueError, match=message):
        glyphs(**arguments)
