"""One object for a whole workflow: the calls of the seeds, on the recorder."""

import gc
import io
import json
import threading
import time
import weakref
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console
from tests.fresh_memory import fresh_memory, give_back
from torch import nn

import sigmascope
from sigmascope.analysis.processor_waits import WAITED
from sigmascope.monitor import current_recorder
from sigmascope.monitor.workflow import ModelLoadingMonitor, WorkflowMonitor, stage_name
from sigmascope.records.memory import AcceleratorMemory, MemorySnapshot
from sigmascope.records.prompts import PromptPrivacy
from sigmascope.records.run import Finding
from sigmascope.records.serialization import run_to_json
from sigmascope.stages.text_encoding import TextEncodingThresholds

if TYPE_CHECKING:
    from tests.monitor.conftest import FakeAccelerator, FakeHost

MIB = 2**20


class Encoder(nn.Module):
    """Stands for a text encoder of 77 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.table(ids)
        return embedded


@pytest.fixture
def monitor() -> WorkflowMonitor:
    return WorkflowMonitor("portrait", sample_hz=None)


@pytest.fixture
def clip() -> Encoder:
    torch.manual_seed(0)
    return Encoder().eval()


def encode(clip: Encoder) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = clip(torch.zeros(1, 77, dtype=torch.long))
    return output


def watch(monitor: WorkflowMonitor, clip: Encoder, prompt: str = "a red fox") -> dict[str, Any]:
    baseline = monitor.capture_text_encoding_baseline(None, clip)
    monitor.start_monitoring("text_encoding")
    with monitor.encoding("positive"):
        positive = encode(clip)
    monitor.update_peak_memory()
    with monitor.encoding("negative"):
        negative = encode(clip)
    elapsed = monitor.end_monitoring("text_encoding", clip, "CLIP")
    return monitor.analyze_text_encoding_results(
        baseline, [[positive, {}]], [[negative, {}]], prompt, "", elapsed
    )


def printed(monitor: WorkflowMonitor, **analyses: Any) -> str:
    file = io.StringIO()
    monitor.print_comprehensive_summary(**analyses, console=Console(file=file))
    return file.getvalue()


def test_both_names_are_public() -> None:
    assert sigmascope.ModelLoadingMonitor is sigmascope.WorkflowMonitor is ModelLoadingMonitor


def test_steps_become_stages_of_the_run(monitor: WorkflowMonitor, clip: Encoder) -> None:
    watch(monitor, clip)
    run = monitor.run()
    assert [stage.name for stage in run.walk()] == ["text_encoding", "positive_prompt", "negative_prompt"]
    assert run.complete
    assert run.stages[0].modules["CLIP"].parameters == 8 * 16


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ("text_encoding", "text_encoding"),
        ("Text Encoding", "text_encoding"),
        ("LATENT_GENERATION_STEP5", "latent_encoding"),
        ("step_1_model_loading", "model_loading"),
        ("my own-step", "my_own_step"),
        ("", "step"),
    ],
)
def test_names_of_steps(step: str, name: str) -> None:
    assert stage_name(step) == name


def test_elapsed_seconds_are_those_of_the_stage(monitor: WorkflowMonitor) -> None:
    monitor.start_monitoring("model_loading")
    elapsed = monitor.end_monitoring("model_loading")
    assert elapsed == monitor.run().stages[0].seconds


def test_steps_nest_and_repeat(monitor: WorkflowMonitor) -> None:
    monitor.start_monitoring("outer")
    for _ in range(2):
        monitor.start_monitoring("inner")
        monitor.end_monitoring("inner")
    monitor.end_monitoring("outer")
    (outer,) = monitor.run().stages
    assert [child.name for child in outer.children] == ["inner", "inner"]


def test_the_end_of_a_step_that_never_began_is_unknown(
    monitor: WorkflowMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    assert monitor.end_monitoring("denoising") is None
    assert "never begun" in caplog.text


def test_threads_end_their_own_steps(monitor: WorkflowMonitor, clip: Encoder) -> None:
    turn = {"first": threading.Event(), "second": threading.Event()}
    both_begun = threading.Barrier(2)

    def work(which: str, other: str) -> None:
        turn[which].wait(10)
        monitor.start_monitoring("text_encoding")
        with monitor.recorder.stage(f"of_{which}"):
            pass
        turn[other].set()
        both_begun.wait(10)
        monitor.end_monitoring("text_encoding", clip, f"of_{which}")

    threads = [
        threading.Thread(target=work, args=names) for names in (("first", "second"), ("second", "first"))
    ]
    for thread in threads:
        thread.start()
    turn["first"].set()
    for thread in threads:
        thread.join(20)
    stages = monitor.run().stages
    assert len(stages) == 2
    assert all([child.name for child in stage.children] == list(stage.modules) for stage in stages)


def test_an_open_step_leaves_the_run_incomplete(monitor: WorkflowMonitor) -> None:
    monitor.start_monitoring("denoising")
    assert not monitor.run().complete
    monitor.end_monitoring("denoising")
    assert current_recorder() is None


def test_an_error_is_on_record(monitor: WorkflowMonitor) -> None:
    monitor.start_monitoring("text_encoding")
    try:
        raise ValueError("no vocabulary")
    except ValueError as error:
        monitor.end_monitoring("text_encoding", error=error)
    stage = monitor.run().stages[0]
    assert not stage.success
    assert stage.exception_details is not None
    assert "no vocabulary" in stage.exception_details.traceback


def test_the_analysis_knows_times_and_peaks_of_its_step(monitor: WorkflowMonitor, clip: Encoder) -> None:
    found = watch(monitor, clip)
    stage = monitor.run().stages[0]
    assert found["elapsed_time"] == stage.seconds
    assert found["performance"]["positive_encoding_time"] == stage.children[0].seconds
    assert found["performance"]["negative_encoding_time"] == stage.children[1].seconds
    assert stage.peak is not None
    assert found["peak_memory"]["process"]["peak_rss_mb"] == pytest.approx((stage.peak.rss_bytes or 0) / MIB)


def test_the_step_keeps_the_analysis_and_the_tensors_facts(monitor: WorkflowMonitor, clip: Encoder) -> None:
    watch(monitor, clip)
    stage = monitor.run().stages[0]
    assert stage.facts["text_encoding"]["encoding_success"] is True
    assert stage.facts["text_encoding"]["text_processing"]["positive"]["word_count"] == 3
    assert stage.tensors["positive_conditioning"].shape == (1, 77, 16)


def test_a_run_survives_saving(monitor: WorkflowMonitor, clip: Encoder, tmp_path: Path) -> None:
    watch(monitor, clip)
    run = monitor.run()
    run.save(tmp_path / "run.json")
    assert sigmascope.load_run(tmp_path / "run.json") == run


def test_a_private_prompt_that_cannot_be_read_raises_nothing_and_no_error_is_quoted(clip: Encoder) -> None:
    class Odd:
        @property  # type: ignore[misc]
        def __class__(self) -> type:
            raise ZeroDivisionError("a fox")

    monitor = WorkflowMonitor(sample_hz=None, prompt_privacy="hash")
    monitor.start_monitoring("text_encoding")
    elapsed = monitor.end_monitoring("text_encoding", error=ValueError("no such prompt: a red fox"))
    found = monitor.analyze_text_encoding_results(None, None, None, Odd(), "", elapsed)
    assert "ZeroDivisionError" in found["unavailable"]["encoding_success"]
    assert "red fox" not in run_to_json(monitor.run())


def test_private_prompts_are_not_in_the_run(clip: Encoder, tmp_path: Path) -> None:
    monitor = WorkflowMonitor(sample_hz=None, prompt_privacy="hash")
    watch(monitor, clip, "the secret unicorn")
    monitor.run().save(tmp_path / "run.json")
    assert "unicorn" not in (tmp_path / "run.json").read_text()
    assert "unicorn" not in printed(monitor)


def test_thresholds_are_held(clip: Encoder) -> None:
    monitor = WorkflowMonitor(sample_hz=None, thresholds=TextEncodingThresholds(expected_width=768))
    assert not watch(monitor, clip)["validation"]["success"]


def test_peaks_of_workflow_and_steps(accelerator: "FakeAccelerator", host: "FakeHost") -> None:
    monitor = WorkflowMonitor(sample_hz=None, accelerator=accelerator)
    monitor.start_monitoring("model_loading")
    accelerator.allocate(5 * MIB)
    accelerator.free(4 * MIB)
    monitor.end_monitoring("model_loading")
    monitor.start_monitoring("text_encoding")
    host.rss, host.ram_used = 300 * MIB, 1500 * MIB
    monitor.update_peak_memory()
    host.rss, host.ram_used = 200 * MIB, 1200 * MIB
    monitor.end_monitoring("text_encoding")
    found = monitor.get_peak_memory_summary()
    assert found["ram_peak_mb"] == 1500
    assert found["gpu_allocated_peak_mb"] == 5
    assert found["gpu_reserved_peak_mb"] == 10  # the allocator reserves twice what it gives out
    at = found["peak_timestamps"]
    assert set(at) == {"ram", "gpu_allocated", "gpu_reserved"}
    assert 0 <= at["gpu_allocated"] <= at["ram"] <= monitor.run().seconds
    assert found["process"]["peak_rss_mb"] == 300
    assert found["gpu"]["peak_allocated_mb"] == 5
    assert [step["name"] for step in found["steps"]] == ["model_loading", "text_encoding"]
    assert [step["peak_memory"]["gpu"]["peak_allocated_mb"] for step in found["steps"]] == [5, 1]
    assert json.loads(json.dumps(found)) == found


def test_without_an_accelerator_the_flat_peaks_are_none(make_accelerator: "type[FakeAccelerator]") -> None:
    monitor = WorkflowMonitor(sample_hz=None, accelerator=make_accelerator(devices=0))
    monitor.start_monitoring("text_encoding")
    monitor.end_monitoring("text_encoding")
    found = monitor.get_peak_memory_summary()
    assert found["gpu_allocated_peak_mb"] is None
    assert found["gpu_reserved_peak_mb"] is None
    assert found["peak_timestamps"]["gpu_allocated"] is None
    assert found["ram_peak_mb"] > 0


def test_the_share_of_memory_that_was_given_back(accelerator: "FakeAccelerator") -> None:
    monitor = WorkflowMonitor(sample_hz=None, accelerator=accelerator)
    baseline = monitor.capture_text_encoding_baseline(None, None)
    monitor.start_monitoring("text_encoding")
    accelerator.allocate(4 * MIB)
    accelerator.free(3 * MIB)
    monitor.end_monitoring("text_encoding")
    found = monitor.analyze_text_encoding_results(baseline, torch.ones(1, 77, 8), None, "x", None, 0.1)
    assert found["efficiency"]["cleanup_effectiveness"] == 0.75
    assert found["memory_impact"]["gpu"]["allocated_change_mb"] == 1
    assert found["peak_memory"]["gpu"]["peak_allocated_mb"] == 4


def repeat(monitor: WorkflowMonitor, clip: Encoder, leak: bool, calls: int = 20) -> list[mmap]:
    kept = []
    give_back()
    for _ in range(calls):
        monitor.start_monitoring("text_encoding")
        encode(clip)
        if leak:
            kept.append(fresh_memory(MIB))
        monitor.end_monitoring("text_encoding")
    return kept


def test_a_leak_of_a_megabyte_a_call_is_found_in_20_calls(monitor: WorkflowMonitor, clip: Encoder) -> None:
    kept = repeat(monitor, clip, leak=True)
    leaks = [finding for finding in monitor.run().findings if finding.id == "memory_leak"]
    assert len(kept) == 20
    assert [finding.stage for finding in leaks] == ["text_encoding"]
    assert leaks[0].evidence["mb_per_call"] == pytest.approx(1, rel=0.2)


def test_a_leak_of_tensors_is_found_among_calls_of_all_sizes(monitor: WorkflowMonitor) -> None:
    kept = []
    give_back()
    for call in range(20):
        monitor.start_monitoring("text_encoding")
        torch.randn(1 + 977 * call % 4096, 256).softmax(1)  # memory that is freed and used again
        kept.append(torch.ones(MIB // 4))
        monitor.end_monitoring("text_encoding")
    (leak,) = (finding for finding in monitor.run().findings if finding.id == "memory_leak")
    assert leak.evidence["mb_per_call"] == pytest.approx(1, rel=0.2)


def of_the_program(monitor: WorkflowMonitor) -> list[Finding]:
    """All findings but that other programs left no processor to this one, which is true on a busy machine."""
    return [finding for finding in monitor.run().findings if finding.id != WAITED]


def test_calls_of_all_sizes_are_no_leak(monitor: WorkflowMonitor) -> None:
    for call in range(20):
        monitor.start_monitoring("text_encoding")
        torch.randn(1 + 977 * call % 4096, 256).softmax(1)
        monitor.end_monitoring("text_encoding")
    assert of_the_program(monitor) == []


def test_without_a_leak_none_is_reported(monitor: WorkflowMonitor, clip: Encoder) -> None:
    repeat(monitor, clip, leak=False)
    assert of_the_program(monitor) == []


@pytest.mark.slow
def test_analyses_of_20_encodings_are_no_leak(monitor: WorkflowMonitor, clip: Encoder) -> None:
    for _ in range(20):
        watch(monitor, clip)
    assert of_the_program(monitor) == []


def test_a_model_that_was_replaced_is_found(monitor: WorkflowMonitor, clip: Encoder) -> None:
    other = Encoder().half()
    for step, model in (("model_loading", clip), ("text_encoding", other)):
        monitor.start_monitoring(step)
        monitor.end_monitoring(step, model, "CLIP")
    (finding,) = of_the_program(monitor)
    assert finding.id == "model_state_changed"
    assert {"model_id", "dtype"} <= set(finding.evidence)


def test_the_comprehensive_summary_has_every_analysis(monitor: WorkflowMonitor, clip: Encoder) -> None:
    watch(monitor, clip)
    text = printed(
        monitor,
        lora_analysis={"application_success": True, "unet": {"keys_added": 3}},
        latent_generation_analysis={"strategy_used": "Direct VAE Encoding"},
    )
    order = [
        "WORKFLOW SUMMARY",
        "LORA APPLICATION ANALYSIS",
        "TEXT ENCODING ANALYSIS",
        "LATENT GENERATION ANALYSIS",
    ]
    places = [text.find(title) for title in order]
    assert places == sorted(places)
    assert -1 not in places
    assert "Keys added: 3" in text
    assert "Strategy Used: Direct VAE Encoding" in text
    assert "MODEL SAMPLING" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_analysis_given_goes_before_its_own(monitor: WorkflowMonitor, clip: Encoder) -> None:
    watch(monitor, clip)
    text = printed(monitor, text_encoding_analysis={"encoding_success": False, "error": "given"})
    assert "Error: given" in text


def test_an_empty_workflow_prints(monitor: WorkflowMonitor) -> None:
    assert "WORKFLOW SUMMARY" in printed(monitor)


def test_the_summary_shows_steps_and_findings(monitor: WorkflowMonitor, clip: Encoder) -> None:
    repeat(monitor, clip, leak=True)
    file = io.StringIO()
    monitor.print_summary(Console(file=file))
    assert file.getvalue().count("✓ text_encoding") == 20
    assert "grows by" in file.getvalue()


def test_printing_to_a_closed_stream_does_no_harm(monitor: WorkflowMonitor) -> None:
    file = io.StringIO()
    file.close()
    monitor.start_monitoring("text_encoding")
    monitor.print_summary(Console(file=file, width=80))
    assert monitor.end_monitoring("text_encoding") is not None
    assert monitor.run().stage("text_encoding").success


def test_a_broken_analysis_does_not_reach_the_host(
    monitor: WorkflowMonitor, clip: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("it is broken")

    monkeypatch.setattr("sigmascope.stages.text_encoding.analyze_text_encoding_results", broken)
    monkeypatch.setattr("sigmascope.stages.text_encoding.capture_text_encoding_baseline", broken)
    monkeypatch.setattr("sigmascope.analysis.diagnostics.diagnose", broken)
    found = watch(monitor, clip)
    assert found["unavailable"]["encoding_success"] == "OSError: it is broken"
    assert monitor.run().complete


def test_a_latent_that_cannot_be_looked_at_does_not_reach_the_host(
    monitor: WorkflowMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("it is broken")

    monitor.start_monitoring("latent_encoding")
    monkeypatch.setattr("sigmascope.monitor.workflow.find_latent", broken)
    analysis = monitor.analyze_latent_generation_results(None, torch.zeros(1, 4, 4, 4))
    monitor.end_monitoring("latent_encoding")
    assert analysis["latent_analysis"]["shape"] == [1, 4, 4, 4]
    assert monitor.run().stage("latent_encoding").tensors == {}


def test_outputs_are_bit_identical_and_nothing_is_left(monitor: WorkflowMonitor, clip: Encoder) -> None:
    alone = encode(clip)
    baseline = monitor.capture_text_encoding_baseline(None, clip)
    monitor.start_monitoring("text_encoding")
    watched = encode(clip)
    monitor.end_monitoring("text_encoding", clip, "CLIP")
    monitor.analyze_text_encoding_results(baseline, watched, None, "a fox", None, None)
    assert torch.equal(alone, watched)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in clip.modules())


def test_neither_model_nor_tensor_is_kept_alive(monitor: WorkflowMonitor) -> None:
    clip = Encoder()
    output = encode(clip)
    baseline = monitor.capture_text_encoding_baseline(None, clip)
    monitor.start_monitoring("text_encoding")
    monitor.end_monitoring("text_encoding", clip, "CLIP")
    monitor.analyze_text_encoding_results(baseline, output, None, "x", None, 0.1)
    references: list[weakref.ref[Any]] = [weakref.ref(clip), weakref.ref(output)]
    del clip, output
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_the_rules_look_at_a_workflow_too(monitor: WorkflowMonitor) -> None:
    with monitor.recorder.stage("denoising") as stage:
        stage.tensor("latents", torch.full((4,), torch.nan))
    (finding,) = of_the_program(monitor)
    assert (finding.id, finding.evidence["nan"]) == ("values.not_finite", 4)


def test_what_an_analysis_tells_is_not_told_by_a_rule_again(monitor: WorkflowMonitor) -> None:
    told = {"id": "latent_not_finite", "severity": "error", "message": "4 NaN"}
    with monitor.recorder.stage("latent_encoding") as stage:
        stage.tensor("latent", torch.full((4,), torch.nan))
        stage.fact("latent_encoding", {"findings": [told]})
    assert [finding.id for finding in of_the_program(monitor)] == ["latent_not_finite"]


@pytest.mark.parametrize(
    "name",
    [
        "print_lora_analysis_summary",
        "print_text_encoding_analysis_summary",
        "print_latent_generation_analysis_summary",
        "print_latent_decoding_analysis_summary",
    ],
)
def test_a_summary_of_no_analysis_is_an_error_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    getattr(WorkflowMonitor(), name)(None)
    of_the_monitor = capsys.readouterr().out
    getattr(sigmascope, name)(None)
    assert "❌ Error: there is no analysis to show" in of_the_monitor
    assert capsys.readouterr().out == of_the_monitor


def test_the_timestamp_of_every_baseline_is_in_seconds_since_1970() -> None:
    monitor = WorkflowMonitor()
    before = time.time()
    baselines = [
        monitor.capture_lora_baseline(None, None),
        monitor.capture_text_encoding_baseline(None, None),
        monitor.capture_latent_generation_baseline(None, torch.zeros(1, 8, 8, 3)),
        monitor.capture_latent_decoding_baseline(None, torch.zeros(1, 4, 1, 1)),
    ]
    after = time.time()
    for baseline in baselines:
        assert isinstance(baseline["timestamp"], float)
        assert before <= baseline["timestamp"] <= after


def test_a_step_is_told_while_it_runs(
    host: "FakeHost",
    accelerator: "FakeAccelerator",
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    accelerator.allocate(2048 * MIB)
    begun = MemorySnapshot(
        24 * 1024 * MIB, int(8.2 * 1024 * MIB), int(15.8 * 1024 * MIB), 100 * MIB,
        (AcceleratorMemory("cuda:0", 2048 * MIB, 3072 * MIB),),
    )  # fmt: skip
    monkeypatch.setattr("sigmascope.monitor.workflow.memory_snapshot", lambda accelerator: begun)
    monitor = WorkflowMonitor(sample_hz=None, accelerator=accelerator)
    monitor.capture_latent_generation_baseline(None, torch.zeros(16, 512, 512, 3, dtype=torch.uint8))
    monitor.start_monitoring("LATENT_GENERATION_STEP5")
    told = capsys.readouterr().out
    assert told == (
        "🔍 STARTING MONITORING FOR: LATENT_GENERATION_STEP5\n"
        "   Baseline RAM: 8.2 GB used, 15.8 GB available\n"
        "   Baseline GPU: 2048 MB allocated, 3072 MB reserved\n"
        "   Video Dimensions: 16 frames, 512x512, 3 channels\n"
    )
    accelerator.allocate(2048 * MIB)
    accelerator.free(2048 * MIB)
    latent = torch.zeros(1, 4, 4, 64, 64)
    seconds = monitor.end_monitoring(
        "LATENT_GENERATION_STEP5", strategy_used="Direct VAE Encoding", output={"samples": latent}
    )
    assert capsys.readouterr().out == (
        "\n"
        "🔧 VAE ENCODING PROCESS:\n"
        "   🎯 Strategy 1: Direct VAE encoding\n"
        "   ✅ VAE encoding completed successfully\n"
        "   📐 Generated latent shape: (1, 4, 4, 64, 64)\n"
        f"   ⏱️  Processing Time: {seconds:.2f} seconds\n"
        "   💾 Peak GPU Memory: 4096 MB allocated\n"
    )


def test_a_step_of_no_vae_is_told_by_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = WorkflowMonitor(sample_hz=None)
    for step in ("text_encoding", "LATENT_GENERATION_STEP5"):
        monitor.start_monitoring(step)
        capsys.readouterr()
        monitor.end_monitoring(step)
        told = capsys.readouterr().out
        assert told.startswith(f"   ✅ {step.upper()} completed\n")
        assert "Strategy" not in told


def test_a_latent_that_is_not_finite_is_told_as_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = WorkflowMonitor(sample_hz=None)
    monitor.start_monitoring("latent_encoding")
    monitor.end_monitoring("latent_encoding", strategy_used=1, output=torch.full((1, 4, 2, 2), torch.nan))
    told = capsys.readouterr().out
    assert "❌ VAE encoding failed" in told
    assert "🚨 Not finite: 16 NaN, 0 Inf" in told
    assert "✅" not in told


def test_a_quiet_monitor_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = WorkflowMonitor(verbose=False)
    monitor.start_monitoring("text_encoding")
    monitor.end_monitoring("text_encoding")
    assert capsys.readouterr().out == ""


def test_an_error_is_told_without_the_prompt_that_it_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    privacies: tuple[PromptPrivacy, ...] = ("full", "hash")
    for privacy in privacies:
        monitor = WorkflowMonitor(prompt_privacy=privacy)
        monitor.start_monitoring("text_encoding")
        monitor.end_monitoring("text_encoding", error=ValueError("cannot encode a red fox"))
        told = capsys.readouterr().out
        assert "❌ TEXT_ENCODING failed: " in told
        assert "ValueError" in told
        assert ("red fox" in told) is (privacy == "full")


def test_loading_records_the_file_and_the_keys_that_did_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(3 * MIB))
    model, state = nn.Linear(2, 2), {"weight": torch.zeros(2, 2), "scale": torch.ones(1)}
    monitor = WorkflowMonitor(verbose=False)
    monitor.start_monitoring("model_loading")
    loaded = model.load_state_dict(state, strict=False)
    monitor.end_monitoring("model_loading", model, "UNet", file=path, loaded=loaded)
    facts = monitor.run().stages[0].facts
    assert facts["files"] == ["model.safetensors"]
    assert (facts["format"], facts["size_mb"]) == ("safetensors", 3.0)
    assert (facts["missing_keys"], facts["unexpected_keys"]) == (["bias"], ["scale"])
    assert (facts["num_missing_keys"], facts["num_unexpected_keys"]) == (1, 1)


def test_a_monitor_that_lives_long_keeps_the_last_stages_and_sums_of_the_others() -> None:
    monitor = WorkflowMonitor(verbose=False, sample_hz=None, keep_stages=3)
    for _ in range(10):
        for step in ("text_encoding", "denoising"):
            monitor.start_monitoring(step)
            monitor.end_monitoring(step)
    run = monitor.run()
    assert run.folded is not None
    assert [stage.name for stage in run.stages] == ["text_encoding", "denoising"] * 3
    assert {name: sums.count for name, sums in run.folded.stages.items()} == {
        "text_encoding": 7,
        "denoising": 7,
    }
