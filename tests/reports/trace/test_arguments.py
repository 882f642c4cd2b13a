from tests.reports.tracing_runs import MIB, arguments_of, events_of, run_of

from sigmascope.records.memory import AcceleratorPeak, MemoryImpact, MemorySnapshot, PeakMemory
from sigmascope.records.run import ModuleFacts, Stage, Steps, TensorFacts


def test_memory_is_in_mib() -> None:
    memory = MemoryImpact(
        MemorySnapshot(process_rss_bytes=100 * MIB), MemorySnapshot(process_rss_bytes=164 * MIB)
    )
    peak = PeakMemory(200 * MIB, 0.5, (AcceleratorPeak("cuda:0", 3 * MIB, 0.5, 4 * MIB, 0.5),))
    assert arguments_of(Stage("denoising", 0.0, 1.0, memory=memory, peak=peak)) == {
        "process_change_mib": 64.0,
        "process_peak_mib": 200.0,
        "cuda:0_peak_allocated_mib": 3.0,
        "cuda:0_peak_reserved_mib": 4.0,
    }


def test_what_is_unknown_is_left_out() -> None:
    assert arguments_of(Stage("denoising", 0.0, 1.0, peak=PeakMemory(), facts={"seed": None})) == {}


def test_a_step_tells_its_memory_and_its_time_on_the_device() -> None:
    steps = Steps((0.0, 0.5), (0.5, 0.5), (0.25, None), (2 * MIB, None), (MIB, 3 * MIB))
    _, first, second = events_of(run_of(Stage("denoising", 0.0, 1.0, steps=steps)), phase="X")
    assert first["args"] == {"gpu_ms": 250.0, "process_mib": 2.0, "allocated_mib": 1.0}
    assert second["args"] == {"allocated_mib": 3.0}


def test_tensors_and_models_are_a_line_each() -> None:
    tensor = TensorFacts((1, 4, 8, 8), "torch.bfloat16", "cuda:0", 512, 256)
    model = ModuleFacts("UNet2DConditionModel", 1234567)
    assert arguments_of(Stage("a", 0.0, 1.0, tensors={"latent": tensor}, modules={"unet": model})) == {
        "tensor.latent": "1×4×8×8 bfloat16 on cuda:0",
        "module.unet": "UNet2DConditionModel, 1,234,567 parameters",
    }


def test_facts_are_flat_and_structures_deep_inside_are_left_out() -> None:
    facts = {"call": {"steps": 4, "size": [64, 32]}, "deep": {"a": {"b": {"c": 1}}}, "rows": [{"a": 1}]}
    assert arguments_of(Stage("a", 0.0, 1.0, facts=facts)) == {"call.steps": 4, "call.size": "64, 32"}


def test_of_many_facts_the_number_left_out_is_told() -> None:
    arguments = arguments_of(Stage("a", 0.0, 1.0, facts={f"key{index}": index for index in range(130)}))
    assert arguments["facts_left_out"] == 30


def test_a_long_text_is_cut() -> None:
    assert arguments_of(Stage("a", 0.0, 1.0, facts={"text": "x" * 1000}))["text"] == "x" * 300 + "…"


def test_what_could_not_be_measured_says_why() -> None:
    arguments = arguments_of(Stage("a", 0.0, 1.0, unavailable={"memory": "no permission"}))
    assert arguments == {"unavailable.memory": "no permission"}


def test_of_a_device_s_business_the_mean_is_told() -> None:
    gauge = {"mean": 42.0, "highest": 90.0, "highest_at_seconds": 0.5}
    facts = {"utilization": {"cuda:0": {"device": "cuda:0", "busy_percent": gauge}}}
    assert arguments_of(Stage("a", 0.0, 1.0, facts=facts)) == {"cuda:0_busy_percent": 42.0}


def test_memory_over_time_is_drawn_and_not_told_in_numbers() -> None:
    curve = {"at_seconds": [0.5], "nbytes": [7]}
    assert arguments_of(Stage("a", 0.0, 1.0, facts={"memory_over_time": {"process": curve}})) == {}
    assert arguments_of(Stage("a", 0.0, 1.0, facts={"memory_over_time": "mine"})) == {
        "memory_over_time": "mine"
    }
