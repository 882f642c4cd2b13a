"""Extractions that are killed, stopped or fail: what is left behind, and what the next run makes of it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.errors import ConfigError, SigmascopeError
from sigmascope.lora import layer_extraction
from sigmascope.lora.budget import Budget
from sigmascope.lora.decompose import decompose
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.ranks import FixedRank, MethodRank, RankRules
from sigmascope.lora.writer import LoraWriter

posix = pytest.mark.skipif(os.name == "nt", reason="fork and POSIX signals")

SHAPES: list[tuple[int, ...]] = [(48, 64), (16, 4, 3, 3), (64, 40), (4, 8, 3, 3), (40, 40), (200, 160)]
LAYERS = 30
FEW = 12
INPUTS = {"base.safetensors", "tuned.safetensors"}


Models = tuple[Path, Path]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two models that take a while to compare."""
    return write_models(tmp_path_factory.mktemp("many"), LAYERS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two models of a few layers."""
    return write_models(tmp_path_factory.mktemp("few"), FEW)


def write_models(folder: Path, layers: int) -> Models:
    generator = torch.Generator().manual_seed(0)

    def change(shape: tuple[int, ...], number: int) -> Tensor:
        rows, columns = shape[0], int(torch.Size(shape[1:]).numel())
        left = torch.randn(rows, 12, generator=generator) / torch.arange(1, 13) ** (number % 3)
        return (0.1 * left @ torch.randn(12, columns, generator=generator)).reshape(shape)

    base, tuned = {}, {}
    for number in range(layers):
        shape = SHAPES[number % len(SHAPES)]
        key = f"denoiser.down_blocks.{number}.attn1.to_q.weight"
        base[key] = torch.randn(shape, generator=generator)
        tuned[key] = base[key] + change(shape, number) + 0.01 * torch.randn(shape, generator=generator)
    save_file(base, folder / "base.safetensors")
    save_file(tuned, folder / "tuned.safetensors")
    return folder / "base.safetensors", folder / "tuned.safetensors"


# A process that has everything loaded and forks for each extraction: loading takes longer than extracting.
# Layers take a little longer there than they need, so that there are moments to be killed at.
SERVER = """
import faulthandler, json, os, sys, time
from sigmascope.lora import extract, layer_extraction
from sigmascope.lora.budget import Budget
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.ranks import MethodRank
from sigmascope.lora.ranks import RankRules
from sigmascope.lora.ranks import FixedRank

decompose, write = layer_extraction.decompose, extract.LoraWriter.write
calls = []

def slow_decompose(*rest, **more):
    calls.append(None)
    time.sleep(0.008)
    return decompose(*rest, **more)

def slow_write(self, layer, factors):
    time.sleep(job["write_seconds"])
    write(self, layer, factors)

def few_values(self, shapes, storage, *, has_statistics):
    return {layer: min(2, self._cap(shape)) for layer, shape in shapes.items()}

layer_extraction.decompose = slow_decompose
extract.LoraWriter.write = slow_write
Budget.first_guess = few_values

def tell(**facts):
    os.write(1, json.dumps(facts).encode() + b"\\n")  # in one piece, whenever the process is killed

tell(ready=True)
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        faulthandler.dump_traceback_later(120, exit=True)  # one that hangs says where
        try:
            extract_lora(*job["paths"], eval(job["options"]), progress=lambda done, *_: tell(done=done))
            tell(decomposed=len(calls))
            code = 0
        finally:
            os._exit(code)
    tell(pid=child)
    tell(code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@dataclass
class Server:
    """Extractions in processes of their own."""

    models: Models
    target: Path
    requests: IO[str]
    answers: IO[str]

    def start(self, options: str, *, write_seconds: float = 0.0) -> int:
        paths = [str(path) for path in (*self.models, self.target)]
        self.requests.write(
            json.dumps({"paths": paths, "options": options, "write_seconds": write_seconds}) + "\n"
        )
        self.requests.flush()
        return int(self._next("pid"))

    def run(self, options: str) -> int:
        """Let it finish, and give the number of decompositions."""
        self.start(options)
        decomposed = int(self._next("decomposed"))
        assert self._next("code") == 0
        return decomposed

    def stop(self, process: int, number: signal.Signals) -> int:
        """Send the signal, and give the exit status: 0 where it had finished before."""
        os.kill(process, number)
        return int(self._next("code"))

    def wait_for(self, done: int) -> None:
        while self._next("done") < done:
            pass

    def _next(self, name: str) -> Any:
        for line in self.answers:
            facts = json.loads(line)
            if name in facts:
                return facts[name]
            assert not facts.get("code"), f"the extraction ended with {facts['code']} and without {name}"
        raise AssertionError(f"the server ended without {name}")


@pytest.fixture(scope="module")
def serving() -> Iterator[tuple[IO[str], IO[str]]]:
    command = [sys.executable, "-c", SERVER]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"ready": True}
        yield process.stdin, process.stdout
        process.stdin.close()


@pytest.fixture
def server(serving: tuple[IO[str], IO[str]], many: Models, tmp_path: Path) -> Server:
    return Server(many, tmp_path / "lora.safetensors", *serving)


def files(target: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in target.parent.iterdir()}


JOBS = {
    "fixed rank": "ExtractOptions(rank=8, conv_rank=4)",
    "whole layers": "ExtractOptions(rank=40, conv_rank=9999, save_precision='float')",
    "a method": "ExtractOptions(rules=RankRules(MethodRank('energy', 0.8), excluded=('blocks.7.',)))",
    "a budget of several rounds": "ExtractOptions(budget=Budget(max_bytes=64_000), format='kohya')",
}


@posix
@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.slow
def test_killed_at_any_moment_the_next_run_gives_the_same_bytes(server: Server, kind: str) -> None:
    options, moments = JOBS[kind], random.Random(kind)
    begun = time.perf_counter()
    server.run(options)
    seconds = time.perf_counter() - begun
    expected = files(server.target)
    assert expected.keys() == {"lora.safetensors", "lora_config.yaml"}
    killed = 0
    while killed < 5:
        for path in server.target.parent.iterdir():
            path.unlink()
        process = server.start(options)
        time.sleep(moments.uniform(0.0, 0.95) * seconds)
        try:
            killed += server.stop(process, signal.SIGKILL) == -signal.SIGKILL
        except ProcessLookupError:  # it had finished, and its status is what the next answer tells
            continue
        server.run(options)
        assert files(server.target) == expected


@posix
@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_comes_to_the_same_end(server: Server) -> None:
    options = JOBS["a budget of several rounds"]
    whole = server.run(options)
    expected = files(server.target)
    for path in server.target.parent.iterdir():
        path.unlink()
    for done in (5, 17, LAYERS - 1, LAYERS + 2):  # the last two on either side of the second round's begin
        process = server.start(options)
        server.wait_for(done)
        assert server.stop(process, signal.SIGKILL) == -signal.SIGKILL
    assert server.run(options) < whole - LAYERS + 2
    assert files(server.target) == expected


@posix
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.slow
def test_killed_while_the_file_is_written_nothing_is_lost(server: Server, earlier: bool) -> None:
    options = JOBS["fixed rank"]
    server.run(options)
    expected = files(server.target)
    if earlier:
        server.run("ExtractOptions(rank=2)")
    else:
        server.target.unlink()
    before = server.target.read_bytes() if earlier else None
    process = server.start(options, write_seconds=0.01)
    server.wait_for(LAYERS)
    time.sleep(0.15)
    assert server.stop(process, signal.SIGKILL) == -signal.SIGKILL
    assert (server.target.read_bytes() if earlier else None) == before
    assert server.run(options) == 0
    assert files(server.target) == expected


@posix
@pytest.mark.parametrize(("done", "write_seconds"), [(1, 0.0), (LAYERS, 0.02)])
@pytest.mark.slow
def test_ctrl_c_leaves_what_was_there(server: Server, done: int, write_seconds: float) -> None:
    server.run("ExtractOptions(rank=2)")
    before = files(server.target)
    process = server.start(JOBS["fixed rank"], write_seconds=write_seconds)
    server.wait_for(done)
    assert server.stop(process, signal.SIGINT) == 1
    assert files(server.target) == before


# In this process


def journal_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that were decomposed."""
    shapes: list[tuple[int, ...]] = []

    def counted(delta: Tensor, *rest: Any, **more: Any) -> Any:
        shapes.append(tuple(delta.shape))
        return decompose(delta, *rest, **more)

    monkeypatch.setattr(layer_extraction, "decompose", counted)
    return shapes


@pytest.fixture
def own_models(models: Models, tmp_path: Path) -> Models:
    (tmp_path / "models").mkdir()
    paths = tmp_path / "models" / "base.safetensors", tmp_path / "models" / "tuned.safetensors"
    for path, source in zip(paths, models, strict=True):
        path.write_bytes(source.read_bytes())
    return paths


OPTIONS = {"rank": 8, "conv_rank": 4}


def leave_journal(models: Models, target: Path, after: int, **options: Any) -> None:
    """Leave beside the target what a run that is killed after so many layers leaves."""
    kept = b""

    def progress(done: int, total: int, what: str) -> None:
        nonlocal kept
        if done == after:
            kept = journal_of(target).read_bytes()

    extract_lora(*models, target, ExtractOptions(**options), progress=progress)
    for path in target.parent.glob("lora*"):
        path.unlink()
    journal_of(target).write_bytes(kept)


def touch(models: Models) -> Models:
    os.utime(models[1], (1, 1))
    return models


def move(models: Models) -> Models:
    moved = models[0].with_name("moved.safetensors")
    models[0].rename(moved)
    return moved, models[1]


def swap(models: Models) -> Models:
    return models[1], models[0]


OTHER_JOBS: dict[str, tuple[dict[str, Any], Callable[[Models], Models]]] = {
    "another rank": ({"rank": 9}, lambda models: models),
    "another rank of convolutions": ({"conv_rank": 3}, lambda models: models),
    "another precision": ({"save_precision": "bf16"}, lambda models: models),
    "another least change": ({"min_diff": 1e-6}, lambda models: models),
    "another coverage": ({"target_coverage": "attention"}, lambda models: models),
    "an excluded layer": (
        {"rules": RankRules(FixedRank(8, 4), excluded=("blocks.3.",))},
        lambda models: models,
    ),
    "one rank set": (
        {"rules": RankRules(FixedRank(8, 4), overrides=(("blocks.3.", FixedRank(2, 2)),))},
        lambda models: models,
    ),
    "a method": ({"rules": RankRules(MethodRank("energy", 0.9))}, lambda models: models),
    "a budget": ({"budget": Budget(max_bytes=90_000)}, lambda models: models),
    "a tuned model touched since": ({}, touch),
    "a base that was moved": ({}, move),
    "the models the other way round": ({}, swap),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", OTHER_JOBS)
def test_what_another_job_left_is_not_used(own_models: Models, tmp_path: Path, change: str) -> None:
    options, edit = OTHER_JOBS[change]
    target = tmp_path / "lora.safetensors"
    leave_journal(own_models, target, 6, **OPTIONS)
    models, told = edit(own_models), list[int]()
    extract_lora(
        *models, target, ExtractOptions(**OPTIONS | options), progress=lambda done, *_: told.append(done)
    )
    assert told[:FEW] == list(range(1, FEW + 1))


@pytest.mark.parametrize("options", [{"workers": 5}, {"format": "kohya"}, {"biases_and_norms": True}])
def test_what_the_same_job_left_is_used_whatever_does_not_touch_the_factors(
    models: Models, tmp_path: Path, decomposed: list[Any], options: dict[str, Any]
) -> None:
    target = tmp_path / "lora.safetensors"
    leave_journal(models, target, 6, **OPTIONS)
    decomposed.clear()
    extract_lora(*models, target, ExtractOptions(**OPTIONS | options))
    assert len(decomposed) <= FEW - 6  # two layers are kept whole, which takes no decomposition
    resumed = target.read_bytes()
    extract_lora(*models, target, ExtractOptions(**OPTIONS | options))
    assert target.read_bytes() == resumed


@pytest.mark.parametrize("change", [{"format": "kohya"}, {"biases_and_norms": True}])
def test_a_budget_is_begun_anew_for_a_file_that_holds_something_else(
    models: Models, tmp_path: Path, decomposed: list[Any], change: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"budget": Budget(max_bytes=90_000)}
    target = tmp_path / "lora.safetensors"
    leave_journal(models, target, 6, **options)
    decomposed.clear()
    extract_lora(*models, target, ExtractOptions(**options | change))
    assert len(decomposed) >= FEW
    resumed = target.read_bytes()
    extract_lora(*models, target, ExtractOptions(**options | change))
    assert target.read_bytes() == resumed


@pytest.mark.parametrize("after", [FEW - 1, FEW + 1])  # on either side of the second round's begin
def test_any_round_of_a_budget_goes_on_where_it_was(
    models: Models, tmp_path: Path, decomposed: list[Any], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    def few(self: Budget, shapes: Any, storage: Any, *, has_statistics: bool) -> dict[str, int]:
        return {layer: min(2, self._cap(shape)) for layer, shape in shapes.items()}

    monkeypatch.setattr(Budget, "first_guess", few)
    options: dict[str, Any] = {"budget": Budget(max_error=0.2)}
    target = tmp_path / "lora.safetensors"
    extract_lora(*models, target, ExtractOptions(**options))
    expected, whole = target.read_bytes(), len(decomposed)
    assert whole > FEW + 6  # some layers twice or more often
    leave_journal(models, target, after, **options)
    decomposed.clear()
    extract_lora(*models, target, ExtractOptions(**options))
    assert len(decomposed) <= whole - after  # more may have been finished while it was stopped
    assert target.read_bytes() == expected


@pytest.mark.parametrize("kind", JOBS)
def test_the_bytes_do_not_depend_on_the_number_of_workers(models: Models, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "lora.safetensors"
    before = torch.get_num_threads()
    found = set()
    try:
        for workers, threads in ((1, 1), (2, 2), (5, 1)):
            torch.set_num_threads(threads)
            options = eval(JOBS[kind].replace("ExtractOptions(", f"ExtractOptions(workers={workers}, "))
            extract_lora(*models, target, options)
            found.add((target.read_bytes(), target.with_name("lora_config.yaml").read_bytes()))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@pytest.mark.parametrize(
    "error",
    [SigmascopeError("it does not converge."), RuntimeError("it broke"), KeyboardInterrupt("Ctrl-C")],
)
@pytest.mark.parametrize("earlier", [False, True])
def test_an_error_in_a_layer_leaves_what_was_there(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool, error: BaseException
) -> None:
    target = tmp_path / "lora.safetensors"
    if earlier:
        extract_lora(*models, target, ExtractOptions(rank=2))
    before = files(target)
    calls = list[None]()

    def failing(*rest: Any, **more: Any) -> Any:
        calls.append(None)
        if len(calls) == 5:
            raise error
        return decompose(*rest, **more)

    monkeypatch.setattr(layer_extraction, "decompose", failing)
    with pytest.raises(type(error), match=str(error)) as caught:
        extract_lora(*models, target, ExtractOptions(rank=4))
    assert files(target) == before
    if isinstance(caught.value, SigmascopeError):
        assert "denoiser.down_blocks." in caught.value.message


def test_an_error_while_the_file_is_written_leaves_what_was_there(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "lora.safetensors"
    extract_lora(*models, target, ExtractOptions(rank=2))
    before = files(target)
    write, written = LoraWriter.write, list[str]()

    def failing(self: Any, layer: str, factors: Any) -> None:
        written.append(layer)
        if len(written) == 8:
            raise ConfigError("no more.")
        write(self, layer, factors)

    monkeypatch.setattr(LoraWriter, "write", failing)
    with pytest.raises(ConfigError, match="no more"):
        extract_lora(*models, target, ExtractOptions(rank=4))
    assert files(target) == before


def test_the_earlier_lora_is_in_place_until_the_new_one_is_whole(models: Models, tmp_path: Path) -> None:
    target = tmp_path / "lora.safetensors"
    extract_lora(*models, target, ExtractOptions(rank=2))
    before = target.read_bytes()
    seen = []
    extract_lora(
        *models,
        target,
        ExtractOptions(rank=4),
        progress=lambda *_: seen.append(target.read_bytes() == before),
    )
    assert seen == [True] * FEW
    assert target.read_bytes() != before
