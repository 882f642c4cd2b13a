"""The modules of a model in order: walked once, and again only after one was added, taken out or exchanged.

A watch asks a model for its modules at every call, and a U-Net with a LoRA has seven thousand. To see that they are
still the same takes a tenth of what walking them takes. Nothing is called on a module, and none is kept alive.
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
from typing import Any, Final, TypeVar

from torch import Tensor, nn

from sigmascope.probes.reading import PROBE_ERRORS, attribute

_Derived = TypeVar("_Derived")
_OWN: Final = operator.attrgetter("__dict__")
_CHILDREN: Final = operator.itemgetter("_modules")
_PARAMETERS: Final = operator.itemgetter("_parameters")
_BUFFERS: Final = operator.itemgetter("_buffers")
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
        modules: The model first, each once, in the order of their names.
        names: Dotted, of the same; "" for the model.
        own: What is in each one's `__dict__`.
        shape: Where each one is registered.
        derived: What was found out from the modules' places and classes alone; holds no module.
        parameters: Of each module that has some.
        with_buffers: What is in the `__dict__` of modules that have some.
    """

    modules: Sequence[nn.Module]
    names: list[str]
    own: Sequence[Mapping[str, Any]]
    shape: "Shape"
    derived: dict[object, Any]
    parameters: Sequence[Mapping[str, Tensor | None]]
    with_buffers: Sequence[Mapping[str, Any]]

    def derive(self, what: object, find: Callable[[], _Derived]) -> _Derived:
        """What `find` gives, which must hold no module (see `indices`), and depend on places and classes alone."""
        if what not in self.derived:
            self.derived[what] = find()
        found: _Derived = self.derived[what]
        return found

    def indices(self, modules: Iterable[nn.Module]) -> list[int]:
        """Where these modules are in `modules`."""
        places = self.derive(
            "indices by id", lambda: dict(zip(map(id, self.modules), range(len(self.modules)), strict=True))
        )
        return [*map(places.__getitem__, map(id, modules))]

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


_WITHOUT_WEIGHTS: Final = frozenset(
    {nn.ModuleDict, nn.ModuleList, nn.Sequential, nn.Identity, nn.Dropout, nn.SiLU}
)
"""Of these very classes no module reads a weight of its own, and two modules in five of a model with LoRAs are of them."""
_AT_ONCE: Final = 256
"""Modules: what is in them lies in the processor's cache from one question to the next."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What some modules of a tree were like, one after the other, without them."""

    references: list[Callable[[], nn.Module | None]]
    kinds: list[type]
    may_have_weights: list[bool]
    counts: list[int]
    child_names: list[str]
    child_ids: list[int]


@dataclass(frozen=True, slots=True)
class _Outline:
    """What a tree was like, without its modules: they are all there still if all references are alive."""

    parts: list[_Part]
    names: list[str]
    shape: Shape
    derived: dict[object, Any]

    def tree(self) -> ModuleTree | None:
        """The modules; None if the tree is another one now."""
        modules: list[Any] = []
        own: list[Any] = []
        parameters: list[Any] = []
        with_buffers: list[Any] = []
        for part in self.parts:
            some = [*map(operator.call, part.references)]
            if [*map(type, some)] != part.kinds:
                return None
            of_some = [*map(_OWN, some)]
            children = [*map(_CHILDREN, of_some)]
            if [*map(len, children)] != part.counts:
                return None
            full = [*filter(None, children)]
            # No two modules that are there have one id, and each is a part's own: an equal one is the same module.
            if [*map(id, chain.from_iterable(map(dict.values, full)))] != part.child_ids:
                return None
            if not all(map(operator.is_, chain.from_iterable(full), part.child_names)):
                return None
            modules += some
            own += of_some
            weighted = [*compress(of_some, part.may_have_weights)]
            parameters += filter(None, map(_PARAMETERS, weighted))
            with_buffers += compress(weighted, map(_BUFFERS, weighted))
        return ModuleTree(modules, self.names, own, self.shape, self.derived, parameters, with_buffers)


_OUTLINES: "weakref.WeakKeyDictionary[nn.Module, _Outline]" = weakref.WeakKeyDictionary()


_LOOK: "ContextVar[dict[int, ModuleTree] | None]" = ContextVar("trees of this look", default=None)


@contextmanager
def one_look() -> Iterator[None]:
    """A block in which nothing of the host's runs: each model's modules are compared once, and no garbage is collected.

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


def tree_of(model: nn.Module) -> ModuleTree:
    """The modules of a model as they are now."""
    seen = _LOOK.get()
    if seen is None:
        return _tree_now(model)
    if id(model) not in seen:
        seen[id(model)] = _tree_now(model)
    return seen[id(model)]


def _tree_now(model: nn.Module) -> ModuleTree:
    try:
        known = _OUTLINES.get(model)
        tree = None if known is None else known.tree()
    except (
        PROBE_ERRORS
    ):  # what is registered is no longer in a dict, or the class compares modules in its own way
        tree = None
    if tree is not None:
        return tree
    modules, names, shape = _walk(model)
    own = [*map(vars, modules)]
    weighted = [vars(module) for module in modules if type(module) not in _WITHOUT_WEIGHTS]
    parameters = [held for one in weighted if (held := one.get("_parameters"))]
    with_buffers = [one for one in weighted if one.get("_buffers")]
    tree = ModuleTree(modules, names, own, shape, {}, parameters, with_buffers)
    if len(modules) >= _WORTH_KEEPING:
        with suppress(*PROBE_ERRORS):
            _OUTLINES[model] = _outline(tree)
    return tree


def _walk(model: nn.Module) -> tuple[list[nn.Module], list[str], Shape]:
    modules: list[nn.Module] = []
    names: list[str] = []
    parents: list[int] = []
    own_names: list[str] = []
    seen: set[int] = set()
    has_repeats = False
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
        if held and (type(held) is dict or isinstance(held, Mapping)):
            start = f"{name}." if name else ""
            waiting += [
                (start + own, child, place, own)
                for own, child in reversed([*held.items()])
                if isinstance(child, nn.Module)
            ]
    return modules, names, Shape(parents, own_names, has_repeats)


def _outline(tree: ModuleTree) -> _Outline:
    """Fails where what is registered as a module is none."""
    known = {*map(id, tree.modules), id(None)}
    parts = [_part(tree.modules[start : start + _AT_ONCE]) for start in range(0, len(tree.modules), _AT_ONCE)]
    if not known.issuperset(chain.from_iterable(part.child_ids for part in parts)):
        raise TypeError("not all that is registered is a module")
    return _Outline(parts, tree.names, tree.shape, tree.derived)


def _part(modules: Sequence[nn.Module]) -> _Part:
    kinds = [*map(type, modules)]
    children = [*map(_CHILDREN, map(_OWN, modules))]
    return _Part(
        [*map(weakref.ref, modules)],
        kinds,
        [kind not in _WITHOUT_WEIGHTS for kind in kinds],
        [*map(len, children)],
        [*chain.from_iterable(children)],
        [*map(id, chain.from_iterable(map(dict.values, children)))],
    )


def registered(module: nn.Module, holder: str) -> Mapping[str, object]:
    """What is registered on a module itself, past any `__getattr__` of its own."""
    held = vars(module).get(holder)
    # The first is asked first, since asking an abstract class takes long for thousands of modules.
    return held if type(held) is dict or isinstance(held, Mapping) else {}
