"""Train a small network that describes pictures: images with captions.

    python convert_fields.py ../../sample_data annotations fields
    python caption.py fields

prints "accuracy 88.5%", the fraction of captions that equal those of the dataset word by word,
after about 20 s on one CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from shardkit import Normalize, RandomResizedCrop, Resize, make_loader, open_dataset

EPOCHS, BATCH, SIDE = 60, 16, 64
FIELDS = ("image", "caption")
END = 0
"""The word that ends and pads a caption, and starts it."""


class Words:
    """The words of all captions, as numbers."""

    def __init__(self, captions: Sequence[str]) -> None:
        """Number the words of ``captions``."""
        self.words = ["", *sorted({word for caption in captions for word in caption.split()})]
        self.numbers = {word: number for number, word in enumerate(self.words)}
        self.length = max(len(caption.split()) for caption in captions) + 1

    def encode(self, captions: Sequence[str]) -> torch.Tensor:
        """Return the numbers of the words, padded: int64 of shape (N, length)."""
        rows = [[self.numbers[word] for word in caption.split()] for caption in captions]
        return torch.tensor([row + [END] * (self.length - len(row)) for row in rows])

    def decode(self, numbers: torch.Tensor) -> list[str]:
        """Return the captions of `encode`'s result."""
        return [" ".join(self.words[n] for n in row if n != END) for row in numbers.tolist()]


class Network(nn.Module):
    """Convolutions see the picture, and a recurrent network writes one word after the other."""

    def __init__(self, words: int) -> None:
        """Create the network for ``words`` different words."""
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after)]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        self.see = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (SIDE // 16) ** 2, 64))
        self.read = nn.Embedding(words, 64)
        self.write = nn.GRUCell(64, 64)
        self.score = nn.Linear(64, words)

    def forward(self, images: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
        """Return the scores of each next word, given the true words before it."""
        state = self.see(images)
        word = torch.full((len(images),), END)
        scores = []
        for number in range(captions.shape[1]):
            state = self.write(self.read(word), state)
            scores.append(self.score(state))
            word = captions[:, number]
        return torch.stack(scores, 2)

    def describe(self, images: torch.Tensor, length: int) -> torch.Tensor:
        """Return the most likely words: int64 of shape (N, length)."""
        state = self.see(images)
        words = [torch.full((len(images),), END)]
        for _ in range(length):
            state = self.write(self.read(words[-1]), state)
            words.append(self.score(state).argmax(1))
        return torch.stack(words[1:], 1)


def train(path: str, words: Words) -> Network:
    """Train on the images and captions of a dataset."""
    crop = RandomResizedCrop(SIDE, scale=(0.8, 1.0), ratio=(0.95, 1.05))
    loader = make_loader(open_dataset(path, decode=crop, fields=FIELDS), BATCH, shuffle=True)
    torch.manual_seed(0)
    network, normalize = Network(len(words.words)), Normalize()
    optimizer = torch.optim.AdamW(network.parameters(), 0.003)
    for _ in range(EPOCHS):
        for images, captions in loader:  # a tensor and a list of texts
            targets = words.encode(captions)
            loss = cross_entropy(network(normalize(images), targets), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network


@torch.inference_mode()
def accuracy(network: Network, path: str, words: Words) -> float:
    """Return the fraction of captions that are written word by word as in the dataset."""
    dataset = open_dataset(path, decode=Resize((SIDE, SIDE)), fields=FIELDS)
    equal = 0
    for images, captions in make_loader(dataset, BATCH):
        found = words.decode(network.describe(Normalize()(images), words.length))
        equal += sum(map(str.__eq__, found, captions))
    return equal / len(dataset)


if __name__ == "__main__":
    torch.set_num_threads(1)  # floating-point sums depend on how they are split
    known = Words(open_dataset(sys.argv[1]).column("caption"))
    print(f"accuracy {accuracy(train(sys.argv[1], known), sys.argv[1], known):.1%}")
