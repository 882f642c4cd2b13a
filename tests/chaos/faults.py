"""Every probe, hook, file operation and allocation of ours raises, alone and together, in all that we do.

Which calls there are is found out by doing each activity once with all of them counted. A try takes one call of this
list in turn, up to two more by chance, and raises there.
"""

import errno
import hashlib
import io
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, chdir, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from PIL import Image
from rich.console import Console
from starlette.testclient import TestClient
from tests.chaos.jobs import Contents, Job, check_same, check_versions, contents, contents_of, jobs, leftovers
from tests.chaos.planting import Fault, Point, counted, foreign_points, own_points, planted
from tests.chaos.surroundings import check_as_before, surroundings
from tests.chaos.tries import Case, Kind, kill_after
from tests.families import generate, make_pipeline
from tests.lbm.conftest import TINY
from tests.ui.conftest import HOST, encoded, lora_for
from torch import Tensor, nn

import sigmascope
from sigmascope.errors import SigmascopeError
from sigmascope.integrations import autostart
from sigmascope.integrations.watch_settings import Settings
from sigmascope.lbm.config import parse_config
from sigmascope.lbm.model import build_lbm
from sigmascope.lbm.training.train import TrainReport
from sigmascope.lora.apply import attach_lora
from sigmascope.ui.app import make_app
from sigmascope.ui.lbm_model import ServedModel
from sigmascope.ui.lbm_page import lbm_part

Planting = AbstractContextManager[None]
_NOTHING: Planting = nullcontext()
_ATTEMPTS = 20
"""How often a try looks for faults that are really met; after some, at another call."""
_WATCHED = tuple(
    "probes records stages analysis integrations files units reports "  # noqa: SIM905
    "monitor.utilization monitor.scope monitor.profile".split()
)
"""What a monitor measures with. The rest of `monitor` keeps books, and calls all this behind a guard."""
_MAKING = ("files", "checkpoints", "probes", "records", "lora", "pipeline", "lbm", "monitor", "reports")


@dataclass(frozen=True)
class Activity:
    """What is done while faults happen.

    Attributes:
        name: In the table.
        packages: Whose functions may fail.
        attempt: Does it with the faults in place, looks at what came of it, and says so in a few words.
        run: Does it, for counting calls.
    """

    name: str
    packages: tuple[str, ...]
    run: Callable[[], object]
    attempt: Callable[[list[Fault]], str]


@dataclass(frozen=True)
class Prepared:
    """All activities and, in an order of chance, all calls of each that can fail."""

    activities: dict[str, Activity]
    calls: dict[str, dict[Point, int]] = field(default_factory=dict)


def prepare(folder: Path) -> Prepared:
    with chdir(folder):
        activities = [*_guests(), *_encodings(), *_jobs(folder), _page()]
    prepared = Prepared({activity.name: activity for activity in activities})
    foreign = foreign_points()
    for name, activity in prepared.activities.items():
        points = [point for point in [*own_points(*activity.packages), *foreign] if _may_fail(point)]
        place = folder / f"calls of {name}"
        place.mkdir()
        assert not kill_after(120, partial(_count, activity, points, place))
        numbers = json.loads((place / "calls.json").read_text())
        prepared.calls[name] = {points[int(number)]: calls for number, calls in numbers.items()}
    return prepared


def _count(activity: Activity, points: list[Point], place: Path) -> None:
    os.chdir(place)
    os.dup2(os.open("output.txt", os.O_CREAT | os.O_WRONLY), 1)
    calls = counted(activity.run, points)
    numbers = {points.index(point): number for point, number in calls.items()}
    Path("calls.json").write_text(json.dumps(numbers))


_ENDS = re.compile(
    "close|close_stage|closed|detach|end|ended|_end|exit|forget|_forget|leave|leave_stacks|leave_recorder|pop|push|remove|restore"
    "|stop|stop_sampling|take_off|undo|give_back|clear|release|_wait_no_more|time_no_more|__exit__"
    "|to_the_end|_leave|_detach|end_stage|_close_entry|shutdown"
)
"""Functions whose whole work is to take something off, which nobody could do in their place."""
_BARRIERS = re.compile(
    r"Guard\..*|describe|log_quietly|attempt|_call_after"
    r"|HookSet.failed|HookSet._keep_or_undo|HookSet.keep_undo|GenerationSteps.finish"
    r"|Recorder.(stage|step|open_stage|new_scope|current_scope)|Watch.__init__|stage_name|JobLine._work"
    r"|Instruments\..*|Finder.wait|when_loaded|Job.change|WatchedProcess.(start|_begin)|Checkpoint.__enter__"
    r"|privacy_of|say"
)
"""Functions that keep the errors of others from the host, remember what is to be taken off, set attributes, return
themselves, or refuse what the host asks for."""


def _may_fail(point: Point) -> bool:
    """Whether an error there is one that the code around it has to live with."""
    own = point.name.rpartition(".")[2]
    is_made = own == "__init__" and point.home.startswith("sigmascope.monitor")
    return not (_ENDS.fullmatch(own) or _BARRIERS.fullmatch(point.name) or is_made)


# What is watched


@dataclass(frozen=True)
class Guest:
    """A monitor in somebody's program, which begins with the same random state each time.

    Attributes:
        run: The program; gives what it computed.
        things: What is watched.
        expected: What it computes with nobody watching.
    """

    run: Callable[[], list[Tensor]]
    things: tuple[object, ...]
    expected: str

    def attempt(self, faults: list[Fault]) -> str:
        look = partial(surroundings, *self.things)
        before = look()
        try:
            with planted(faults):
                result = _alone(self.run)
        except KeyboardInterrupt as error:
            if not any(error is planted_one for fault in faults for planted_one in fault.raised):
                raise
            error.__traceback__ = None
            how = "interrupted"
        else:
            how = "unnoticed"
            assert result == self.expected, "the host's result is another"
        if how != "interrupted":  # which leaves the host's own things half done too
            check_as_before(before, look)
        contents(Path.cwd())
        assert leftovers(Path.cwd()) == []
        assert _alone(self.run) == self.expected, "the host's next result is another"
        check_as_before(before, look)
        return how


def _alone(program: Callable[[], list[Tensor]]) -> str:
    """What a program computes, with the random state that it begins with and leaves."""
    torch.manual_seed(0)
    random.seed(0)
    result = _digest(*program())
    return f"{result} {_digest(torch.get_rng_state())} {random.random()}"


def _digest(*tensors: Tensor) -> str:
    """Of the bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(str((tensor.dtype, tensor.shape)).encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


class Toy(nn.Module):
    """A model of the host's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 16)
        self.layer = nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.layer(self.table(ids))
        return result


def _guests() -> list[Activity]:
    options: dict[str, dict[str, Any]] = {
        "sd15": {"on_run": _save},
        "flux": {"step_memory": False},
        "wan": {"sample_hz": None, "prompts": "hash"},
    }
    made = [_watched(family, more, family != "flux") for family, more in options.items()]
    torch.manual_seed(0)
    toy = Toy().eval()
    expected = _alone(partial(_toy_steps, toy))
    programs = {
        "plain object": partial(_plain, toy),
        "PerformanceMonitor": partial(_performance, toy),
        "WorkflowMonitor": partial(_workflow, toy),
        "SIGMASCOPE=1": partial(_process, toy),
    }
    guests = {name: Guest(run, (toy,), expected) for name, run in programs.items()}
    return made + [Activity(name, _WATCHED, one.run, one.attempt) for name, one in guests.items()]


def _save(run: Any) -> None:
    run.save("run.json")


def _watched(family: str, options: dict[str, Any], is_named: bool) -> Activity:
    pipeline = make_pipeline(family)
    generate(pipeline, family)
    expected = _alone(lambda: [generate(pipeline, family)])

    def run() -> list[Tensor]:
        with sigmascope.watch(*([pipeline] if is_named else []), **options):
            return [generate(pipeline, family)]

    run()  # what is read once a process is read before anything fails
    guest = Guest(run, (pipeline,), expected)
    return Activity(f"watch {family}", _WATCHED, run, guest.attempt)


def _toy_steps(toy: Toy, each: Callable[[], AbstractContextManager[object]] = nullcontext) -> list[Tensor]:
    results = []
    for number in range(4):
        with each():
            results.append(toy(torch.full((1, 77), number)).detach())
    return results


def _plain(toy: Toy) -> list[Tensor]:
    with sigmascope.watch(toy, on_run=_save), sigmascope.stage("denoising") as stage:
        results = _toy_steps(toy, sigmascope.step)
        stage.tensor("latent", results[0])
        stage.module("denoiser", toy)
        stage.fact("guidance_scale", 7.5)
    return results


def _performance(toy: Toy) -> list[Tensor]:
    monitor = sigmascope.PerformanceMonitor(5.0)
    with monitor.monitor_generation("toy", num_steps=4, resolution=(64, 64), model=toy) as watching:
        results = []
        for number in range(4):
            watching.start_step_timing()
            results.append(toy(torch.full((1, 77), number)).detach())
            watching.end_step_timing()
    monitor.get_performance_summary()
    return results


def _workflow(toy: Toy) -> list[Tensor]:
    monitor = sigmascope.WorkflowMonitor("portrait", verbose=True)
    baseline = monitor.capture_text_encoding_baseline(None, toy)
    monitor.start_monitoring("text_encoding")
    with monitor.encoding("positive"):
        results = _toy_steps(toy)
    monitor.update_peak_memory()
    elapsed = monitor.end_monitoring("text_encoding", toy, "CLIP")
    monitor.analyze_text_encoding_results(
        baseline, [[results[0], {}]], [[results[1], {}]], "a red fox", "", elapsed
    )
    before = monitor.capture_lora_baseline(toy, None)
    monitor.start_monitoring("lora_application")
    monitor.end_monitoring("lora_application", toy, "UNet")
    monitor.analyze_lora_application_results(before, toy, None, (toy, None))
    latent = monitor.capture_latent_generation_baseline(None, torch.zeros(1, 3, 32, 32))
    monitor.start_monitoring("latent_encoding")
    monitor.end_monitoring("latent_encoding", output=torch.zeros(1, 4, 4, 4))
    monitor.analyze_latent_generation_results(latent, torch.zeros(1, 4, 4, 4))
    monitor.print_comprehensive_summary(console=Console(file=io.StringIO()))
    return results


def _process(toy: Toy) -> list[Tensor]:
    process = autostart.WatchedProcess(Settings(output="run.json", trace="trace.json"))
    try:
        process.start()
        with sigmascope.stage("denoising"):
            return _toy_steps(toy, sigmascope.step)
    finally:
        process._end()  # as Python calls it at exit, after Ctrl-C too


# What makes something

_QUESTIONS = ("stat", "fstat", "exists", "is_file", "is_dir", "iterdir", "resolve", "access", "getpid")
"""What changes and reads nothing. Where the system refuses an answer, it has refused an earlier call too, as a rule."""


def _clear(error: BaseException, faults: list[Fault]) -> str:
    """How an error is right: ours, or the very one that was raised, where the user would know what it says."""
    if isinstance(error, SigmascopeError):
        return "an error of ours"
    raised = [(one, fault) for fault in faults for one in fault.raised]
    fault = next((fault for one, fault in raised if one is error), None)
    assert fault is not None, f"{type(error).__name__} in place of what was raised: {error}"
    is_of_a_disk = fault.point.home in ("os", "Path", "shutil") and fault.point.name not in _QUESTIONS
    assert not (isinstance(error, OSError) and is_of_a_disk), f"the system's bare error: {error!r}"
    return "the very error"


def _encodings() -> list[Activity]:
    vae = make_pipeline("sd15").vae
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(1, 3, 32, 32, generator=generator) * 2 - 1
    works: dict[str, Callable[..., tuple[Tensor, Any]]] = {
        "encode_latents": partial(sigmascope.encode_latents, vae, pixels),
        "decode_latents": partial(
            sigmascope.decode_latents, vae, torch.randn(1, 4, 16, 16, generator=generator)
        ),
    }
    return [_encoding(name, vae, work) for name, work in works.items()]


def _encoding(name: str, vae: Any, work: Callable[..., tuple[Tensor, Any]]) -> Activity:
    expected: dict[tuple[str, str | None], str] = {
        (strategy, None): _digest(work(strategies=(strategy,))[0]) for strategy in ("direct", "cpu")
    }
    for apart in (None, "RAM ran out"):  # before they begin, or while tiles wait for each other
        with patch("sigmascope.pipeline.tiling.why_apart", lambda *_args, reason=apart: reason):
            result, record = work(strategies=("tiled",))
        expected |= {_made_by(record): _digest(result)}
    assert len(expected) == 4

    def attempt(faults: list[Fault]) -> str:
        look = partial(surroundings, vae)
        before = look()
        weights = _digest(*vae.state_dict().values())
        try:
            with planted(faults):
                result, record = work()
        except BaseException as error:  # noqa: BLE001
            how = _clear(error, faults)
        else:
            how = f"with {record.strategy}"
            assert _digest(result) == expected[_made_by(record)], "another result"
        check_as_before(before, look)
        assert _digest(*vae.state_dict().values()) == weights
        assert _digest(work()[0]) == expected["direct", None]
        return how

    return Activity(name, _MAKING, work, attempt)


def _made_by(record: Any) -> tuple[str, str | None]:
    """The strategy, and what a tile knew of the whole. One tile that is the whole is no other work than "direct".

    There is one where the VAE's factor could not be read: tiles are made for the usual factor then, not for its own.
    """
    tile = record.attempts[-1].tile
    if tile is None or tile.count == 1:
        return "direct" if record.strategy == "tiled" else record.strategy, None
    return record.strategy, tile.norm_statistics


def _jobs(folder: Path) -> list[Activity]:
    made = []
    for job in jobs(folder):
        after, before, on_the_way = (
            {} if work is None else contents_of(work, folder / job.name / name)
            for name, work in (("after", job.run), ("before", job.before), ("passes", job.passes))
        )
        made.append(Activity(job.name, _MAKING, job.run, partial(_job, job, after, before, on_the_way)))
    return made


def _job(job: Job, after: Contents, before: Contents, on_the_way: Contents, faults: list[Fault]) -> str:
    was = Path.cwd()
    replaces = job.before is not None and random.random() < 0.5
    if job.before is not None and replaces:
        job.before()
    look = surroundings
    around = look()
    try:
        with planted(faults):
            done = job.run()
    except BaseException as error:  # noqa: BLE001
        how = _clear(error, faults)
        for held in (error, *(one for fault in faults for one in fault.raised)):
            _let_go(held)
        there = contents(was)
        check_versions(there, before, after, on_the_way)
        assert not replaces or before.keys() <= there.keys(), "what was there before is lost"
    else:
        if isinstance(done, TrainReport) and done.skipped.count:  # it trained without a sample, and said so
            how = "told what it left out"
            assert contents(was).keys() == after.keys(), "another set of files"
            for path in was.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            how = "right"
            check_same(contents(was), after)
    is_removing = any(fault.point.name in ("unlink", "rmtree") for fault in faults)
    assert is_removing or not [name for name in leftovers(was) if ".tmp" in name], (
        "left behind: temporary files"
    )
    check_as_before(around, look)
    job.run()
    check_same(contents(was), after)
    assert is_removing or not leftovers(was), "left behind: files"
    return how


def _let_go(error: BaseException | None) -> None:
    """Of the frames that an exception holds, as whoever has handled it does, and of what lives in them."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


def _page() -> Activity:
    torch.manual_seed(0)
    model = build_lbm(parse_config(TINY)).eval().requires_grad_(False)
    attached = attach_lora(model, lora_for(model))
    served = ServedModel(
        model, base_name="tiny", resolution=64, lora=attached, lora_name="light", lora_ranks=(2,)
    )
    sent = encoded(Image.effect_mandelbrot((75, 50), (-2, -1, 1, 1), 60).convert("RGB"))

    def visit(client: TestClient) -> str:
        """Upload, ask, wait and fetch; gives the digest of the picture, or the first refusal."""
        answer = client.post("/api/pictures", content=sent, headers={"content-type": "image/png"})
        if answer.status_code != 201:
            return _refusal(answer)
        wish = {"picture": answer.json()["id"], "client": "test", "steps": 2, "seed": 4, "size": "96x64"}
        answer = client.post("/api/jobs", json=wish)
        while answer.status_code < 300 and answer.json()["state"] in ("waiting", "running"):
            job = answer.json()
            answer = client.get(f"/api/jobs/{job['id']}", params={"after": job["version"]})
        if answer.status_code >= 300:
            return _refusal(answer)
        if answer.json()["state"] != "done":
            assert answer.json()["error"]["message"]
            return "a failed job"
        answer = client.get(f"/api/results/{answer.json()['outcome']['result']['id']}/picture.png")
        return hashlib.sha256(answer.content).hexdigest() if answer.status_code == 200 else _refusal(answer)

    def serve(planting: Planting = _NOTHING) -> tuple[str, str]:
        with TestClient(make_app([lbm_part(served)]), base_url=HOST, raise_server_exceptions=False) as client:
            with planting:
                first = visit(client)
            return first, visit(client)

    expected = serve()[1]

    def attempt(faults: list[Fault]) -> str:
        first, second = serve(planted(faults))
        assert second == expected, f"the next visit: {second}"
        assert first == expected or " " in first, "another picture"
        return first if " " in first else "right"

    return Activity("page", ("ui", "lbm", "probes", "monitor", "records", "lora"), serve, attempt)


def _refusal(answer: Any) -> str:
    assert answer.status_code >= 400, answer.status_code
    assert answer.json()["error"]["message"], answer.text
    return f"status {answer.status_code}"


# The tries


def attempt(case: Case) -> str:
    prepared: Prepared = case.prepared
    order = [(name, point) for name, calls in prepared.calls.items() for point in calls]
    random.Random(f"{case.seed}/faults").shuffle(order)
    name, first = order[case.number % len(order)]
    for number in range(_ATTEMPTS):
        if number >= _ATTEMPTS // 4:  # such as a call of a thread's that may come or not
            name, first = case.random.choice(order)
        faults = _faults(
            first, prepared.calls[name], case.random, can_be_interrupted=name != "WorkflowMonitor"
        )
        print(name, *faults, sep="\n  ")  # noqa: T201
        how = prepared.activities[name].attempt(faults)
        if any(fault.raised for fault in faults):
            return f"{name}: {how}"
        for left in Path.cwd().iterdir():  # or the next activity would have to answer for it
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    raise AssertionError("no fault was met")


def _faults(
    first: Point, calls: dict[Point, int], chance: random.Random, *, can_be_interrupted: bool
) -> list[Fault]:
    """Up to three; Ctrl-C among them where the host ends with a block what it began."""
    more = chance.choice((0, 0, 1, 2))
    points = [first, *chance.sample([point for point in calls if point != first], min(more, len(calls) - 1))]
    return [
        Fault(
            point,
            chance.randint(1, calls[point]),
            _error(point, chance, can_be_interrupted),
            chance.random() < 0.3,
        )
        for point in points
    ]


def _error(
    point: Point, chance: random.Random, can_be_interrupted: bool
) -> Callable[[object], BaseException]:
    system = partial(_system, chance.choice((errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE)))
    kinds: list[Callable[[object], BaseException]] = [partial(_said, MemoryError)]
    if point.home in ("os", "Path", "shutil"):
        kinds += [system, system]
    elif point.home in ("psutil", "psutil.Process"):
        kinds += [system, lambda _: psutil.AccessDenied(1), lambda _: psutil.NoSuchProcess(1)]
    elif point.home.startswith("torch"):
        kinds += [_torch_memory, lambda _: RuntimeError("an error of CUDA")]
    elif point.is_foreign:
        kinds += [partial(_said, RuntimeError), partial(_said, ValueError)]
    else:
        kinds += [
            _torch_memory,
            system,
            *(partial(_said, kind) for kind in (RuntimeError, KeyError, ValueError)),
        ]
        kinds += [partial(_said, KeyboardInterrupt)] if can_be_interrupted else []
    return chance.choice(kinds)


def _said(kind: type[BaseException], _argument: object) -> BaseException:
    return kind("planted")


def _torch_memory(_argument: object) -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Planted.")


def _system(number: int, argument: object) -> BaseException:
    names = (str(argument),) if isinstance(argument, str | Path) else ()
    return OSError(number, "planted", *names)


KIND = Kind(
    name="faults",
    promise="a monitor's host never notices and nothing is left on it; other work gives the right result or a clear error",
    tries=500,
    attempt=attempt,
    prepare=prepare,
    seconds=60.0,
)
