"""ResNet-18 and ResNet-50, as in "Deep Residual Learning for Image Recognition" (He et al., 2015).

The stride of a block is in its 3 x 3 convolution, as in most implementations today.
"""

from __future__ import annotations

import torch
from torch import nn

_BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
"""Blocks in each stage, by the number of layers; each stage is twice as wide as the one before."""


class ResNet(nn.Module):
    """Scores of images, float of shape (N, 3, H, W), for each class: (N, classes)."""

    def __init__(self, layers: int = 50, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        pool = nn.MaxPool2d(3, 2, padding=1)
        self.stem = nn.Sequential(*_convolution(3, width, 7, stride=2), pool)
        blocks: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(_BLOCKS[layers]):
            for number in range(count):
                stride = 2 if stage and not number else 1
                result = (width << stage) * (4 if layers == 50 else 1)
                make = _bottleneck if layers == 50 else _pair
                blocks.append(
                    Block(make(channels, width << stage, stride), channels, result, stride)
                )
                channels = result
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.blocks(self.stem(images)))
        return scores


class Block(nn.Module):
    """Convolutions, of which the result is added to the input."""

    def __init__(
        self, convolutions: list[nn.Module], channels: int, result: int, stride: int
    ) -> None:
        super().__init__()
        self.residual = nn.Sequential(*convolutions[:-1])  # the sum comes before the activation
        self.shortcut: nn.Module = nn.Identity()
        if channels != result or stride > 1:
            self.shortcut = nn.Sequential(*_convolution(channels, result, 1, stride=stride)[:-1])
        self.activation = nn.ReLU(inplace=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.activation(self.residual(values) + self.shortcut(values))
        return result


def _bottleneck(channels: int, width: int, stride: int) -> list[nn.Module]:
    return [
        *_convolution(channels, width, 1),
        *_convolution(width, width, 3, stride=stride),
        *_convolution(width, 4 * width, 1),
    ]


def _pair(channels: int, width: int, stride: int) -> list[nn.Module]:
    return [*_convolution(channels, width, 3, stride=stride), *_convolution(width, width, 3)]


def _convolution(channels: int, result: int, size: int, stride: int = 1) -> list[nn.Module]:
    """Return convolution, batch normalization and activation."""
    convolution = nn.Conv2d(channels, result, size, stride=stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(result), nn.ReLU(inplace=True)]
