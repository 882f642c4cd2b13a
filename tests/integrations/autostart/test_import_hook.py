import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch

from sigmascope.integrations.autostart import WatchedProcess
from sigmascope.integrations.imports import FINDER, Finder
from sigmascope.integrations.watch_settings import Settings


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Write a module that can be imported; its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(code: str) -> str:
        (tmp_path / "module_to_wait_for.py").write_text(code)
        importlib.invalidate_caches()
        return "module_to_wait_for"

    yield write
    sys.modules.pop("module_to_wait_for", None)


@pytest.fixture
def waiting() -> Iterator[tuple[Finder, list[str]]]:
    """A finder that waits for the module, and what it has seen of it when it acted."""
    seen: list[str] = []
    finder = Finder()
    end = finder.wait("module_to_wait_for", lambda: seen.append(sys.modules["module_to_wait_for"].VALUE))
    yield finder, seen
    end()
    assert finder not in sys.meta_path


def test_it_acts_when_the_module_has_run(
    module: Callable[[str], str], waiting: tuple[Finder, list[str]]
) -> None:
    importlib.import_module(module("VALUE = 'ready'"))
    assert waiting[1] == ["ready"]


def test_it_acts_once_and_is_gone(module: Callable[[str], str], waiting: tuple[Finder, list[str]]) -> None:
    found = importlib.import_module(module("VALUE = 'ready'"))
    importlib.reload(found)
    assert waiting[1] == ["ready"]
    assert waiting[0] not in sys.meta_path


def test_a_module_that_is_only_looked_for_is_not_waited_for_less(
    module: Callable[[str], str], waiting: tuple[Finder, list[str]]
) -> None:
    assert importlib.util.find_spec(module("VALUE = 'ready'")) is not None
    assert waiting[1] == []
    assert waiting[0] in sys.meta_path


def test_the_module_has_its_own_loader_before_its_code_runs(
    module: Callable[[str], str], waiting: tuple[Finder, list[str]]
) -> None:
    found = importlib.import_module(module("VALUE = (type(__loader__), type(__spec__.loader))"))
    assert all(issubclass(kind, SourceFileLoader) for kind in found.VALUE)


def test_a_module_that_raises_raises_the_same(
    module: Callable[[str], str], waiting: tuple[Finder, list[str]]
) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        importlib.import_module(module("1 / 0"))
    assert waiting[1] == []
    assert not [
        frame
        for frame in traceback.extract_tb(caught.tb)
        if frame.filename.endswith("integrations/autostart.py")
    ]


def test_a_module_that_replaces_itself_may(
    module: Callable[[str], str], waiting: tuple[Finder, list[str]]
) -> None:
    code = "import sys, types\nnew = types.ModuleType(__name__)\nnew.VALUE = 'replaced'\nsys.modules[__name__] = new\n"
    assert importlib.import_module(module(code)).VALUE == "replaced"
    assert waiting[1] == ["replaced"]


def test_other_modules_are_left_to_others(waiting: tuple[Finder, list[str]]) -> None:
    assert waiting[0].find_spec("json") is None


def test_a_module_that_nobody_finds_is_not_found(waiting: tuple[Finder, list[str]]) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("module_to_wait_for")


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_what_fails_while_it_begins_to_wait_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    finder, wanted = Finder(), []
    end = finder.wait("a_module_that_is_waited_for", lambda: None)

    def broken(*_: object) -> None:
        raise failure("planted")

    with monkeypatch.context() as patched:
        patched.setattr(Finder, "_be_first", broken)
        for begin in (lambda: finder.wait("another_module", lambda: wanted.append(1)), finder.time_imports):
            with pytest.raises(failure):
                begin()
    end()
    assert finder not in sys.meta_path
    assert finder._waiting == {}


@pytest.mark.parametrize("broken", ["time_imports", "wait"])
def test_a_watch_that_cannot_begin_to_wait_is_told_of_and_not_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    def raise_planted(*_: object) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    monkeypatch.setattr(Finder, broken, raise_planted)
    process = WatchedProcess(Settings())
    process.start()
    process._end()
    assert "nothing is watched: OutOfMemoryError: planted" in capsys.readouterr().err
    assert FINDER not in sys.meta_path
