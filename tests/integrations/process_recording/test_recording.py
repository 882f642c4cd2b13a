"""A program with stages of its own, under a watch: it ends as it does without, and its record is kept."""

import os
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen
from textwrap import indent

import pytest
from tests.integrations.programs import Ended, environment, plain, watched, write

import sigmascope
from sigmascope.integrations.launch import environment_for
from sigmascope.integrations.process_recording import program, record_path, unhandled
from sigmascope.integrations.watch_settings import Settings

pytestmark = pytest.mark.slow

STAGES = """
import sigmascope
with sigmascope.stage("denoising") as stage:
    for _ in range(3):
        with sigmascope.step():
            pass
    stage.fact("prompt", "a portrait of me")
"""
WITHOUT = """
class stage:
    def __init__(self, name): pass
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def fact(self, name, value): pass
step = lambda: stage("")
"""
"""What stands for the package where a program runs as it would without: names that do nothing, and load no PyTorch."""
ENDS = {
    "ends": "print('done')",
    "exits": "raise SystemExit(4)",
    "raises": "raise ValueError('NaN')",
    "is interrupted": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n",
    "forks": "import os\npid = os.fork()\nif pid:\n    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\nelse:\n    raise SystemExit(6)\n",
    "leaves at once": "import os; os._exit(8)",
    "raises in a stage": "with sigmascope.stage('latent_decoding'):\n    raise ValueError('NaN')\n",
    "closes its streams": "import sys; sys.stdout.close(); sys.stderr.close()",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def under_watch(folder: Path) -> dict[str, Ended]:
    """Every program once, each with a record named after it."""
    settings = Settings(quiet="1", launched="1")
    done = {}
    for name, end in ENDS.items():
        write(folder, f"{name}.py", STAGES + end)
        done[name] = watched([f"{name}.py"], folder, settings._replace(output=f"{name}.json"))
    return done


@pytest.mark.parametrize("name", ENDS)
def test_a_program_ends_as_it_does_without(name: str, folder: Path, under_watch: dict[str, Ended]) -> None:
    write(folder, "without/sigmascope.py", WITHOUT)
    alone, under = plain([f"{name}.py"], folder, PYTHONPATH=str(folder / "without")), under_watch[name]
    assert (under.code, under.out, under.err) == (alone.code, alone.out, alone.err)


@pytest.mark.parametrize("name", [name for name in ENDS if name != "leaves at once"])
def test_its_steps_are_recorded(name: str, folder: Path, under_watch: dict[str, Ended]) -> None:
    run = sigmascope.load_run(folder / f"{name}.json")
    assert len(run.stage("denoising").steps) == 3


@pytest.mark.parametrize(
    ("name", "complete"),
    [("ends", True), ("exits", True), ("forks", True), ("raises", False), ("is interrupted", False)],
)
def test_a_record_is_complete_unless_an_exception_ended_the_program(
    name: str, complete: bool, folder: Path, under_watch: dict[str, Ended]
) -> None:
    assert sigmascope.load_run(folder / f"{name}.json").complete is complete


def test_a_stage_that_failed_says_so(folder: Path, under_watch: dict[str, Ended]) -> None:
    stage = sigmascope.load_run(folder / "raises in a stage.json").stage("latent_decoding")
    assert stage.error == "ValueError: NaN"


def test_what_was_known_of_a_program_that_is_killed_is_kept(tmp_path: Path) -> None:
    soon = "from sigmascope.integrations.process_recording import PeriodicSaver\nPeriodicSaver.__init__.__defaults__ = (0.05,)\n"
    killed = (
        "import os, signal, time\nwith sigmascope.stage('latent_decoding'):\n"
        "    while 'latent_decoding' not in (open('run.json').read() if os.path.exists('run.json') else ''):\n"
        "        time.sleep(0.05)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    write(tmp_path, "script.py", soon + STAGES + killed)
    done = watched(["script.py"], tmp_path, Settings(output="run.json", quiet="1"))
    run = sigmascope.load_run(tmp_path / "run.json")
    assert done.code == -9
    assert [stage.name for stage in run.stages] == ["denoising", "latent_decoding"]
    assert not run.complete


def test_the_run_is_called_as_the_script(folder: Path, under_watch: dict[str, Ended]) -> None:
    assert sigmascope.load_run(folder / "ends.json").name == "ends"


def test_a_forked_child_tells_nothing(folder: Path, under_watch: dict[str, Ended]) -> None:
    assert under_watch["forks"].told.count("the record is in") == 1


FORKS_FIRST = """
import os
child = os.fork()
if child:
    os.waitpid(child, 0)
"""
POOL = """
import multiprocessing
def work(number):
    import sigmascope
    with sigmascope.stage(f"denoising {number}"):
        pass
child = multiprocessing.get_context("fork").Process(target=work, args=(1,))
child.start()
child.join()
"""


@pytest.mark.parametrize(("script", "stages"), [(FORKS_FIRST + STAGES, 2), (POOL, 1)])
def test_children_that_were_forked_before_have_records_of_their_own(
    script: str, stages: int, tmp_path: Path
) -> None:
    write(tmp_path, "script.py", script)
    done = watched(["script.py"], tmp_path, Settings(output="run.json", quiet="1", launched="1"))
    runs = [sigmascope.load_run(path) for path in tmp_path.glob("run*.json")]
    assert (done.code, done.err, len(runs)) == (0, "", stages)
    assert all(run.complete and run.stages[0].name.startswith("denoising") for run in runs)


def test_the_summary_goes_to_stderr_after_what_the_program_wrote(tmp_path: Path) -> None:
    write(tmp_path, "script.py", STAGES + "import sys; print('out'); print('err', file=sys.stderr)")
    done = watched(["script.py"], tmp_path, Settings(launched="1"))
    assert done.out == "out\n"
    assert done.err.startswith("err\n")
    assert "Run: script" in done.err
    assert "denoising" in done.err


def test_a_record_and_a_trace_that_cannot_be_written_change_nothing(tmp_path: Path) -> None:
    write(tmp_path, "script.py", STAGES + "raise SystemExit(4)")
    nowhere = Settings(output="script.py/run.json", trace="script.py/trace.json", quiet="1")
    done = watched(["script.py"], tmp_path, nowhere)
    assert (done.code, done.err) == (4, "")
    assert "the record was not written" in done.told
    assert "the trace was not written" in done.told


def test_a_program_that_changes_its_folder_leaves_the_record_where_it_began(tmp_path: Path) -> None:
    write(tmp_path, "script.py", STAGES + "import os; os.chdir('/')")
    watched(["script.py"], tmp_path, Settings(output="run.json", trace="trace.json", quiet="1"))
    assert (tmp_path / "run.json").is_file()
    assert (tmp_path / "trace.json").is_file()


def test_a_setting_that_makes_no_sense_is_told_and_the_program_runs(tmp_path: Path) -> None:
    write(tmp_path, "script.py", STAGES + "print('done')")
    done = watched(["script.py"], tmp_path, Settings(sample_hz="often"))
    assert (done.code, done.out) == (0, "done\n")
    assert "nothing is watched: SIGMASCOPE_SAMPLE_HZ=often is not a number above 0" in done.told


def test_an_exception_that_a_console_showed_did_not_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt) as shown:
        raise KeyboardInterrupt
    monkeypatch.setattr(sys, "last_value", shown.value, raising=False)
    assert unhandled() is None


def test_a_program_that_goes_on_in_a_console_ends_as_it_does_without(tmp_path: Path) -> None:
    interrupted = "compile('raise KeyboardInterrupt', '<console>', 'exec')"
    console = f"import code\ncode.InteractiveConsole().runcode({interrupted})\nprint('after')\n"
    write(tmp_path, "script.py", STAGES + console)
    done = watched(["script.py"], tmp_path, Settings(output="run.json", quiet="1"))
    assert (done.code, done.out) == (0, "after\n")
    assert sigmascope.load_run(tmp_path / "run.json").complete


def test_a_folder_gets_a_file_of_its_own_for_each_process(tmp_path: Path) -> None:
    path = record_path(".", str(tmp_path))
    assert path.parent == tmp_path
    assert path.name.startswith(f"sigmascope-{program()}-")
    assert path.name.endswith(f"-{os.getpid()}.json")


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    assert record_path("run.json", str(tmp_path)) == tmp_path / "run.json"


def test_the_ranks_of_a_launch_write_no_record_over_another(folder: Path) -> None:
    """As `accelerate launch -m sigmascope watch --output run.json script.py` starts them."""
    write(folder, "ranks.py", STAGES)
    settings = Settings(quiet="1", launched="1", output="ranks.json")
    for rank in ("0", "1"):
        watched(["ranks.py"], folder, settings, RANK=rank, WORLD_SIZE="2")
    kept = [sigmascope.load_run(folder / f"ranks-rank{rank}.json") for rank in (0, 1)]
    assert [run.facts["group"]["rank"] for run in kept] == [0, 1]
    assert not (folder / "ranks.json").exists()


def test_a_launcher_whose_child_does_the_work_is_told_how_that_is_watched(folder: Path) -> None:
    """As `accelerate launch` is one: the command does not watch child processes."""
    busy = "import time\nwhile time.process_time() < 1.2: pass\n"
    write(folder, "busy.py", busy)
    launcher = "import subprocess, sys\nsubprocess.run([sys.executable, 'busy.py'])\n"
    for name, start in (("plain", ""), ("torch", "import torch\n")):
        write(folder, f"{name}_launcher.py", start + launcher)
        told = watched([f"{name}_launcher.py"], folder).told
        assert "there was nothing to watch" in told
        assert (
            "are not watched. Start the watch in them (accelerate launch -m sigmascope watch script.py)"
            in told
        )


def test_a_process_that_was_stopped_knows_for_how_long(folder: Path) -> None:
    """SIGSTOP, as Ctrl-Z and a paused container: the record tells it from work and from waiting."""
    busy = "ends = time.process_time() + 1\nwhile time.process_time() < ends: sum(range(1000))\n"
    text = f"import sigmascope, time\nwith sigmascope.stage('denoising'):\n    print('begun', flush=True)\n{indent(busy, '    ')}"
    write(folder, "stopped.py", text)
    told = environment_for(environment(), Settings(quiet="1", launched="1", output="stopped.json"))
    program = Popen([sys.executable, "stopped.py"], cwd=folder, env=told, stdout=PIPE, stderr=PIPE, text=True)
    assert program.stdout is not None
    assert program.stdout.readline() == "begun\n"
    time.sleep(0.3)
    program.send_signal(signal.SIGSTOP)
    time.sleep(1.6)
    program.send_signal(signal.SIGCONT)
    program.communicate(timeout=60)
    [stage] = sigmascope.load_run(folder / "stopped.json").stages
    assert stage.facts["processor"]["stopped_seconds"] > 1.0
