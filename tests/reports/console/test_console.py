from dataclasses import replace

from rich.console import Console
from tests.reports.html.test_html import SAMPLED

from sigmascope.analysis.breakdown import time_breakdown
from sigmascope.records.memory import (
    AcceleratorMemory,
    AcceleratorPeak,
    MemoryImpact,
    MemorySnapshot,
    PeakMemory,
)
from sigmascope.records.run import (
    AcceleratorFacts,
    Finding,
    Folded,
    FoldedStages,
    HostFacts,
    Run,
    Stage,
    Steps,
    TensorFacts,
)
from sigmascope.reports.console import NO_ACCELERATOR, print_run
from sigmascope.reports.markdown import to_markdown

MIB = 1024**2


def printed(run: Run, width: int = 80, *, full: bool = True) -> str:
    console = Console(width=width, record=True, force_terminal=False, file=None, quiet=False)
    with console.capture() as capture:
        print_run(run, console, full=full)
    return capture.get()


def run_of(*stages: Stage, host: HostFacts | None = None, findings: tuple[Finding, ...] = ()) -> Run:
    return Run(
        id="1",
        name="demo",
        started_at="2026-01-02T03:04:05+00:00",
        seconds=4.0,
        host=host,
        stages=stages,
        findings=findings,
    )


def line_with(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)


def test_a_stage_shows_time_share_steps_and_memory() -> None:
    memory = MemoryImpact(
        MemorySnapshot(process_rss_bytes=100 * MIB), MemorySnapshot(process_rss_bytes=164 * MIB)
    )
    stage = Stage(
        "denoising",
        0.0,
        1.0,
        memory=memory,
        peak=PeakMemory(rss_bytes=200 * MIB, rss_at_seconds=0.25),
        steps=Steps(started=(0.0, 0.5), seconds=(0.5, 0.3)),
    )
    line = line_with(printed(run_of(stage)), "✓ denoising")
    for part in ("1.00 s", "25 %", "2 × 400 ms", "+64.0", "200.0 250 ms"):
        assert part in line


def test_without_an_accelerator_one_line_says_so() -> None:
    text = printed(run_of(Stage("denoising", 0.0, 1.0), host=HostFacts()))
    assert text.count(NO_ACCELERATOR) == 1
    assert "GPU" not in text.replace(NO_ACCELERATOR, "")


def test_an_accelerator_has_its_own_columns() -> None:
    before = AcceleratorMemory("cuda:0", allocated_bytes=2048 * MIB)
    after = AcceleratorMemory("cuda:0", allocated_bytes=3072 * MIB)
    stage = Stage(
        "latent_encoding",
        0.0,
        1.0,
        memory=MemoryImpact(MemorySnapshot(accelerators=(before,)), MemorySnapshot(accelerators=(after,))),
        peak=PeakMemory(accelerators=(AcceleratorPeak("cuda:0", 4096 * MIB, 1.23),)),
        facts={"device_seconds": 2.5},
    )
    host = HostFacts(accelerators=(AcceleratorFacts("cuda:0", "NVIDIA H200"),))
    text = printed(run_of(stage, host=host))
    assert "NVIDIA H200" in text
    line = line_with(text.partition("Accelerator")[2], "latent_encoding")
    for part in ("2.50 s", "+1,024.0", "4,096.0 1.23 s"):
        assert part in line


def test_names_of_stages_are_whole_beside_the_figures_of_an_accelerator() -> None:
    memory = PeakMemory(10**10, 12.34, accelerators=(AcceleratorPeak("cuda:0", 10**11, 12.34),))
    inner = Stage("latent_decoding", 0.0, 12.34, peak=memory, steps=Steps((0.0,), (12.34,)))
    text = printed(run_of(Stage("generation", 0.0, 123.4, peak=memory, children=(inner,))))
    assert text.count("✓ latent_decoding") == 2
    assert max(map(len, text.splitlines())) <= 80


def test_steps_that_the_accelerator_was_not_seen_to_finish_are_counted_with_the_reason() -> None:
    steps = Steps((0.0, 1.0), (1.0, 1.0), (0.9, None), unavailable={"gpu_seconds": "1 steps: read too early"})
    text = printed(run_of(Stage("denoising", 0.0, 2.0, steps=steps)))
    assert "GPU time of 1 of 2 steps is not known (1 steps: read too early)." in " ".join(text.split())


def test_inner_stages_are_indented_below_their_outer_stage() -> None:
    text = printed(run_of(Stage("outer", 0.0, 2.0, children=(Stage("inner", 0.5, 1.0),))))
    assert line_with(text, "inner").index("inner") == line_with(text, "outer").index("outer") + 2


def test_nan_and_inf_are_counted_together() -> None:
    facts = TensorFacts((1, 4, 8, 8), "torch.float32", "cpu", 1024, 256, nan_count=3, inf_count=2)
    line = line_with(printed(run_of(Stage("denoising", 0.0, 1.0, tensors={"latent": facts}))), "  latent")
    assert line.split()[-1] == "5"
    assert "1×4×8×8" in line


def test_a_statistic_that_was_not_read_is_a_dash_and_not_a_zero() -> None:
    facts = TensorFacts((2,), "torch.float32", "cpu", 8, 2)
    line = line_with(printed(run_of(Stage("denoising", 0.0, 1.0, tensors={"latent": facts}))), "  latent")
    assert line.split()[-5:] == ["-"] * 5


def test_a_failed_stage_says_why() -> None:
    text = printed(run_of(Stage("denoising", 0.0, 1.0, success=False, error="out of memory")))
    assert "denoising failed: out of memory" in text


def test_a_finding_shows_evidence_and_advice() -> None:
    finding = Finding("nan", "error", "The latent holds NaN.", {"nan_count": 3}, "Use bf16.", "denoising")
    text = printed(run_of(findings=(finding,)))
    for part in ("The latent holds NaN.", "nan_count 3", "What to do: Use bf16."):
        assert part in text


def test_markup_in_names_is_shown_and_not_obeyed() -> None:
    assert "[red]boo[/red]" in printed(run_of(Stage("[red]boo[/red]", 0.0, 1.0)))


def test_no_line_is_wider_than_eighty_columns() -> None:
    facts = TensorFacts(
        (1, 16, 128, 128), "torch.bfloat16", "cuda:0", 2**25, 2**24, -1e-5, 1e5, -2e-7, 1.5, 0, 0
    )
    stage = Stage("lora_application", 0.0, 123.4, tensors={"conditioning image": facts})
    assert max(map(len, printed(run_of(stage, host=HostFacts(cpu_model="x" * 100))).splitlines())) <= 80


def test_earlier_generations_that_are_folded_are_told_with_their_sums() -> None:
    sums = {
        "generation": FoldedStages(1900, 3800.0, 9.0, failures=3),
        "generation/denoising": FoldedStages(1900, 1900.0, 4.0, steps=19000, step_seconds=1520.0),
    }
    run = replace(run_of(Stage("generation", 3.0, 1.0)), folded=Folded(100, 1900, 0.0, 3.0, sums))
    text = printed(run)
    assert "And 1,900 earlier generations, folded" in text
    told = line_with(text.split("And 1,900")[1], "  denoising").split()
    assert told == ["denoising", "1,900", "1,900", "s", "1.00", "s", "4.00", "s", "19,000", "×", "80.0", "ms"]
    told = line_with(text.split("And 1,900")[1], "generation ").split()
    assert told == ["generation", "1,900", "3,800", "s", "2.00", "s", "9.00", "s", "3"]
    assert max(map(len, text.splitlines())) <= 80
    assert "earlier" not in printed(run_of(Stage("generation", 3.0, 1.0)))


def test_places_in_the_script_are_indented_under_their_row() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        print_run(SAMPLED, console)
    summary = capture.get()
    for text in (summary, printed(SAMPLED)):
        lines = text.splitlines()
        row = lines.index(line_with(text, "before the first stage  "))
        assert lines[row + 1].split() == ["read_image", "750", "ms", "6", "%", "script.py:12"]
        assert lines[row + 1].startswith("  read_image")
    assert "by 99 samples of stacks, which took 0.10 % of the time" in printed(SAMPLED)
    assert "samples of stacks" not in printed(replace(SAMPLED, facts={}))


def test_a_finding_is_followed_by_its_id_in_full_and_not_in_the_summary() -> None:
    run = run_of(
        Stage("denoising", 0.0, 4.0), findings=(Finding("lora_inactive", "warning", "It is off.", {}),)
    )
    assert "warning It is off. [lora_inactive]" in printed(run)
    assert "warning It is off." in printed(run, full=False)
    assert "lora_inactive" not in printed(run, full=False)


def test_a_finding_that_the_verdict_tells_with_the_same_advice_is_not_repeated() -> None:
    whole = Finding(
        "lora_not_loaded", "critical", "Nothing is there: it is for another model.", {}, "Use its own."
    )
    part = Finding("lora_other_shape", "error", "it is for another model.", {}, "Use its own.")
    other = Finding("lora_part_missing", "warning", "A part is missing.", {}, "Pass it.")
    summary = printed(replace(run_of(Stage("a", 0.0, 1.0)), findings=(whole, part, other)), full=False)
    assert [summary.count(text) for text in ("another model", "Use its own.", "Pass it.")] == [1, 1, 1]


def test_no_advice_stands_twice_in_the_summary_and_no_reason_that_follows_a_colon() -> None:
    whole = Finding("lora_not_loaded", "critical", "Nothing is there: the file holds HRA.", {}, "Convert it.")
    kind = Finding("lora_kind_unread", "warning", "The file holds HRA.", {}, "Convert it.")
    also = Finding("lora_other_shape", "error", "Another shape.", {}, "Convert it.")
    summary = printed(replace(run_of(Stage("a", 0.0, 1.0)), findings=(whole, kind, also)), full=False)
    told = [summary.count(text) for text in ("file holds HRA", "Convert it.", "Another shape.")]
    assert told == [1, 1, 1]


def test_zeros_are_told_once_though_a_file_has_modules_and_a_model_weights() -> None:
    says = "The LoRA changes nothing: all its changes are zero, in 80 {}."
    call = {"id": "lora_is_zero", "severity": "warning", "message": says.format("weights"), "evidence": {}}
    file = Finding("lora_is_zero", "warning", says.format("modules"), {}, "Train it further.")
    stage = Stage("generation", 0.0, 1.0, facts={"idle_loras": [call]})
    summary = printed(replace(run_of(stage), findings=(file,)), full=False)
    assert [summary.count(text) for text in ("changes are zero", "Train it further.")] == [1, 1]


def test_that_nothing_of_a_file_is_loaded_is_not_told_beside_why_none_of_it_fits() -> None:
    why = Finding("lora_matches_nothing", "critical", "None of the 14 modules fits.", {}, "Use its own.")
    whole = Finding("lora_not_loaded", "critical", "None of 14 is there: no module fits.", {}, "Use its own.")
    by_reason = Finding(
        "lora_other_architecture",
        "error",
        "14 of 14 are for FLUX.",
        {"modules": 14, "of": 14},
        "Use its own.",
    )
    some = Finding("lora_unknown", "error", "3 of 14 are odd.", {"modules": 3, "of": 14}, "Use its own.")
    run = replace(run_of(Stage("a", 0.0, 1.0)), findings=(why, whole, by_reason, some))
    for full in (True, False):
        text = printed(run, full=full)
        assert "None of the 14 modules fits." in text
        assert "3 of 14 are odd." in text
        assert ("is there" in text, "14 of 14" in text) == (full, full)


def test_an_error_of_many_lines_is_cut_in_the_verdict_and_whole_in_full() -> None:
    lines = [f"size mismatch for block.{number}.weight" for number in range(150)]
    error = "\n\t".join(["RuntimeError: Error(s) in loading state_dict for UNet:", *lines])
    finding = Finding("lora_not_loaded", "error", "It is for another model.", {}, "Use its own model.")
    failed = Stage("lora_application", 0.0, 1.0, success=False, error=error, findings=(finding,))
    summary = printed(run_of(failed), width=200, full=False)
    assert (
        "lora_application failed after 1.00 s: RuntimeError: Error(s) in loading state_dict for UNet: "
        "size mismatch for block.0.weight … and 149 more lines." in " ".join(summary.split())
    )
    assert "Use its own model." in summary
    assert len(summary.splitlines()) < 12
    whole = printed(run_of(failed), width=200)
    assert [whole.count(line) for line in lines[:3]] == [2, 1, 1]
    assert lines[-1] in whole


def test_the_name_of_a_stage_is_as_given_on_one_line_everywhere() -> None:
    encode, node = (
        Stage("vae/encode", 0.0, 3.0),
        Stage("node 12\nKSampler~0", 3.0, 1.0, success=False, error="Boom"),
    )
    peak = PeakMemory(rss_bytes=MIB, rss_at_seconds=0.5)
    run = run_of(
        replace(encode, children=(replace(encode, name="a/b", seconds=2.0, peak=peak),), peak=peak), node
    )
    for text in (printed(run), printed(run, full=False)):
        assert "node 12 KSampler~0 failed after 1.00 s: Boom." in text
        assert "Peak of memory: 1 MB, in a/b." in text
    summary = printed(run, full=False)
    for row, label in zip(
        time_breakdown(run), ("vae/encode, the rest", "a/b", "node 12 KSampler~0"), strict=True
    ):
        assert row.label == label
        assert line_with(summary, label)
    assert line_with(printed(run), "✗ node 12 KSampler~0")
    markdown = to_markdown(run)
    assert "| vae/encode, the rest |" in markdown
    assert "in vae/encode/a/b." in markdown
