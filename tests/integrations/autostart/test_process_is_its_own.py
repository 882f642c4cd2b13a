"""Under a watch a program is as it is without: code, streams, traceback, signals, modules, environment."""

from pathlib import Path

import pytest
from tests.integrations.programs import plain, watched, write

SCRIPTS = {
    "ends": "print('done')",
    "exits with a number": "raise SystemExit(7)",
    "exits with a text": "import sys; sys.exit('no model')",
    "exits with nothing": "import sys; sys.exit()",
    "raises": "def f():\n    raise ValueError('NaN')\nf()\n",
    "raises from": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise OSError('x') from e\n",
    "is no Python": "print('a'\nx = = 2\n",
    "leaves at once": "import os; print('flushed', flush=True); os._exit(9)",
    "is terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "is interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n",
    "cannot import": "import no_such_module_anywhere",
    "says goodbye": "import atexit; atexit.register(print, 'goodbye'); print('last')",
    "writes to both": "import sys; print('out'); print('err', file=sys.stderr)",
    "has its own hook": "import sys; sys.excepthook = lambda *a: print('mine', a[0].__name__)\n1 / 0\n",
    "forks": "import os\npid = os.fork()\nif pid:\n    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\nelse:\n    raise SystemExit(5)\n",
    "spawns": (
        "import multiprocessing as mp\ndef double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n    with mp.get_context('spawn').Pool(1) as pool:\n        print(pool.map(double, [3]))\n"
    ),
    "starts a child": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import os, sys; print(sys.path, sorted(os.environ))'])",
    "looks at itself": (
        "import inspect, os, sys\nprint(__name__, __file__, __spec__ and __spec__.name, __package__, __builtins__, sorted(globals()))\n"
        "print(sys.argv, sys.path, sys.flags, sys.orig_argv, sys.excepthook is sys.__excepthook__)\n"
        "print(len(inspect.stack()), sorted(os.environ.items()), os.getcwd(), [type(f) for f in sys.path_hooks])\n"
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_as_it_is_without(name: str, tmp_path: Path) -> None:
    write(tmp_path, "folder/script.py", SCRIPTS[name])
    program = ["folder/script.py", "--steps", "4", "-o", "x", "--help"]
    alone, under = plain(program, tmp_path), watched(program, tmp_path)
    assert (under.code, under.out, under.err) == (alone.code, alone.out, alone.err)


def test_an_interrupted_script_dies_of_the_signal(tmp_path: Path) -> None:
    write(tmp_path, "script.py", SCRIPTS["is interrupted"])
    assert watched(["script.py"], tmp_path).code == -2


def test_a_module_is_as_it_is_without(tmp_path: Path) -> None:
    write(tmp_path, "package/__init__.py", "print('package')")
    write(tmp_path, "package/__main__.py", SCRIPTS["looks at itself"])
    program = ["-m", "package", "-v"]
    assert watched(program, tmp_path).out == plain(program, tmp_path).out


def test_a_folder_is_as_it_is_without(tmp_path: Path) -> None:
    write(tmp_path, "folder/__main__.py", "import sys, helper; print(sys.path[0], __name__)")
    write(tmp_path, "folder/helper.py", "print('helper')")
    assert watched(["folder"], tmp_path).out == plain(["folder"], tmp_path).out


@pytest.mark.parametrize("path", ["", "/somewhere", "/somewhere:/else", ":"])
def test_the_path_for_modules_is_as_it_is_without(path: str, tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import os, sys; print(sys.path, os.environ['PYTHONPATH'])")
    assert (
        watched(["script.py"], tmp_path, PYTHONPATH=path).out
        == plain(["script.py"], tmp_path, PYTHONPATH=path).out
    )


@pytest.mark.parametrize("code", ["import sys; sys.mine = 4", "1 / 0", "import no_such_module"])
def test_a_sitecustomize_of_the_environment_s_own_runs(code: str, tmp_path: Path) -> None:
    write(tmp_path, "site/sitecustomize.py", code)
    write(
        tmp_path, "script.py", "import sys; print(getattr(sys, 'mine', None), 'sitecustomize' in sys.modules)"
    )
    path = str(tmp_path / "site")
    alone = plain(["script.py"], tmp_path, PYTHONPATH=path)
    under = watched(["script.py"], tmp_path, PYTHONPATH=path)
    assert (under.out, under.err) == (alone.out, alone.err)


def test_nothing_heavy_is_loaded_before_the_script(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import sys; print('\\n'.join(sys.modules))")
    more = set(watched(["script.py"], tmp_path).out.split()) - set(plain(["script.py"], tmp_path).out.split())
    assert not more & {"torch", "numpy", "rich", "json", "logging", "dataclasses", "inspect", "subprocess"}


def test_a_script_without_anything_to_watch_is_told_so(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "print('done')")
    assert "there was nothing to watch" in watched(["script.py"], tmp_path).told
    assert list(tmp_path.glob("*.json")) == []
