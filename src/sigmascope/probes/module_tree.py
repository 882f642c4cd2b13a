"""The modules of a model in order: walked once, and again only after one was added, taken out or exchanged.

A watch asks a model for its modules at every call, and a U-Net with a LoRA has seven thousand. To see that they are
still the same takes a tenth of what walking them takes. Nothing is called on a module, and none is kept alive.

PEFT keeps ten modules beside each layer, half of which do nothing (`_idle_parts`): these are left out.
"""

import gc
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, compress, repeat
from typing import Any, Final, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sigmascope.probes.reading import PROBE_ERRORS, attribute

_Found = TypeVar("_Found")
_OWN: Final = operator.attrgetter("__dict__")
_CHILDREN: Final = operator.itemgetter("_modules")
_PARAMETERS: Final = operator.itemgetter("_parameters")
_BUFFERS: Final = operator.itemgetter("_buffers")
_TENSORS_OF: Final = operator.itemgetter("_parameters", "_buffers")
_HOOKS_OF: Final = operator.itemgetter("_forward_hooks", "_forward_pre_hooks")
_HOLDERS: Final = {"_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"}
OF_ADAPTERS: Final = "adapter_layer_names"
"""What the classes of PEFT's layers have, and no other."""
_WORTH_KEEPING: Final = 64
"""Modules: fewer are walked as fast as they are compared."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Where the modules of a tree are registered, in their order.

    Attributes:
        parents: The index of the module that each is registered on; -1 of the model.
        own_names: Its name there; "" of the model.
        has_repeats: Whether a module is registered more than once: these say only where it was come upon first.
    """

    parents: list[int]
    own_names: list[str]
    has_repeats: bool


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """A model's modules while they are looked at; let go of it then.

    Attributes:
        modules: The model first, each once, in the order of their names; without what an adapter's layer keeps that does nothing.
        names: Dotted, of the same; "" for the model.
        own: What is in each one's `__dict__`.
        shape: Where each one is registered.
        derived: What was found out from the modules' places and classes alone; holds no module.
        tensors: All parameters, and those buffers that a state dict has.
        hooked: What is in the `__dict__` of modules that have forward hooks.
        rerouted: What is in the `__dict__` of modules that have a forward pass of their own, or a compiled one.
    """

    modules: Sequence[nn.Module]
    names: list[str]
    own: Sequence[Mapping[str, Any]]
    shape: "Shape"
    derived: dict[object, Any]
    tensors: Sequence[Tensor]
    hooked: Sequence[Mapping[str, Any]]
    rerouted: Sequence[Mapping[str, Any]]

    def derive(self, what: object, find: Callable[[], _Found]) -> _Found:
        """What `find` gives, which must hold no module (see `indices`), and depend on places and classes alone."""
        if what not in self.derived:
            self.derived[what] = find()
        found: _Found = self.derived[what]
        return found

    def indices(self) -> Mapping[int, int]:
        """Where each module is in `modules`, by its `id`."""
        return self.derive(
            "indices by id", lambda: dict(zip(map(id, self.modules), range(len(self.modules)), strict=True))
        )

    def classes(self) -> Collection[type[nn.Module]]:
        """The classes of all modules, each once."""
        return self.derive("classes", lambda: {*map(type, self.modules)})

    def of_class(self, is_wanted: Callable[[type[nn.Module]], bool]) -> list[int]:
        """Where modules are whose class is a wanted one; each class is asked about once."""
        wanted = {kind for kind in self.classes() if is_wanted(kind)}
        return (
            [index for index, module in enumerate(self.modules) if type(module) in wanted] if wanted else []
        )

    def having(self, name: str) -> list[tuple[int, Any]]:
        """Where modules have an attribute that is neither None nor a tensor, with what it is.

        To ask every module takes 20 times as long: PyTorch words an error for each one that lacks it.
        """
        asked: list[int] = self.derive(
            ("asked for", name), lambda: self.of_class(partial(answers_itself, name=name))
        )
        found = {place: self.own[place][name] for place in self.holding(name)}
        found |= {place: self.own[place]["_modules"][name] for place in self._with_child(name)}
        found |= {place: attribute(self.modules[place], name) for place in asked}
        return [(place, held) for place, held in sorted(found.items(), key=_PLACE) if held is not None]

    def holding(self, name: str, among: Sequence[int] | None = None) -> list[int]:
        """Where modules have this name in their `__dict__`; of all, or of those at these places."""
        places = range(len(self.own)) if among is None else among
        owns = self.own if among is None else self.own_at(among)
        return [*compress(places, map(operator.contains, owns, repeat(name)))]

    def own_at(self, places: Sequence[int]) -> Sequence[Mapping[str, Any]]:
        """What is in the `__dict__` of the modules at these places."""
        return [*map(self.own.__getitem__, places)]

    def with_tensors(self, among: Sequence[int]) -> list[int]:
        """Where in `among` are modules that have parameters or buffers registered on themselves."""
        owns = self.own_at(among)
        try:
            have = [*map(any, map(_TENSORS_OF, owns))]
        except KeyError:  # a module that was never initialised has none of its dictionaries
            have = [bool(own.get("_parameters") or own.get("_buffers")) for own in owns]
        return [*compress(range(len(owns)), have)]

    def held(self, name: str, places: Sequence[int]) -> list[Any]:
        """What the modules at these places have under a name in their `__dict__`; None where it is not there."""
        return [*map(operator.methodcaller("get", name), self.own_at(places))]

    def _with_child(self, name: str) -> list[int]:
        """Where modules have a module registered under this name."""

        def find() -> list[int]:
            return [place for place, own in enumerate(self.own) if name in (own.get("_modules") or ())]

        return self.derive(("with a child", name), find)


_PLACE: Final = operator.itemgetter(0)


@lru_cache(maxsize=1024)
def answers_itself(kind: type[nn.Module], name: str) -> bool:
    """Whether a class answers for an attribute of its modules itself: what is held in them does not tell then."""
    is_plain = kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
    return not is_plain or hasattr(kind, name)


_NEVER_CALLED: Final = frozenset({nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList})
"""Of these very classes no module has a forward pass, nor calls its hooks."""
_WITHOUT_WEIGHTS: Final = frozenset(
    {nn.ModuleDict, nn.ModuleList, nn.Sequential, nn.Identity, nn.Dropout, nn.SiLU}
)
"""Of these very classes no module reads a weight of its own. Nor does an adapter's layer, but for those that it begins with."""
_LEAVES: Final = frozenset({nn.Linear, nn.Conv2d, nn.Embedding, nn.GroupNorm, nn.LayerNorm})
"""Of these very classes a module has no other one and no buffer, unless somebody registered one on it."""
_AT_ONCE: Final = 256
"""Modules: what is in them lies in the processor's cache from one question to the next."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What some modules of a tree were like, one after the other, without them; and which are asked for what."""

    references: list[Callable[[], nn.Module | None]]
    kinds: list[type]
    should_stay_bare: list[bool]
    may_have_children: list[bool]
    counts: list[int]
    to_children: list[Callable[[Mapping[str, Any]], object]]
    child_hash: int
    may_have_weights: list[bool]
    may_have_buffers: list[bool]
    are_called: list[bool]


@dataclass(slots=True)
class _Outline:
    """What a tree was like, without its modules: they are all there still if all references are alive."""

    parts: list[_Part]
    names: list[str]
    shape: Shape
    derived: dict[object, Any]
    hooks: "_Hooks"

    def tree(self) -> ModuleTree | None:
        """The modules; None if the tree is another one now."""
        modules: list[Any] = []
        own: list[Any] = []
        tensors: list[Any] = []
        rerouted: list[Any] = []
        for part in self.parts:
            some = [*map(operator.call, part.references)]
            if [*map(type, some)] != part.kinds:
                return None
            of_some = [*map(_OWN, some)]
            leaves = [*compress(of_some, part.should_stay_bare)]
            if any(map(_CHILDREN, leaves)) or any(map(_BUFFERS, leaves)):
                return None
            children = [*map(_CHILDREN, compress(of_some, part.may_have_children))]
            if [*map(len, children)] != part.counts:
                return None
            if _child_hash(part.to_children, children) != part.child_hash:
                return None
            modules += some
            own += of_some
            tensors += _parameters_in(compress(of_some, part.may_have_weights))
            tensors += _buffers_in([*compress(of_some, part.may_have_buffers)])
            rerouted += _rerouted_among([*compress(of_some, part.are_called)])
        hooked = self.hooks.of(own)
        return ModuleTree(modules, self.names, own, self.shape, self.derived, tensors, hooked, rerouted)


def _child_hash(
    to_children: Iterable[Callable[[Mapping[str, Any]], object]], children: Iterable[Mapping[str, Any]]
) -> int:
    """Of the modules under the names that were registered; fails if one has become another name.

    A module's hash is made of its place in memory, and no two that are there have one place.
    """
    return hash((*map(operator.call, to_children, filter(None, children)),))


def _parameters_in(owns: Iterable[Mapping[str, Any]]) -> Iterable[Tensor]:
    return filter(_IS_SET, chain.from_iterable(map(_VALUES, filter(None, map(_PARAMETERS, owns)))))


def _buffers_in(owns: Sequence[Mapping[str, Any]]) -> Iterator[Tensor]:
    """Those that a state dict has."""
    for own in compress(owns, map(_BUFFERS, owns)):
        transient = own.get("_non_persistent_buffers_set") or ()
        for name, buffer in own["_buffers"].items():
            if buffer is not None and name not in transient:
                yield buffer


_VALUES: Final = operator.methodcaller("values")
_IS_SET: Final = partial(operator.is_not, None)


class _Hooks:
    """Which modules of a tree have forward hooks. PyTorch counts those that are registered: all are asked if it did."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self._called = [place for place, kind in enumerate(kinds) if kind not in _NEVER_CALLED]
        self._registered: int | None = None
        self._hooked: list[int] = []

    def of(self, own: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """What is in the `__dict__` of those that have some; takes that of all."""
        registered = getattr(RemovableHandle, "next_id", None)
        if registered is None or registered != self._registered:
            asked = map(own.__getitem__, self._called)
            self._hooked = [*compress(self._called, map(any, map(_HOOKS_OF, asked)))]
            self._registered = registered
        known = map(own.__getitem__, self._hooked)
        return [one for one in known if any(_HOOKS_OF(one))]


def _rerouted_among(owns: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    either = map(
        operator.or_,
        map(operator.contains, owns, repeat("forward")),
        map(operator.contains, owns, repeat("_compiled_call_impl")),
    )
    return compress(owns, either)


_OUTLINES: "weakref.WeakKeyDictionary[nn.Module, _Outline]" = weakref.WeakKeyDictionary()


_LOOK: "ContextVar[dict[tuple[str, int], tuple[object, Any]] | None]" = ContextVar("this look", default=None)


@contextmanager
def one_look() -> Iterator[None]:
    """A block in which nothing of the host's runs: what stays is asked `once_a_look`, and no garbage is collected.

    What a look makes is gone after it. While it is there, the collector would count it as new, and go through everything
    that the process has: a third of a second where diffusers is loaded.
    """
    if _LOOK.get() is not None:
        yield
        return
    outer, collects = _LOOK.set({}), gc.isenabled()
    try:  # a Ctrl-C that comes with the next line is no reason to leave the collector off
        gc.disable()
        yield
    finally:
        if collects:
            gc.enable()
        _LOOK.reset(outer)


def once_a_look(what: str, thing: object, find: Callable[[], _Found]) -> _Found:
    """What `find` gives of a thing, asked once while a look lasts; outside of one each time."""
    seen = _LOOK.get()
    if seen is None:
        return find()
    if (what, id(thing)) not in seen:
        seen[what, id(thing)] = thing, find()  # it is kept, so that no other gets its id
    found: _Found = seen[what, id(thing)][1]
    return found


def tree_of(model: nn.Module) -> ModuleTree:
    """The modules of a model as they are now."""
    return once_a_look("modules", model, lambda: _tree_now(model))


def _tree_now(model: nn.Module) -> ModuleTree:
    tree = _known_tree(model)
    if tree is not None:
        return tree
    found = _walk(model)
    modules, names, shape = found.modules, found.names, found.shape
    own = [*map(vars, modules)]
    if len(modules) >= _WORTH_KEEPING:
        with suppress(*PROBE_ERRORS):
            _OUTLINES[model] = _outline(found, own)
            tree = _known_tree(model)
    if tree is not None:
        return tree
    # A module that was never initialised has none of its dictionaries.
    whole = [one for one in own if one.keys() >= _HOLDERS]
    hooked = [one for one in whole if any(_HOOKS_OF(one))]
    tensors = [*_parameters_in(whole), *_buffers_in(whole)]
    return ModuleTree(modules, names, own, shape, {}, tensors, hooked, [*_rerouted_among(own)])


def _known_tree(model: nn.Module) -> ModuleTree | None:
    try:
        known = _OUTLINES.get(model)
        return None if known is None else known.tree()
    except (
        PROBE_ERRORS
    ):  # what is registered is no longer in a dict, or the class compares modules in its own way
        return None


class _Walk(NamedTuple):
    """The modules of a tree as they are come upon, and of each the names of those that are registered on it."""

    modules: list[nn.Module]
    names: list[str]
    shape: Shape
    registered: list[Sequence[str]]
    has_others: bool
    """Whether something is registered that is neither a module nor None."""


def _walk(model: nn.Module) -> _Walk:
    modules: list[nn.Module] = []
    names: list[str] = []
    parents: list[int] = []
    own_names: list[str] = []
    registered: list[Sequence[str]] = []
    seen: set[int] = set()
    has_repeats = has_others = False
    waiting = [("", model, -1, "")]
    while waiting:
        name, module, parent, own_name = waiting.pop()
        if id(module) in seen:
            has_repeats = True
            continue
        place = len(modules)
        seen.add(id(module))
        modules.append(module)
        names.append(name)
        parents.append(parent)
        own_names.append(own_name)
        held = vars(module).get("_modules")
        inner: Sequence[str] = ()
        if held and (type(held) is dict or isinstance(held, Mapping)):
            start = f"{name}." if name else ""
            idle = _idle_parts(module, held)
            inner = [own for own in held if own not in idle] if idle else [*held]
            for own in reversed(inner):
                child = held[own]
                if isinstance(child, nn.Module):
                    waiting.append((start + own, child, place, own))
                elif child is not None:
                    has_others = True
        registered.append(inner)
    return _Walk(modules, names, Shape(parents, own_names, has_repeats), registered, has_others)


def _idle_parts(module: nn.Module, held: Mapping[str, Any]) -> Collection[str]:
    """What an adapter's layer keeps that does nothing: dictionaries that are empty, or hold identities alone.

    PEFT fills one only for another adapter, which is also registered where those are that the layer has: so one of
    these must be a dictionary of modules. Else none is left out.
    """
    kind: Any = type(module)
    for part in map(held.get, _parts_of_adapters(kind)):
        if type(part) is nn.ModuleDict and part._modules:
            return [name for name, part in held.items() if type(part) in _DICTIONARIES and _is_idle(part)]
    return ()


@lru_cache(maxsize=1024)
def _parts_of_adapters(kind: type[nn.Module]) -> tuple[str, ...]:
    names = getattr(kind, OF_ADAPTERS, ())
    return names if isinstance(names, tuple) else ()


_DICTIONARIES: Final = frozenset({nn.ModuleDict, nn.ParameterDict})


def _is_idle(part: nn.Module) -> bool:
    own = vars(part)
    if own["_parameters"] or own["_buffers"]:
        return False
    inner = own["_modules"]
    return not inner or all(type(one) is nn.Identity and _is_bare(one) for one in inner.values())


def _is_bare(module: nn.Module) -> bool:
    """Whether it has no parameter and no buffer of its own."""
    own = vars(module)
    return not (own["_parameters"] or own["_buffers"])


def _outline(found: _Walk, own: Sequence[Mapping[str, Any]]) -> _Outline:
    """Fails where what is registered as a module is none, or modules are told apart in their own way."""
    plain: object = object.__hash__
    kinds = [*map(type, found.modules)]
    if found.has_others or any(kind.__hash__ is not plain for kind in {*kinds}):
        raise TypeError("what is registered is no module, or a class has a hash of its own")
    of_adapters = {kind for kind in {*kinds} if hasattr(kind, OF_ADAPTERS)}
    factors = _factors(kinds, found.shape.parents, of_adapters)
    pieces = (slice(start, start + _AT_ONCE) for start in range(0, len(own), _AT_ONCE))
    parts = [
        _part(
            found.modules[piece],
            kinds[piece],
            own[piece],
            found.registered[piece],
            factors[piece],
            of_adapters,
        )
        for piece in pieces
    ]
    return _Outline(parts, found.names, found.shape, {}, _Hooks(kinds))


def _factors(kinds: Sequence[type], parents: Sequence[int], of_adapters: Collection[type]) -> list[bool]:
    """Whether each module is in a dictionary of an adapter's layer: PEFT makes it, and nobody puts anything on it."""
    is_dictionary = [
        parent >= 0 and kind in _DICTIONARIES and kinds[parent] in of_adapters
        for kind, parent in zip(kinds, parents, strict=True)
    ]
    return [parent >= 0 and is_dictionary[parent] for parent in parents]


def _part(
    modules: Sequence[nn.Module],
    kinds: list[type],
    own: Sequence[Mapping[str, Any]],
    registered: Sequence[Sequence[str]],
    factors: Sequence[bool],
    of_adapters: Collection[type],
) -> _Part:
    held = [*map(_CHILDREN, own)]
    are_leaves = [
        kind in _LEAVES and not (one["_modules"] or one["_buffers"])
        for kind, one in zip(kinds, own, strict=True)
    ]
    may_have_children = [not is_leaf for is_leaf in are_leaves]
    children = [*compress(held, may_have_children)]
    to_children = [_getter(*names) for names in registered if names]
    may_have_weights = [
        kind not in _WITHOUT_WEIGHTS and not (kind in of_adapters and _is_bare(module))
        for kind, module in zip(kinds, modules, strict=True)
    ]
    return _Part(
        [*map(weakref.ref, modules)],
        kinds,
        [is_leaf and not is_factor for is_leaf, is_factor in zip(are_leaves, factors, strict=True)],
        may_have_children,
        [*map(len, children)],
        to_children,
        _child_hash(to_children, children),
        may_have_weights,
        [may and not is_leaf for may, is_leaf in zip(may_have_weights, are_leaves, strict=True)],
        [kind not in _NEVER_CALLED for kind in kinds],
    )


@lru_cache(maxsize=1024)
def _getter(*names: str) -> Callable[[Mapping[str, Any]], object]:
    return operator.itemgetter(*names)


def registered(module: nn.Module, holder: str) -> Mapping[str, object]:
    """What is registered on a module itself, past any `__getattr__` of its own."""
    held = vars(module).get(holder)
    # The first is asked first, since asking an abstract class takes long for thousands of modules.
    return held if type(held) is dict or isinstance(held, Mapping) else {}
