"""A small network of convolutions of several kinds and a Linear, which LoRAs change."""

import torch
from torch import Tensor, nn


class SmallNet(nn.Module):
    """Convolutions of several kinds, then a Linear over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.strided = nn.Conv2d(8, 8, 3, stride=2, padding=1, padding_mode="reflect")
        self.dilated = nn.Conv2d(8, 6, (1, 3), padding="same", dilation=(1, 2), bias=False)
        self.pointwise = nn.Conv2d(6, 5, 1)
        self.out = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.stem, self.strided, self.dilated, self.pointwise):
            x = torch.tanh(layer(x))
        result: Tensor = self.out(x.movedim(1, -1))
        return result
