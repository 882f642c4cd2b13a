from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.analysis.run_sets import run

from sigmascope.analysis.recipe import recipe_differences
from sigmascope.records.run import (
    AcceleratorFacts,
    AttentionFacts,
    CallFacts,
    ComponentFacts,
    HostFacts,
    ModuleFacts,
    PipelineFacts,
    Run,
    Stage,
)
from sigmascope.records.serialization import to_plain


def on(libraries: Mapping[str, str], driver: str | None = None) -> Run:
    devices = () if driver is None else (AcceleratorFacts("cuda:0", "H100", driver_version=driver),)
    return replace(run([1.0]), host=HostFacts(cpu_model="EPYC", libraries=libraries, accelerators=devices))


def called(pipeline: PipelineFacts | None = None, call: CallFacts | None = None) -> Run:
    facts: dict[str, Any] = {"call": to_plain(call or CallFacts())}
    if pipeline is not None:
        facts["pipeline"] = to_plain(pipeline)
    return replace(run([1.0]), stages=(Stage("generation", 0.0, 1.0, facts=facts),))


def denoiser(dtype: str, **switches: Any) -> PipelineFacts:
    module = ModuleFacts("Transformer", 100, dtypes={dtype: 90, "float32": 10})
    attention = AttentionFacts(backends={"flash": 2} if switches else {"default": 2})
    part = ComponentFacts("denoiser", "Transformer", module=module, **switches)
    return PipelineFacts("Pipe", "MMDiT", components={"transformer": part}, attention=attention)


def test_the_same_set_up_differs_in_nothing() -> None:
    runs = [on({"torch": "2.13"}), called(denoiser("bfloat16"))]
    assert recipe_differences(runs, runs) == {}


def test_versions_and_drivers_that_changed_are_named() -> None:
    found = recipe_differences(
        [on({"torch": "2.13", "numpy": "2"}, "570")], [on({"torch": "2.12", "numpy": "2"}, "560")]
    )
    assert found == {"torch": ("2.12", "2.13"), "cuda:0 driver": ("560", "570")}


def test_what_was_done_to_a_pipeline_is_named() -> None:
    changed = called(denoiser("bfloat16", compiled=True, offload="model"))
    found = recipe_differences([changed], [called(denoiser("float32"))])
    assert found == {
        "transformer dtype": ("float32", "bfloat16"),
        "transformer offload": ("none", "model"),
        "attention backends": ("default", "flash"),
    }


def test_another_call_is_named() -> None:
    found = recipe_differences(
        [called(call=CallFacts(num_inference_steps=4, width=512))],
        [called(call=CallFacts(num_inference_steps=20, width=512))],
    )
    assert found == {"num_inference_steps": ("20", "4")}


def test_what_one_side_does_not_tell_is_no_difference() -> None:
    assert recipe_differences([on({"torch": "2.13"})], [run([1.0])]) == {}


def test_runs_of_one_side_that_do_not_agree_are_all_told() -> None:
    found = recipe_differences([on({"torch": "2.13"}), on({"torch": "2.12"})], [on({"torch": "2.13"})])
    assert found == {"torch": ("2.13", "2.12, 2.13")}


def test_facts_of_another_shape_are_passed_over() -> None:
    odd = replace(run([1.0]), stages=(Stage("generation", 0.0, 1.0, facts={"pipeline": 3}),))
    assert recipe_differences([odd], [odd]) == {}


@pytest.mark.parametrize(
    ("now", "found"), [(0.8, {"processor used by others": ("5 %", "80 %")}), (0.12, {}), (None, {})]
)
def test_other_work_on_the_processor_counts_where_it_is_much(
    now: float | None, found: dict[str, tuple[str, str]]
) -> None:
    before, after = (
        replace(run([1.0]), facts={"benchmark": {"others_cpu_share": share}}) for share in (0.05, now)
    )
    assert recipe_differences([after], [before]) == found


def test_a_benchmarks_device_and_threads_count() -> None:
    sides = [replace(run([1.0]), facts={"benchmark": {"device": "cpu", "threads": n}}) for n in (1, 2)]
    assert recipe_differences([sides[1]], [sides[0]]) == {"threads": ("1", "2")}
