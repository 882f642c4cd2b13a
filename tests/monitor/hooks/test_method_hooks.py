import inspect
import traceback
from typing import Any

import pytest
import torch
from torch import nn

from sigmascope.monitor import hooks
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.hooks import After, HookSet, Listener, MethodHook, listen


class Host:
    kept = 3

    def work(self, number: int, *, more: int = 0) -> int:
        """Add."""
        if number < 0:
            raise ValueError(number)
        return number + more

    @classmethod
    def make(cls, name: str) -> str:
        return f"{cls.__name__} {name}"

    @staticmethod
    def double(number: int) -> int:
        return 2 * number


def listening(heard: list[Any]) -> Listener:
    def before(target: object, args: Any, kwargs: Any) -> After:
        heard.append((target, args, kwargs))
        return lambda result, error: heard.append((result, error))

    return Listener(before, heard.append)


def test_arguments_and_result_are_heard_and_unchanged() -> None:
    heard: list[Any] = []
    host = Host()
    forget = listen(Host, "work", listening(heard))
    assert host.work(1, more=2) == 3
    forget()
    assert heard == [(host, (1,), {"more": 2}), (3, None)]


def test_an_exception_is_heard_and_passes() -> None:
    heard: list[Any] = []
    forget = listen(Host, "work", listening(heard))
    with pytest.raises(ValueError, match="-1") as caught:
        Host().work(-1)
    forget()
    assert heard[-1] == (None, caught.value)


def frames_of(error: BaseException) -> list[str]:
    """Without those of the type checker that the tests run our functions under."""
    frames = traceback.extract_tb(error.__traceback__)
    return [
        frame.name
        for frame in frames
        if "jaxtyping" not in frame.filename and "beartype" not in frame.filename
    ]


@pytest.mark.parametrize("listeners", [1, 2])
def test_a_traceback_has_the_hosts_frames_alone(listeners: int) -> None:
    forgets = [listen(Host, "work", listening([])) for _ in range(listeners)]
    with pytest.raises(ValueError, match="-1") as caught:
        Host().work(-1)
    for forget in forgets:
        forget()
    here = "test_a_traceback_has_the_hosts_frames_alone"
    assert frames_of(caught.value) == [here, "work"]
    assert (caught.value.args, caught.value.__context__, caught.value.__cause__) == ((-1,), None, None)


def test_wrong_arguments_fail_where_the_host_called() -> None:
    with pytest.raises(TypeError) as unheard:
        Host().work()  # type: ignore[call-arg]
    forget = listen(Host, "work", listening([]))
    with pytest.raises(TypeError) as heard:
        Host().work()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="self"):
        Host.work()  # type: ignore[call-arg]
    forget()
    assert str(heard.value) == str(unheard.value)
    assert frames_of(heard.value) == ["test_wrong_arguments_fail_where_the_host_called"]


def test_a_traceback_through_an_attribute_of_one_object_is_the_hosts() -> None:
    host = Host()
    host.own = host.work  # type: ignore[attr-defined]
    forget = listen(host, "own", listening([]))
    with pytest.raises(ValueError, match="-1") as caught:
        host.own(-1)  # type: ignore[attr-defined]
    forget()
    assert frames_of(caught.value)[1:] == ["work"]


def test_what_was_raised_from_something_stays_so() -> None:
    cause = KeyError("why")

    def failing(_self: Host, _number: int) -> int:
        raise ValueError("no") from cause

    before = Host.work
    Host.work = failing  # type: ignore[assignment, method-assign]
    forget = listen(Host, "work", listening([]))
    with pytest.raises(ValueError, match="no") as caught:
        Host().work(1)
    forget()
    Host.work = before  # type: ignore[method-assign]
    assert caught.value.__cause__ is cause
    assert frames_of(caught.value)[1:] == ["failing"]


@pytest.mark.parametrize(("name", "argument", "result"), [("make", "x", "Host x"), ("double", 4, 8)])
def test_class_and_static_methods_are_heard(name: str, argument: Any, result: Any) -> None:
    heard: list[Any] = []
    before = vars(Host)[name]
    forget = listen(Host, name, listening(heard))
    assert getattr(Host, name)(argument) == result
    assert getattr(Host(), name)(argument) == result
    forget()
    assert [one[1] for one in heard[::2]] == [(argument,)] * 2
    assert vars(Host)[name] is before


def test_the_method_looks_as_before_while_it_is_heard() -> None:
    signature = inspect.signature(Host.work)
    forget = listen(Host, "work", listening([]))
    assert inspect.signature(Host.work) == signature
    assert inspect.getfullargspec(Host.work).kwonlyargs == ["more"]
    assert (Host.work.__name__, Host.work.__doc__) == ("work", "Add.")
    forget()


def test_a_listener_that_fails_is_told_and_the_other_goes_on() -> None:
    def broken(_target: object, _args: Any, _kwargs: Any) -> After:
        raise RuntimeError("before")

    failures: list[Exception] = []
    heard: list[Any] = []
    first = listen(Host, "work", Listener(broken, failures.append))
    second = listen(Host, "work", listening(heard))
    assert Host().work(5) == 5
    first()
    second()
    assert [str(one) for one in failures] == ["before"]
    assert heard[-1] == (5, None)


@pytest.mark.parametrize("gives_way", [True, False])
def test_who_gives_way_hears_what_the_other_does_not_take(gives_way: bool) -> None:
    heard: list[int] = []

    def take_odd(_target: object, args: Any, _kwargs: Any) -> After | None:
        return (lambda _result, _error: None) if args[0] % 2 else None

    first, second = HookSet(Guard(), "first"), HookSet(Guard(), "second")
    second.gives_way_to = first if gives_way else HookSet(Guard(), "third")
    first.hook_attribute(Host, "work", take_odd)
    second.hook_attribute(Host, "work", lambda _target, args, _kwargs: heard.append(args[0]))
    assert [Host().work(number) for number in (1, 2, 3)] == [1, 2, 3]
    first.detach()
    assert Host().work(5) == 5
    second.detach()
    assert heard == ([2, 5] if gives_way else [1, 2, 3, 5])


def test_several_are_told_of_what_a_call_gave_the_last_first() -> None:
    told: list[tuple[int, object]] = []
    failures: list[Exception] = []

    def hear(number: int) -> Listener:
        return Listener(lambda *_: lambda result, _error: told.append((number, result)), failures.append)

    forget = [listen(Host, "work", hear(number)) for number in range(3)]
    assert Host().work(4) == 4
    for one in forget:
        one()
    assert (told, failures) == ([(2, 4), (1, 4), (0, 4)], [])


def test_the_last_of_several_listeners_takes_the_tap_off() -> None:
    before = vars(Host)["work"]
    first, second = listen(Host, "work", listening([])), listen(Host, "work", listening([]))
    first()
    assert vars(Host)["work"] is not before
    second()
    assert vars(Host)["work"] is before


def test_what_somebody_else_put_in_our_place_stays() -> None:
    before = vars(Host)["work"]
    heard: list[Any] = []
    forget = listen(Host, "work", listening(heard))
    ours = vars(Host)["work"]

    def theirs(self: Host, number: int) -> int:
        return int(ours(self, number)) + 1

    Host.work = theirs  # type: ignore[assignment, method-assign]
    forget()
    assert vars(Host)["work"] is theirs
    assert Host().work(1) == 2
    assert heard == []
    Host.work = before  # type: ignore[method-assign]


def test_an_attribute_of_one_object_is_heard_on_it_alone() -> None:
    heard: list[Any] = []
    host, other = Host(), Host()
    for one in (host, other):
        one.own = lambda: 7  # type: ignore[attr-defined]
    before = vars(host)["own"]
    forget = listen(host, "own", listening(heard))
    assert host.own() == other.own() == 7  # type: ignore[attr-defined]
    assert len(heard) == 2
    forget()
    assert vars(host)["own"] is before


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="kept is a int"):
        listen(Host, "kept", listening([]))


def test_nothing_stays_on_a_class_when_our_own_bookkeeping_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(Host))
    real = MethodHook.put_on
    calls = []

    def fail_once(hook: MethodHook, *args: Any) -> None:
        real(hook, *args)
        calls.append(hook)
        if len(calls) == 1:
            raise ZeroDivisionError

    monkeypatch.setattr(MethodHook, "put_on", fail_once)
    with pytest.raises(ZeroDivisionError):
        listen(Host, "work", listening([]))
    assert dict(vars(Host)) == before


def test_a_tap_that_cannot_be_remembered_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(Host))

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(hooks, "reference_to", fail)
    with pytest.raises(ZeroDivisionError):
        HookSet(Guard(), "test").hook_attribute(Host, "work", lambda *_: None)
    assert dict(vars(Host)) == before


class _Base(nn.Linear):
    """A class of modules of which another is made."""


class _Derived(_Base):
    """Has its call from the other."""


@pytest.mark.parametrize("first", [0, 1])
def test_modules_of_a_class_and_its_base_are_heard_once_each_and_the_classes_are_as_before(
    first: int,
) -> None:
    modules = [_Base(2, 2), _Derived(2, 2)]
    heard: list[object] = []
    hooks_ = HookSet(Guard(), "test")
    for module in (modules[first], modules[1 - first]):
        hooks_.hook_calls(module, lambda target, *_: heard.append(target))
    for module in (*modules, _Derived(2, 2)):
        module(torch.zeros(2))
    assert heard == modules
    hooks_.detach()
    assert "__call__" not in vars(_Base) | vars(_Derived)
