import gzip
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.families import FAMILIES, generate, make_pipeline
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sigmascope.errors import ConfigError, WriteError
from sigmascope.monitor import Recorder
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.monitor.profile import CAPTURED, ProfileSession, profile_steps
from sigmascope.monitor.workflow import WorkflowMonitor
from sigmascope.records.performance import BlockProfile, StepsProfile, profiles_of
from sigmascope.records.serialization import run_from_json, run_to_json


class Block(nn.Module):
    """Two linear layers; what else it does is told by the test."""

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.act()
        out: Tensor = self.net(x)
        return out


class Denoiser(nn.Module):
    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.proj_in = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks or (Block(), Block()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x)
        return x


X = torch.ones(2, 8)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def profiled(denoiser: nn.Module, steps: tuple[int, ...] = (1,), calls: int = 1) -> StepsProfile:
    with profile_steps(None, denoiser, steps) as profiling:
        for _ in range(calls):
            denoiser(X)
    assert profiling.profile is not None
    return profiling.profile


def by_name(found: StepsProfile) -> dict[str, BlockProfile]:
    return {block.name: block for block in found.blocks}


def heard_classes() -> set[str]:
    """Those whose calls are heard."""
    return {kind.__name__ for kind in (Denoiser, Block, nn.Linear) if "__call__" in vars(kind)}


def is_profiling() -> bool:
    return torch._C._autograd._profiler_enabled()


def test_the_parts_are_told_in_the_order_in_which_they_ran() -> None:
    found = profiled(Denoiser())
    assert [(block.name, block.class_name) for block in found.blocks] == [
        ("proj_in", "Linear"),
        ("blocks.0", "Block"),
        ("blocks.1", "Block"),
    ]
    assert found.whole is not None
    assert (found.class_name, found.whole.name) == ("Denoiser", "")


def test_only_the_chosen_steps_are_seen() -> None:
    found = profiled(Denoiser(), steps=(2, 4), calls=5)
    assert found.steps == (2, 4)
    assert {block.calls for block in found.blocks} == {2}


def test_parts_are_within_the_whole_and_their_own_time_within_theirs() -> None:
    found = profiled(Denoiser(), steps=(2,), calls=2)
    assert found.whole is not None
    assert 0 < sum(block.cpu_seconds for block in found.blocks) <= found.whole.cpu_seconds
    for block in found.blocks:
        assert 0 <= block.self_cpu_seconds <= block.cpu_seconds


def test_operators_are_those_that_torchs_own_profile_counts() -> None:
    denoiser = Denoiser()
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        denoiser(X)
    counts = {one.key: one.count for one in theirs.key_averages()}
    found = profiled(denoiser)
    assert {one.name: one.calls for one in found.operators} == counts
    assert counts["aten::addmm"] == 5


def test_memory_is_what_a_block_allocates_and_how_far_it_grows() -> None:
    def allocate() -> None:
        for _ in range(3):
            torch.empty(250_000)  # 1,000,000 bytes, freed at once

    linear = 2 * 8 * 4  # what a linear layer gives
    found = by_name(profiled(Denoiser(Block(allocate), Block())))
    assert found["blocks.0"].allocated_bytes == 3_000_000 + 2 * linear
    assert found["blocks.0"].peak_growth_bytes == 1_000_000
    assert found["blocks.1"].allocated_bytes == 2 * linear
    assert found["blocks.1"].peak_growth_bytes == 2 * linear


def test_without_an_accelerator_its_times_are_none_with_the_reason() -> None:
    found = profiled(Denoiser())
    assert found.whole is not None
    assert (found.device, found.whole.device_seconds) == (None, None)
    assert found.operators[0].self_device_seconds is None
    assert found.unavailable == {"device_seconds": "no CUDA or HIP device was in use"}


def test_a_block_on_another_thread_is_not_taken_for_this_steps() -> None:
    other = Block()

    def elsewhere() -> None:
        thread = threading.Thread(target=other, args=(X,))
        thread.start()
        thread.join()

    found = by_name(profiled(Denoiser(Block(elsewhere), other)))
    assert found["blocks.1"].calls == 1


def test_no_hook_and_no_profiler_is_left() -> None:
    denoiser = Denoiser()
    profiled(denoiser)
    assert (heard_classes(), is_profiling()) == (set(), False)


def test_between_chosen_steps_the_blocks_have_no_hooks() -> None:
    seen: list[set[str]] = []
    profiled(Denoiser(Block(lambda: seen.append(heard_classes()))), steps=(2,), calls=3)
    assert seen == [{"Denoiser"}, {"Denoiser", "Block", "Linear"}, {"Denoiser"}]


@pytest.mark.parametrize("error", [ValueError("theirs"), KeyboardInterrupt()])
def test_what_the_denoiser_raises_passes_and_nothing_is_left(error: BaseException) -> None:
    def fails() -> None:
        raise error

    denoiser = Denoiser(Block(fails))
    profiling = profile_steps(None, denoiser, (1,))
    with pytest.raises(type(error)) as caught, profiling:
        denoiser(X)
    assert caught.value is error
    assert (heard_classes(), is_profiling()) == (set(), False)
    assert profiling.profile is not None
    assert profiling.profile.steps == (1,)


def test_the_hosts_own_profiler_goes_on() -> None:
    denoiser = Denoiser()
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        found = profiled(denoiser)
    assert found.unavailable["steps"] == "steps 1: another profiler was running"
    assert {one.key: one.count for one in theirs.key_averages()}["aten::addmm"] == 5


def test_a_device_that_was_first_used_after_the_steps_did_not_take_no_time_in_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    denoiser = Denoiser()
    profiling = profile_steps(None, denoiser, (1,))
    with profiling:
        denoiser(X)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert profiling.profile is not None
    assert profiling.profile.whole is not None
    assert profiling.profile.whole.device_seconds is None
    assert profiling.profile.whole.allocated_bytes
    assert (profiling.profile.device, "device_seconds" in profiling.profile.unavailable) == (None, True)


def test_a_step_that_is_captured_into_a_graph_is_not_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    session = ProfileSession({}, Guard())
    session.start(1)
    session.stop()
    assert (session.refused, session.taken) == (CAPTURED, [])


def test_a_step_that_never_came_has_a_reason() -> None:
    found = profiled(Denoiser(), steps=(1, 3, 9), calls=3)
    assert found.steps == (1, 3)
    assert found.unavailable["steps"] == "steps 9: the denoiser was called 3 times"


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def in_a_wrapper(module: nn.Module) -> nn.Module:
    wrapper = torch.compile(module, backend="eager")
    assert isinstance(wrapper, nn.Module)
    return wrapper


@pytest.mark.parametrize("compiled_by", [in_place, in_a_wrapper])
def test_what_was_compiled_as_a_whole_is_seen_as_a_whole(
    compiled_by: Callable[[nn.Module], nn.Module],
) -> None:
    compiled = compiled_by(Denoiser())
    found = profiled(compiled, steps=(2,), calls=2)
    assert found.blocks == ()
    assert found.whole is not None
    assert "aten::addmm" in {one.name for one in found.operators}
    assert found.unavailable["blocks"] == "the denoiser is compiled as a whole: its parts run as one"


def test_a_block_that_was_compiled_in_place_is_seen_as_the_others() -> None:
    denoiser = Denoiser()
    in_place(denoiser.blocks[0])
    found = profiled(denoiser, steps=(2,), calls=2)
    assert [(block.name, block.calls) for block in found.blocks] == [
        ("proj_in", 1), ("blocks.0", 1), ("blocks.1", 1),
    ]  # fmt: skip


def test_a_summary_that_fails_hurts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sigmascope.monitor.profile.ProfileSums.add", lambda *_: 1 / 0)
    denoiser = Denoiser()
    with profile_steps(None, denoiser, (1,)) as profiling:
        denoiser(X)
    assert profiling.profile is None
    assert heard_classes() == set()


def test_one_step_has_its_trace_in_the_file_and_several_in_one_each(tmp_path: Path) -> None:
    denoiser = Denoiser()
    for steps, names in (((1,), ["trace.json"]), ((1, 2), ["trace-step1.json", "trace-step2.json"])):
        with profile_steps(None, denoiser, steps, trace=tmp_path / "trace.json") as profiling:
            denoiser(X)
            denoiser(X)
        assert profiling.profile is not None
        assert profiling.profile.traces == tuple(str(tmp_path / name) for name in names)
    for path in tmp_path.iterdir():
        events = json.loads(path.read_text())["traceEvents"]
        assert "sigmascope::blocks.1" in {event.get("name") for event in events}


def test_traces_may_be_packed(tmp_path: Path) -> None:
    denoiser = Denoiser()
    with profile_steps(None, denoiser, (1, 2), trace=tmp_path / "flux.1.json.gz"):
        denoiser(X)
        denoiser(X)
    assert {path.name for path in tmp_path.iterdir()} == {"flux.1-step1.json.gz", "flux.1-step2.json.gz"}
    events = json.loads(gzip.decompress((tmp_path / "flux.1-step2.json.gz").read_bytes()))["traceEvents"]
    assert "sigmascope::blocks.1" in {event.get("name") for event in events}


def test_a_trace_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(WriteError):
        profile_steps(None, Denoiser(), trace=tmp_path / "taken" / "trace.json")


def test_a_trace_that_fails_later_has_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    denoiser = Denoiser()
    with profile_steps(None, denoiser, (1,), trace=folder / "trace.json") as profiling:
        denoiser(X)
        folder.rmdir()
        folder.write_text("")
    assert profiling.profile is not None
    assert profiling.profile.traces == ()
    assert "WriteError" in profiling.profile.unavailable["traces"]


@pytest.mark.parametrize("steps", [(), (0, 1), (-1,)])
def test_steps_that_cannot_be_are_refused(steps: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="steps are"):
        profile_steps(None, Denoiser(), steps)


@pytest.mark.parametrize("module", [None, object(), SimpleNamespace(components={"vae": nn.Linear(1, 1)})])
def test_what_holds_no_denoiser_is_refused(module: object) -> None:
    with pytest.raises(ConfigError, match="holds no denoiser"):
        profile_steps(None, module)


def test_of_comfyuis_patcher_the_model_that_is_called_is_taken() -> None:
    base = nn.Module()
    base.diffusion_model = Denoiser()
    patcher = SimpleNamespace(model=base)
    with profile_steps(None, patcher, (1,)) as profiling:
        base.diffusion_model(X)
    assert profiling.profile is not None
    assert (profiling.profile.class_name, profiling.profile.steps) == ("Denoiser", (1,))


# --- into the record


@pytest.mark.parametrize("kind", ["recorder", "workflow", "current"])
def test_the_profile_is_a_fact_of_the_stage_in_which_the_step_ran(kind: str) -> None:
    workflow = WorkflowMonitor()
    recorder = workflow.recorder if kind == "workflow" else Recorder(sample_hz=None)
    watching = {"recorder": recorder, "workflow": workflow, "current": None}[kind]
    denoiser = Denoiser()
    with recorder, profile_steps(watching, denoiser, (1,)) as profiling:
        with recorder.stage("text_encoding"):
            pass
        with recorder.stage("denoising"):
            denoiser(X)
    run = run_from_json(run_to_json(recorder.run()))
    assert profiles_of(run.stage("denoising")) == (profiling.profile,)
    assert profiles_of(run.stage("text_encoding")) == ()


def test_two_profiles_of_a_stage_are_both_kept() -> None:
    recorder, denoiser = Recorder(sample_hz=None), Denoiser()
    with recorder.stage("denoising"):
        for steps in ((1,), (2,)):
            with profile_steps(recorder, denoiser, steps):
                denoiser(X)
                denoiser(X)
    assert [one.steps for one in profiles_of(recorder.run().stages[0])] == [(1,), (2,)]


def test_a_stage_that_stays_open_keeps_the_last_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sigmascope.monitor.profile.MOST_PROFILES", 2)
    recorder, denoiser = Recorder(sample_hz=None), Denoiser()
    with recorder.stage("serving"):
        for steps in ((1,), (2,), (1, 2)):
            with profile_steps(recorder, denoiser, steps):
                denoiser(X)
                denoiser(X)
    assert [one.steps for one in profiles_of(recorder.run().stages[0])] == [(2,), (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"sdxl"}))  # whose denoiser is of sd15's class
def test_each_family_is_seen_block_by_block_and_gives_the_same_picture(family: str) -> None:
    pipe = make_pipeline(family)
    plain = generate(pipe, family)
    monitor = PerformanceMonitor(sample_hz=None)
    with monitor.monitor_generation() as watching, profile_steps(watching, pipe, (1,)) as profiling:
        watched = generate(pipe, family)
    assert torch.equal(torch.as_tensor(plain), torch.as_tensor(watched))
    denoiser = getattr(pipe, FAMILIES[family].denoiser)
    (found,) = profiles_of(monitor.runs[0].stages[0])
    assert found == profiling.profile
    assert found.class_name == type(denoiser).__name__
    paths = dict(denoiser.named_modules())
    assert all(type(paths[block.name]).__name__ == block.class_name for block in found.blocks)
    assert sum("blocks." in block.name for block in found.blocks) >= 2
    assert heard_classes() == set()
