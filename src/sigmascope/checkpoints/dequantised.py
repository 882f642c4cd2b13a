"""A checkpoint whose quantised weights are given as the numbers that they stand for."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import Checkpoint, TensorInfo
from sigmascope.checkpoints.quantisation import BLOCK, quantisation_of, scale_kind


class DequantisedCheckpoint(Checkpoint):
    """Weights of 8-bit floats times their scales, in float32. It owns the file: closing closes both.

    Args:
        source: The opened file.
        scales: Key of the scale, by key of the weight.
        hidden: Keys that serve the quantisation only, with what they are.
    """

    def __init__(self, source: Checkpoint, scales: dict[str, str], hidden: dict[str, str]) -> None:
        self.format = source.format
        self._source = source
        self._scales = scales
        infos = {key: source.info(key) for key in source if key not in hidden}
        how = dict(source.dequantised)
        for key, scale in scales.items():
            shape = infos[key].shape
            kind = str(infos[key].dtype).removeprefix("torch.")
            how[key] = f"{kind} scaled {scale_kind(shape, source.info(scale).shape)}"
            infos[key] = replace(
                infos[key], dtype=torch.float32, nbytes=4 * source.info(key).nbytes
            )  # a byte a number before
        super().__init__(source.path, infos, source.metadata, {**source.skipped, **hidden}, how)

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that the weights are read from."""
        return self._source.files

    def _read(self, info: TensorInfo) -> Tensor:
        if info.name not in self._scales:
            return self._source.tensor(info.name)
        return self._read_into(info, torch.empty(info.nbytes, dtype=torch.uint8))

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        if info.name not in self._scales:
            return self._source.tensor_into(info.name, buffer)
        scale = self._source.tensor(self._scales[info.name]).to(torch.float32)
        numbers = buffer.view(torch.float32).reshape(info.shape)
        numbers.copy_(self._source.tensor(info.name))
        return numbers.mul_(_spread(scale, info.shape))

    def _read_pieces(self, info: TensorInfo, buffer: Tensor) -> Iterator[Tensor]:
        plain = info.name not in self._scales
        return self._source.pieces(info.name, buffer) if plain else super()._read_pieces(info, buffer)

    def close(self) -> None:
        """Close the file behind it."""
        self._source.close()


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or one that undoes its quantisation.

    Raises:
        CheckpointError: It is quantised in a way that is not undone here; the message names it.
    """
    found = quantisation_of(checkpoint)
    if not found.scales:
        return checkpoint
    return DequantisedCheckpoint(checkpoint, dict(found.scales), dict(found.hidden))


def _spread(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The scale in a shape that multiplies the weight."""
    kind = scale_kind(shape, tuple(scale.shape))
    if kind == "per tensor":
        return scale.reshape(())
    if kind == "per channel":
        return scale.reshape(-1, *(1 for _ in shape[1:]))
    rows, columns = shape
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
