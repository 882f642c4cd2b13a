"""Tiles of one picture that go through a VAE side by side, and meet at layers that see the whole picture.

Every position of the picture belongs to one tile, although tiles overlap. At a group norm each tile copies the
features of its own positions into a common buffer. Statistics are taken over that buffer, and each tile goes on with
normalised features from it, also in its overlaps. So an error that convolutions make at a tile's edge lasts only until
the next norm. At attention, keys and values are gathered in the same way.

Each tile runs in its own thread, because only a thread can pause in the middle of another library's forward pass. One
tile runs at a time, and `_Thread` hands each tensor operation to the caller's thread. So any number of tiles share one
stream, one set of handles and one pool of cores. No module is changed. While a tile on an accelerator waits, its
tensors are in RAM.

If tiles cannot wait for each other, `SmallCopy` estimates the statistics of the whole picture.
"""

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from fractions import Fraction
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from sigmascope.pipeline.model_state import free_ram, has_diffusers_hooks, tensors_of, why_not_enough
from sigmascope.pipeline.tile_plan import ApartError, Place, Span, TilePlan
from sigmascope.probes.reading import describe, is_out_of_memory

_as_below: Any = torch._C._ExcludeDispatchKeyGuard
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)
_RAM = "cpu"
_MOST_PLACES_FOR_ATTENTION = 1 << 18
"""Latent elements up to which attention sees the whole: beyond, it would take longer than all the rest."""
_NORM_EPS = 1e-6
"""What a VAE's norms add to variances."""
_FREE_RAM_MARGIN = 0.25
"""Share of what the tiles take in RAM that must be free on top of it."""


def why_no_ram(error: BaseException) -> str | None:
    """The reason if an error says that RAM ran out, None for other errors. Tiles that do not meet need less RAM."""
    is_ram = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
    return f"RAM ran out while its tiles waited for each other: {describe(error)}" if is_ram else None


class _StoppedError(BaseException):
    """Ends a tile's thread. It is not an `Exception`, because a VAE may catch those and go on."""


def why_apart(modules: Sequence[nn.Module]) -> str | None:
    """Why the tiles of these modules cannot meet, or None if they can."""
    parts = [part for module in modules for part in module.modules()]
    if not any(isinstance(part, nn.GroupNorm) for part in parts):
        return "it has no GroupNorm, and other norms see only their own tile"
    inner = (part for part in parts if not any(part is module for module in modules))
    if has_diffusers_hooks(modules) or any("_hf_hook" in vars(part) for part in inner):
        return "hooks move or cast its weights layer by layer"
    if _is_compiled(parts):
        return "it is compiled"
    if any(is_traceable_wrapper_subclass(tensor) for tensor in tensors_of(modules)):
        return "its weights are of a tensor subclass of their own"
    return None


def can_estimate(modules: Sequence[nn.Module]) -> bool:
    """Whether group norms can use estimated statistics if tiles cannot meet."""
    parts = [part for module in modules for part in module.modules()]
    return any(isinstance(part, nn.GroupNorm) for part in parts) and not _is_compiled(parts)


def _is_compiled(parts: Iterable[nn.Module]) -> bool:
    return any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in parts)


@dataclass(slots=True)
class _AtNorm:
    """A tile that waits at a group norm. Attributes as of `torch.nn.functional.group_norm`."""

    features: Tensor
    groups: int
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5

    def area(self, place: Place) -> Tensor:
        """The features with separate axes for height and width.

        Raises:
            ApartError: They have no height and width.
        """
        if self.features.ndim > 3:
            return self.features
        sides = place.sides_of(self.features.shape[-1])
        if sides is None:
            raise ApartError(f"a norm of {tuple(self.features.shape)} has no height and width")
        return torch.unflatten(self.features, -1, sides)

    def only_storage(self) -> torch.UntypedStorage | None:
        """The storage of the features, if it holds nothing else."""
        storage = self.features.untyped_storage()
        return storage if storage.nbytes() == self.features.nbytes else None

    def normalised(self, features: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Normalise features with these statistics of each group. One kernel does it, with the batch folded into channels."""
        batch, channels = self.features.shape[:2]
        mean, variance = (
            of_groups.repeat_interleave(channels // self.groups, 1).flatten()
            for of_groups in (mean, variance)
        )
        weight, bias = (
            None if affine is None else affine.to(mean).repeat(batch) for affine in (self.weight, self.bias)
        )
        one_sample = features.reshape(1, batch * channels, *features.shape[2:])
        made = functional.batch_norm(one_sample, mean, variance, weight, bias, False, 0.0, self.eps)
        return made.reshape(self.features.shape)


@dataclass(slots=True)
class _AtAttention:
    """A tile that waits at attention for the keys and values of the whole picture.

    Attributes:
        key: The tile's own keys: (…, places, channels).
        value: Its values, in the same shape.
        sides: Height and width of the tile's places, after the frames of a video.
    """

    key: Tensor
    value: Tensor
    sides: tuple[int, ...]


class _Meeting:
    """One layer at which all tiles meet."""

    def __init__(self, first: Place, sides: Sequence[int]) -> None:
        axes = first.plan.rows, first.plan.columns
        self._scales = [
            Fraction(length, min(axis.tile, axis.length)) for axis, length in zip(axes, sides, strict=True)
        ]

    def spans(self, place: Place, sides: Sequence[int]) -> tuple[Span, Span]:
        """Where a tile's features are, along height and width."""
        (high, wide), (height, width) = self._scales, sides
        rows, columns = place.plan.rows, place.plan.columns
        return rows.features(place.row, height, high), columns.features(place.column, width, wide)

    def whole_sides(self, plan: TilePlan) -> Iterator[int]:
        """Height and width of the whole's features, or a little more where the factor does not divide a side."""
        for axis, scale in zip((plan.rows, plan.columns), self._scales, strict=True):
            yield math.ceil((axis.length + (axis.length * axis.factor < axis.pixels)) * scale)


class _Norm(_Meeting):
    """A group norm over the whole picture; each tile gets its part of the result."""

    def __init__(self, first: Place, asked: _AtNorm) -> None:
        area = asked.area(first)
        super().__init__(first, area.shape[-2:])
        shape = (*area.shape[:-2], *self.whole_sides(first.plan))
        _check_room(math.prod(shape) * area.itemsize + 2 * (first.plan.count - 1) * area.nbytes)
        self._whole = torch.empty(shape, dtype=area.dtype, device="cpu")
        self._groups = asked.groups
        self._seen: list[tuple[int, Tensor, Tensor]] = []
        self._statistics: tuple[Tensor, Tensor] | None = None
        self._differences: list[Tensor] = []

    def take(self, place: Place, asked: _AtNorm) -> None:
        """Copy a tile's own positions into the common buffer."""
        area = asked.area(place)
        if (*area.shape[:-2], asked.groups) != (*self._whole.shape[:-2], self._groups):
            raise ApartError("its tiles do not go through the same norms")
        rows, columns = self.spans(place, area.shape[-2:])
        self._compare(area, rows, columns)
        own = area[..., rows.own, columns.own]
        self._whole[..., rows.own_place, columns.own_place] = own
        grouped = _grouped(own, self._groups)
        variance, mean = torch.var_mean(grouped, dim=2, correction=0)
        self._seen.append((grouped.shape[2], mean, variance))

    def answer(self, place: Place, asked: _AtNorm, *, put_back: bool) -> Tensor:
        """A tile's part of the buffer, normalised.

        Args:
            place: Which tile.
            asked: What it waits with.
            put_back: Whether its storage was emptied while it waited, and can take its features again.
        """
        area = asked.area(place)
        rows, columns = self.spans(place, area.shape[-2:])
        there = self._whole[..., rows.place, columns.place]
        if self._statistics is None:
            self._statistics = self._of_all()
        there = area.copy_(there) if put_back else there.to(area.device)
        return asked.normalised(there, *self._statistics)

    def _compare(self, area: Tensor, rows: Span, columns: Span) -> None:
        """Compare a tile with the tiles above and to the left, just outside its own positions."""
        for above, left in (
            (_next_to(rows), (columns.own, columns.own_place)),
            ((rows.own, rows.own_place), _next_to(columns)),
        ):
            here = area[..., above[0], left[0]].float()
            if here.numel():
                there = self._whole[..., above[1], left[1]].to(here)
                self._differences.append(
                    torch.stack([values.square().sum() for values in (here - there, there)])
                )

    def difference(self) -> Tensor | None:
        """Relative L2 difference of neighbours before they met; None if no tiles overlap."""
        if not self._differences:
            return None
        sums = torch.stack(self._differences).sum(0)
        return torch.sqrt(sums[0] / sums[1])

    def _of_all(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of each group over all tiles' own positions."""
        counts = [count for count, _, _ in self._seen]
        shares = torch.tensor(counts, device=self._seen[0][1].device)[:, None, None] / sum(counts)
        means = torch.stack([mean for _, mean, _ in self._seen])
        variances = torch.stack([variance for _, _, variance in self._seen])
        mean = (shares * means).sum(0)
        return mean, (shares * (variances + (means - mean).square())).sum(0)


def _grouped(features: Tensor, groups: int) -> Tensor:
    """The features as (batch, groups, values of a group), in float32 or wider."""
    wide = features.float() if features.itemsize < 4 else features
    return torch.unflatten(wide, 1, (groups, -1)).flatten(2)


def _next_to(span: Span) -> tuple[slice, slice]:
    """The quarter of a tile's overlap that is next to its own positions, at least one: in the tile, and in the whole.

    Errors from the tile's edge have not come so far since the last meeting.
    """
    before, shift = span.own.start, span.place.start
    begin = before - min(max(before // 4, 1), before)
    return slice(begin, before), slice(begin + shift, before + shift)


def _check_room(nbytes: int) -> None:
    reason = why_not_enough(int(nbytes * (1 + _FREE_RAM_MARGIN)), free_ram())
    if reason is not None:
        raise ApartError(f"its tiles cannot wait for each other in RAM: {reason}")


class _Attention(_Meeting):
    """Attention between all places of a picture."""

    def __init__(self, first: Place, asked: _AtAttention) -> None:
        super().__init__(first, asked.sides[-2:])
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def take(self, place: Place, asked: _AtAttention) -> None:
        """Keep the keys and values of a tile's own positions."""
        rows, columns = self.spans(place, asked.sides[-2:])
        key, value = (
            torch.unflatten(tensor, -2, asked.sides)[..., rows.own, columns.own, :].flatten(-3, -2)
            for tensor in (asked.key, asked.value)
        )
        self._pairs.append((key, value))

    def answer(self, place: Place, asked: _AtAttention, *, put_back: bool) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole picture, frame by frame. Arguments are those of `_Norm.answer`."""
        if len(self._pairs) > 1:
            keys, values = zip(*self._pairs, strict=True)
            self._pairs = [(torch.cat(keys, -2), torch.cat(values, -2))]
        key, value = self._pairs[0]
        first = -len(asked.sides)  # the axis of frames, where there is one
        return key.flatten(first, -2), value.flatten(first, -2)


class _Thread:
    """Runs code in a thread that pauses at each question until the caller's thread answers."""

    def __init__(self, code: Callable[[], object]) -> None:
        self._questions: SimpleQueue[Any] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._is_stopped = False
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        run = copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run, code, modes), daemon=True)

    def _run(self, code: Callable[[], object], modes: Iterable[Any]) -> None:
        for mode in modes:  # such as a default device
            _push_mode(mode)  # type: ignore[no-untyped-call]
        try:
            self._questions.put(code())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._questions.put(error)

    def ask(self, question: object) -> Any:
        """Ask from the code's thread, and wait for the answer; an error as the answer is raised here."""
        if self._is_stopped:
            raise _StoppedError
        self._questions.put(question)
        answer, error = self._answers.get()
        if error is None:
            return answer
        raise error

    def next_question(self) -> Any:
        """Wait in the caller's thread for the next question, for the code's result, or for the error that it raised."""
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError as error:
                raise ApartError(f"its tiles get no threads: {error}") from error
        return self._questions.get()

    def answer(self, answer: Any, error: BaseException | None = None) -> None:
        """Answer the question, so that the code goes on."""
        self._answers.put((answer, error))

    def stop(self) -> None:
        """End the code at its next question."""
        self._is_stopped = True
        self.answer(None, _StoppedError())

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join()


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands tensor operations to the caller's thread."""

    def __init__(self, ask: Callable[[object], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ask = ask

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._ask((func, args, kwargs or {}))


class _Layers(TorchFunctionMode):
    """Pauses a tile at group norms, and at attention between the places of a picture."""

    def __init__(self, tile: "Tile", ask: Callable[[object], Any]) -> None:
        super().__init__()
        self._tile, self._ask = tile, ask

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.group_norm:
            return self._group_norm(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in _SOFTMAX and args and self._tile.place.sides_of(args[0].shape[-1]):
            self._tile.attends_alone = (
                "attention sees only its tile: it does not use scaled_dot_product_attention"
            )
        return func(*args, **kwargs)

    def _group_norm(self, input: Tensor, num_groups: int, *affine: Any, **others: Any) -> Tensor:
        kind = input.device.type
        if kind != "cpu" and torch.is_autocast_enabled(kind):
            input = input.float()  # as autocast does for group norms
        made: Tensor = self._ask(_AtNorm(input, num_groups, *affine, **others))
        return made

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        attend = functional.scaled_dot_product_attention
        places, place = query.shape[-2], self._tile.place
        sides = place.sides_of(places)
        between = None if attn_mask is None or sides is None else _mask_between_frames(attn_mask, sides)
        why_alone = (
            "its mask differs between positions"
            if is_causal or (attn_mask is not None and between is None)
            else "the whole picture has too many positions"
            if place.of_whole(places) > _MOST_PLACES_FOR_ATTENTION
            else None
        )
        if sides is None or key.shape[-2] != places or why_alone:
            if sides is not None:
                self._tile.attends_alone = f"attention sees only its tile: {why_alone or 'it has other keys'}"
            return attend(query, key, value, attn_mask, dropout_p, is_causal, **others)
        keys, values = self._ask(_AtAttention(key, value, sides))
        at_once = max(places * places // keys.shape[-2], 1)  # no more pairs than the tile has by itself
        made, mask = [], None
        for begin in range(0, places, at_once):
            some = query[..., begin : begin + at_once, :]
            if between is not None:
                mask = _mask_of_places(between, places, keys.shape[-2], begin, some.shape[-2])
            made.append(attend(some, keys, values, mask, dropout_p, **others))
        return torch.cat(made, -2)


def _mask_between_frames(mask: Tensor, sides: tuple[int, ...]) -> Tensor | None:
    """The mask as (…, frames, frames) if it is the same for all places of a frame, as a causal mask is; else None."""
    places = math.prod(sides)
    if len(sides) != 3 or mask.shape[-2:] != (places, places):
        return None
    frames = (sides[0], -1)
    by_frame = torch.unflatten(torch.unflatten(mask, -1, frames), -3, frames)
    between = by_frame[..., :1, :, :1]
    return between[..., 0, :, 0] if bool((by_frame == between).all()) else None


def _mask_of_places(between: Tensor, places: int, of_whole: int, begin: int, count: int) -> Tensor:
    """The mask between `count` places of a tile, from `begin` on, and all places of the whole, each frame by frame."""
    frames = between.shape[-1]
    rows = torch.arange(begin, begin + count, device=between.device) // (places // frames)
    return between.index_select(-2, rows).repeat_interleave(of_whole // frames, -1)


class _Held:
    """The storages that a tile's operations made. While the tile waits, they are in RAM."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], bool]] = {}
        self._away: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []

    def note(self, given: object, made: object) -> None:
        """Note which storages an operation was given and which it made."""
        for values, is_own in ((given, False), (made, True)):
            for value in tree_iter(values):
                if isinstance(value, Tensor):
                    self._add(value.untyped_storage(), is_own=is_own)

    def _add(self, storage: torch.UntypedStorage, *, is_own: bool) -> None:
        key = id(storage)
        if key not in self._known:
            reference = weakref.ref(storage, lambda _: self._known.pop(key, None))
            self._known[key] = reference, is_own

    def leave(self, laid_down: torch.UntypedStorage | None) -> bool:
        """Move the tile's storages to RAM.

        Args:
            laid_down: The storage whose content is in a meeting's buffer already, and need not be copied.

        Returns:
            Whether `laid_down` is one of the tile's storages, and was emptied.
        """
        weights = {id(tensor.untyped_storage()) for tensor in tensors_of(self._modules)}
        own = [find() for find, is_own in list(self._known.values()) if is_own]
        for storage in own:
            if storage is None or id(storage) in weights or not storage.nbytes():
                continue
            if storage is laid_down:
                self._away.append((storage, storage.nbytes(), None))
            elif storage.device.type != _RAM:
                copy = torch.UntypedStorage(storage.nbytes(), device="cpu")  # type: ignore[no-untyped-call]
                copy.copy_(storage)
                self._away.append((storage, storage.nbytes(), copy))
            else:
                continue
            storage.resize_(0)
        return any(storage is laid_down for storage, _, _ in self._away)

    def come_back(self) -> None:
        """Bring the storages back to their device."""
        while self._away:
            storage, nbytes, copy = self._away.pop()
            storage.resize_(nbytes)
            if copy is not None:
                storage.copy_(copy)


class Tile:
    """One tile on its way through a VAE.

    Attributes:
        place: Where the tile is in the picture.
        thread: The thread that it runs in.
        attends_alone: Why attention sees only this tile; None if it sees the whole picture.
    """

    def __init__(
        self,
        place: Place,
        function: Callable[[Tensor], Tensor],
        part: Tensor,
        modules: Sequence[nn.Module],
    ) -> None:
        self.place = place
        self.attends_alone: str | None = None
        self._held = _Held(modules)
        weights = itertools.islice(tensors_of(modules), 1)
        kinds = {"cpu", part.device.type, *(weight.device.type for weight in weights)} - {"meta"}
        # What autocast does in the caller's thread, by kind of device.
        self._autocast = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds
        }
        self._asked: Any = None
        self._put_back = False
        self.thread = _Thread(lambda: self._through(function, part))

    def _through(self, function: Callable[[Tensor], Tensor], part: Tensor) -> Tensor:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            for kind, (dtype, enabled) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            stack.enter_context(_Operations(self.thread.ask))
            stack.enter_context(_Layers(self, self.thread.ask))
            return function(part)

    def go_on(self, meeting: "_Norm | _Attention | None") -> Tensor | None:
        """Run the tile until it is finished or waits for the others, and do its tensor operations meanwhile.

        Args:
            meeting: The meeting that all tiles have come to; None at the beginning.

        Returns:
            The tile's result if it is finished, None if it waits.
        """
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(_as_below(_VIEWS))  # what comes from the thread notes its views there
            for kind in self._autocast:  # and has been cast there
                stack.enter_context(torch.autocast(kind, enabled=False))
            if meeting is not None:
                self._held.come_back()
                answer = meeting.answer(self.place, self._asked, put_back=self._put_back)
                self._held.note((), answer)
                self._asked = None
                self.thread.answer(answer)
                del answer
            while isinstance(asked := self.thread.next_question(), tuple):
                self._do(*asked)
                del asked  # not to be held beside what the next operation makes
        if isinstance(asked, BaseException):
            raise asked
        if isinstance(asked, Tensor):
            return asked
        self._asked = asked
        return None

    def _do(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        try:
            made = func(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the VAE may know what to do about it
            self.thread.answer(None, error)
        else:
            self._held.note((args, kwargs), made)
            self.thread.answer(made)

    def meet(self, meeting: "_Norm | _Attention | None") -> "_Norm | _Attention":
        """Join the meeting, or begin one.

        Raises:
            ApartError: The others meet at another kind of layer.
        """
        asked = self._asked
        kind = _Norm if isinstance(asked, _AtNorm) else _Attention
        with torch.inference_mode():
            joined = meeting or kind(self.place, asked)
            if not isinstance(joined, kind):
                raise ApartError("its tiles do not go through the same layers")
            joined.take(self.place, asked)
            self._put_back = self._held.leave(asked.only_storage() if isinstance(asked, _AtNorm) else None)
        return joined


class SmallCopy:
    """Group norm statistics of a small copy of the picture, for tiles that cannot meet.

    Args:
        function: The encoder or decoder.
        copy: Every n-th row and column of the picture, as large as a tile. An average would vary less than the picture.

    Raises:
        ApartError: `function` fails on the copy, or runs no group norm. Running out of memory is raised as it is.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], copy: Tensor) -> None:
        self._function = function
        self._known: list[_Statistics] = []
        self._seen: list[list[_Statistics]] = []
        self._run(copy, self._known, [])
        if not self._known:
            raise ApartError("it met no group norm")

    def tile(self, part: Tensor) -> Tensor:
        """The result for a tile, with the copy's statistics at each group norm.

        Raises:
            ApartError: The tile runs other norms than the copy did, or `function` fails on it.
        """
        seen: list[_Statistics] = []
        made = self._run(part, seen, self._known)
        if len(seen) != len(self._known):
            raise ApartError("its tiles do not go through the same norms")
        self._seen.append(seen)
        return made

    def _run(self, part: Tensor, seen: "list[_Statistics]", known: "Sequence[_Statistics]") -> Tensor:
        try:
            with _Norms(seen, known):
                return self._function(part)
        except ApartError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ApartError(f"an estimate failed: {describe(error)}") from error

    def differences(self) -> Iterator[Tensor]:
        """For each norm, how far the copy's statistics were off: relative L2 of the features against the tiles' statistics."""
        for (mean, variance), seen in zip(self._known, zip(*self._seen, strict=True), strict=True):
            means, variances = (torch.stack(values) for values in zip(*seen, strict=True))
            true_mean = means.mean(0)
            true_variance = (variances + (means - true_mean).square()).mean(0)
            deviation, true_deviation = ((value + _NORM_EPS).sqrt() for value in (variance, true_variance))
            off = torch.stack([(mean - true_mean) / true_deviation, deviation / true_deviation - 1])
            yield off.square().sum(0).mean().sqrt()


_Statistics = tuple[Tensor, Tensor]
"""Mean and variance of the groups of each sample."""


class _Norms(TorchFunctionMode):
    """Notes the statistics of each group norm, and gives it the known ones instead, if there are any."""

    def __init__(self, seen: list[_Statistics], known: Sequence[_Statistics]) -> None:
        super().__init__()
        self._seen, self._known = seen, known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self._group_norm if func is functional.group_norm else func
        return call(*args, **(kwargs or {}))

    def _group_norm(self, input: Tensor, num_groups: int, *affine: Any, **others: Any) -> Tensor:
        index = len(self._seen)
        variance, mean = torch.var_mean(_grouped(input, num_groups), dim=2, correction=0)
        self._seen.append((mean, variance))
        if not self._known:
            return functional.group_norm(input, num_groups, *affine, **others)
        if index >= len(self._known) or self._known[index][0].shape != mean.shape:
            raise ApartError("its tiles do not go through the same norms")
        return _AtNorm(input, num_groups, *affine, **others).normalised(input, *self._known[index])


def go_through(
    tiles: Sequence[Tile], modules: Sequence[nn.Module], differences: list[Tensor]
) -> Generator[tuple[Place, Tensor], None, None]:
    """Run all tiles of a picture side by side, and give each tile's place and result, in order.

    Args:
        tiles: All tiles of one picture.
        modules: The modules that the tiles go through.
        differences: For each norm, the difference of neighbours before they met is appended here.

    Raises:
        ApartError: The tiles cannot meet.
        Exception: Whatever is raised in one of them.
    """
    before: list[object] = []
    waiting = list(tiles)
    meeting: _Norm | _Attention | None = None
    try:
        while waiting:
            passed, meeting, coming = meeting, None, waiting
            waiting = []
            for tile in coming:
                result = tile.go_on(passed)
                if result is not None:
                    yield tile.place, result
                    del result
                    continue
                waiting.append(tile)
                meeting = tile.meet(meeting)
                if tile is tiles[0]:
                    # This tile has run to the next meeting, the others only to the one before.
                    before, last = _attributes(modules), before
                    if last and list(map(id, last)) != list(map(id, before)):
                        raise ApartError("it keeps state from one layer to the next")
            if 0 < len(waiting) < len(coming):
                raise ApartError("its tiles do not go through the same layers")
            if isinstance(meeting, _Norm) and (difference := meeting.difference()) is not None:
                differences.append(difference)
    finally:
        for tile in tiles:
            tile.thread.stop()
        for tile in tiles:
            tile.thread.join()


def _attributes(modules: Sequence[nn.Module]) -> list[object]:
    """The plain attributes of modules. A VAE that writes to them cannot run two tiles in turns."""
    parts = (vars(part) for module in modules for part in module.modules())
    values = [
        own[name] for own in parts for name in own if name not in ("_parameters", "_buffers", "_modules")
    ]
    inner = (
        value.values() if isinstance(value, dict) else value
        for value in values
        if isinstance(value, dict | list)
    )
    return [*values, *itertools.chain.from_iterable(inner)]
