"""A checkpoint under the names of another one of its family (`translated`): a single file as a diffusers folder, or back.

Both sides' tensors are known by diffusers' names, which are the finest: where the original file fuses matrices, it has the
rows of several of them. A tensor of the other side is then one tensor renamed, several on top of each other, or some rows of
a fused one; halves of rows that are in the opposite order are exchanged. Nothing is read until a tensor is asked for.
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from math import prod
from typing import Final, NamedTuple

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, TensorInfo
from sigmascope.checkpoints.checkpoint import CompositeCheckpoint
from sigmascope.errors import LoraFormatError
from sigmascope.lora.alignment import part_sizes
from sigmascope.lora.families import ModelLayout, Part, Row, UnetBlocks, row_of_diffusers, row_of_original
from sigmascope.lora.families.known import vector_of_original
from sigmascope.lora.layer_names import WEIGHT, blocks_of_model, renamed

Place = tuple[Part, str]
"""A part and the key inside it, whatever prefix the part has in a file."""

_ENDINGS: Final = {".weight": ".weight", ".bias": ".bias", ".scale": ".weight"}
"""Of keys, and diffusers' for them: original files call the weight of an RMS norm its scale."""
_OPEN_CLIP: Final = re.compile(r"(.*\.attn\.in_proj)_(weight|bias)")
"""open_clip's query, key and value, the endings of whose keys have no dot."""
_OPEN_CLIP_OWN: Final = {
    "text_projection": ("text_projection.weight", True),
    "positional_embedding": ("text_model.embeddings.position_embedding.weight", False),
}
"""open_clip's parameters of the encoder itself by transformers' names, and whether they are transposed."""
_READ_BYTES: Final = 1 << 20


class _Named(NamedTuple):
    """A tensor by diffusers' names.

    Attributes:
        places: The tensors whose rows it has, in order.
        row: The family's line, if it has one.
        transposed: Whether it is diffusers' tensor with rows and columns exchanged.
    """

    places: tuple[Place, ...]
    row: Row | None = None
    transposed: bool = False


class _Rows(NamedTuple):
    """Some rows of a tensor; all of them without `rows`."""

    key: str
    rows: slice | None = None


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What a tensor is made of: rows of others on top of each other.

    Attributes:
        sources: The rows.
        swapped: Whether the halves are exchanged in the end.
        transposed: Whether rows and columns are.
    """

    sources: tuple[_Rows, ...]
    swapped: bool = False
    transposed: bool = False


def translated(
    base: Checkpoint, tuned: Checkpoint, base_layout: ModelLayout, layout: ModelLayout
) -> Checkpoint:
    """The tuned checkpoint under the base's names.

    Args:
        base: The checkpoint that has the names, of the same family.
        tuned: The checkpoint to translate.
        base_layout: How the base names its weights.
        layout: How the tuned one does.

    Returns:
        A checkpoint with the base's keys, as far as the family's names tell them; other tensors keep their own.
    """
    own, other = _named(base, base_layout), _named(tuned, layout)
    base_keys = {place: key for key, name in own.items() for place in name.places if len(name.places) == 1}
    places: dict[Place, tuple[str, int]] = {
        place: (key, index) for key, name in other.items() for index, place in enumerate(name.places)
    }
    recipes: dict[str, _Recipe] = {}
    for key, name in own.items():
        found = [places[place] for place in name.places if place in places]
        if len(found) < len(name.places):
            continue
        fused = {source: other[source] for source, _ in found if len(other[source].places) > 1}
        if fused and [place for source in fused.values() for place in source.places] == list(name.places):
            sources = [_Rows(source) for source in fused]  # fused the same way in both
        else:
            sources = [
                _Rows(
                    source,
                    _rows(tuned, source, other[source], index, base, base_keys) if source in fused else None,
                )
                for source, index in found
            ]
        first = found[0][0]
        swapped = _is_swapped(base, key, name.row) != _is_swapped(tuned, first, other[first].row)
        recipes[key] = _Recipe(tuple(sources), swapped, name.transposed != other[first].transposed)
    used = {source.key for recipe in recipes.values() for source in recipe.sources}
    recipes |= {key: _Recipe((_Rows(key),)) for key in tuned if key not in used and key not in recipes}
    return TranslatedCheckpoint(tuned, recipes)


def _named(checkpoint: Checkpoint, layout: ModelLayout) -> dict[str, _Named]:
    layers = [key.removesuffix(WEIGHT) for key in checkpoint if key.endswith(WEIGHT)]
    blocks = blocks_of_model(layers, layout)
    return {key: _named_by(key, layout, blocks) for key in checkpoint}


def _named_by(key: str, layout: ModelLayout, blocks: UnetBlocks) -> _Named:
    part, inner = layout.split(key)
    if part == "other":
        return _Named(((part, inner),))
    path, ending = inner, ""
    for own, there in _ENDINGS.items():
        if inner.endswith(own):
            path, ending = inner.removesuffix(own), there
    if part.startswith("text_encoder") and (fused := _OPEN_CLIP.fullmatch(inner)):
        path, ending = f"{fused[1]}_weight", f".{fused[2]}"
    if part.startswith("text_encoder") and inner in _OPEN_CLIP_OWN:
        name, transposed = _OPEN_CLIP_OWN[inner]
        return _Named(((part, name),), transposed=transposed)
    row = _row_of(path, part, layout, blocks)
    if isinstance(row, Row):
        return _Named(tuple((part, name + ending) for name in row.parts), row)
    return _Named(((part, row + ending),))


def _row_of(path: str, part: Part, layout: ModelLayout, blocks: UnetBlocks) -> str | Row:
    try:
        there = renamed(path, part, layout, "diffusers", blocks)
        row = row_of_diffusers(layout.family, path) if there == path else None
        usual = None if row is None else row_of_original(layout.family, row.original)
        # Variants have other names in diffusers for one original layer: the record's usual one stands for them.
        same = row is not None and usual is not None and row.is_rename and usual.is_rename
        return usual.parts[0] if same and usual is not None else there
    except LoraFormatError:
        vector = vector_of_original(layout.family, path)
        return path if vector is None else vector.parts[0] if vector.is_rename else vector


def _is_swapped(checkpoint: Checkpoint, key: str, row: Row | None) -> bool:
    if row is None or not row.swapped:
        return False
    matrix = (
        key.removesuffix(".bias") + WEIGHT if key.endswith(".bias") else key
    )  # it tells how many inputs there are
    shape = checkpoint.info(matrix if matrix in checkpoint else key).shape
    return len(shape) > 1 and row.swaps(shape[0], prod(shape[1:]))


def _rows(
    tuned: Checkpoint, key: str, name: _Named, index: int, base: Checkpoint, base_keys: Mapping[Place, str]
) -> slice:
    """Which rows of a fused tensor are one of its parts: their number is that of the base's tensors."""
    shape = tuned.info(key).shape
    sizes = [
        base.info(base_keys[place]).shape[0]
        for place in name.places
        if place in base_keys and base.info(base_keys[place]).shape
    ]
    if len(sizes) < len(name.places) or sum(sizes) != shape[0]:
        try:
            assert name.row is not None
            sizes = part_sizes(shape, name.row)
        except LoraFormatError:  # rows that no part has: the shapes are compared later, and named
            sizes = [shape[0], *(0 for _ in name.places[1:])]
    starts = [0, *(sum(sizes[: number + 1]) for number in range(len(sizes)))]
    return slice(*list(pairwise(starts))[index])


class TranslatedCheckpoint(CompositeCheckpoint):
    """An open checkpoint whose tensors are made of rows of another's.

    Args:
        source: The opened checkpoint.
        recipes: What each tensor is made of.
    """

    def __init__(self, source: Checkpoint, recipes: Mapping[str, _Recipe]) -> None:
        self.format = source.format
        places = {key: (source, recipe.sources[0].key) for key, recipe in recipes.items()}
        super().__init__(source.path, [source], places, source.metadata, source.skipped)
        self._source = source
        self._idle: deque[Tensor] = (
            deque()
        )  # memory to read into that nobody uses: fresh one scatters the heap
        self._recipes = {key: recipe for key, recipe in recipes.items() if not _is_renaming(recipe)}
        for key, recipe in self._recipes.items():
            self._infos[key] = self._made_info(key, recipe)
            how = dict.fromkeys(
                source.dequantised[rows.key] for rows in recipe.sources if rows.key in source.dequantised
            )
            if how:
                self.dequantised = {**self.dequantised, key: " and ".join(how)}

    def _made_info(self, key: str, recipe: _Recipe) -> TensorInfo:
        infos = [self._source.info(rows.key) for rows in recipe.sources]
        heights = [
            info.shape[0] if rows.rows is None else rows.rows.stop - rows.rows.start
            for info, rows in zip(infos, recipe.sources, strict=True)
        ]
        shape = (sum(heights), *infos[0].shape[1:])
        shape = tuple(reversed(shape)) if recipe.transposed else shape
        dtype = reduce(torch.promote_types, (info.dtype for info in infos))
        return TensorInfo(key, shape, dtype, prod(shape) * dtype.itemsize)

    def _read(self, info: TensorInfo) -> Tensor:
        if info.name not in self._recipes:
            return super()._read(info)
        return self._read_into(info, torch.empty(info.nbytes, dtype=torch.uint8))

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        recipe = self._recipes.get(info.name)
        if recipe is None:
            return super()._read_into(info, buffer)
        if recipe.transposed:
            whole = self._source.tensor(recipe.sources[0].key)
            return buffer.view(info.dtype).reshape(info.shape).copy_(whole.t())
        made = buffer.view(info.dtype)
        done = 0
        for rows in recipe.sources:
            for piece in self._pieces_of(rows):
                made[done : done + piece.numel()] = piece
                done += piece.numel()
        tensor = made.reshape(info.shape)
        return tensor.copy_(tensor.roll(info.shape[0] // 2, dims=0)) if recipe.swapped else tensor

    def _read_pieces(self, info: TensorInfo, buffer: Tensor) -> Iterator[Tensor]:
        recipe = self._recipes.get(info.name)
        if recipe is None:
            return super()._read_pieces(info, buffer)
        if recipe.swapped or recipe.transposed:
            return Checkpoint._read_pieces(self, info, buffer)
        return self._in_pieces(
            recipe, buffer[: buffer.numel() // info.dtype.itemsize * info.dtype.itemsize].view(info.dtype)
        )

    def _in_pieces(self, recipe: _Recipe, memory: Tensor) -> Iterator[Tensor]:
        """The elements of all sources in runs that fill the memory, so that the whole is never there."""
        filled = 0
        for rows in recipe.sources:
            for piece in self._pieces_of(rows):
                while piece.numel():
                    some = piece[: memory.numel() - filled]
                    memory[filled : filled + some.numel()] = some
                    filled, piece = filled + some.numel(), piece[some.numel() :]
                    if filled == memory.numel():
                        yield memory
                        filled = 0
        if filled:
            yield memory[:filled]

    def _pieces_of(self, rows: _Rows) -> Iterator[Tensor]:
        """A source's elements that are wanted, in row-major order, a little at a time."""
        width = prod(self._source.info(rows.key).shape[1:])
        wanted = (
            slice(0, None) if rows.rows is None else slice(rows.rows.start * width, rows.rows.stop * width)
        )
        begin = 0
        try:
            memory = self._idle.pop()
        except IndexError:
            memory = torch.empty(_READ_BYTES, dtype=torch.uint8)
        try:
            for piece in self._source.pieces(rows.key, memory):
                end = begin + piece.numel()
                stop = end if wanted.stop is None else min(wanted.stop, end)
                if max(wanted.start, begin) < stop:
                    yield piece[max(wanted.start - begin, 0) : stop - begin]
                begin = end
        finally:
            self._idle.append(memory)


def _is_renaming(recipe: _Recipe) -> bool:
    return (
        len(recipe.sources) == 1
        and recipe.sources[0].rows is None
        and not (recipe.swapped or recipe.transposed)
    )
