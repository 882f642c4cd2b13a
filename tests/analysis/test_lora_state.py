"""What a run says of its LoRAs in the first lines."""

from dataclasses import replace
from html import unescape
from typing import Any

import pytest

from sigmascope.analysis.breakdown import headline
from sigmascope.analysis.diagnostics import diagnose, find_stage_findings
from sigmascope.analysis.lora_acting import acting_lora, spoiling_lora
from sigmascope.analysis.lora_idle import OPEN_VERDICTS, idle_lora
from sigmascope.analysis.lora_state import standing
from sigmascope.analysis.what_changed import what_changed
from sigmascope.lora.verdict import VERDICTS
from sigmascope.records.run import Finding, Run, Stage, Steps, TensorFacts
from sigmascope.reports.html import to_html
from sigmascope.reports.markdown import to_markdown

ZEROS = {"id": "lora_is_zero", "severity": "warning", "message": "The LoRA changes nothing: all are zero."}
WEAK = {"id": "lora_arrives_weak", "severity": "warning", "message": "Only 2 % of the LoRA arrives."}
NOISY = {"id": "lora_arrives_noisy", "severity": "warning", "message": "The LoRA arrives with noise."}
REMARK = {"id": "lora_inactive", "severity": "info", "message": "a remark"}


def applied(effective: bool | None, *findings: dict[str, Any], share: float | None = None) -> Stage:
    checked = {"a": {"result": "confirmed"}, "b": {"result": "unavailable"}} if share else {}
    changes = {"relative_change": share, "checked": checked}
    facts = {"effective": effective, "findings": list(findings), "unet_weight_changes": changes}
    return Stage("lora_application", 0.0, 0.1, facts={"lora_application": facts})


def lora(share: float | None, **states: int) -> dict[str, Any]:
    return {"states": states, "relative_change": share}


def call(*findings: dict[str, Any]) -> Stage:
    return Stage("generation", 0.1, 8.0, facts={"idle_loras": list(findings)} if findings else {})


def run_of(*stages: Stage) -> Run:
    return Run("id", "run", "2026-01-01T00:00:00+00:00", 10.0, stages=stages)


@pytest.mark.parametrize(
    "stages",
    [
        (applied(False, REMARK, ZEROS),),
        (applied(True, share=0.2), applied(False, ZEROS), call()),
        (call(), call(ZEROS)),
    ],
    ids=["a stage", "the last stage", "the last call"],
)
def test_loras_that_ended_without_effect_are_the_first_sentence(stages: tuple[Stage, ...]) -> None:
    run = run_of(*stages)
    assert idle_lora(run) == ZEROS["message"]
    assert headline(run).startswith(ZEROS["message"])
    assert acting_lora(run) is None


def test_one_that_may_be_fused_leaves_it_open_though_the_others_are_off() -> None:
    fused = {"id": "lora_fused_before", "severity": "info", "message": "a is listed as fused"}
    off = {**ZEROS, "id": "lora_disabled"}
    run = run_of(looked_at(off, unet__b=OFF), looked_at(off, fused, unet__b=OFF))
    assert idle_lora(run) is None
    assert standing(run) == ("unknown", fused["message"], None)
    assert idle_lora(run_of(looked_at(off, unet__b=OFF))) == off["message"]


@pytest.mark.parametrize(
    "stages",
    [
        (call(ZEROS), applied(True, share=0.199), call()),
        (applied(False, ZEROS), applied(True, share=0.199)),
        (applied(True, share=0.199), applied(False, REMARK), call()),
    ],
    ids=["a call before", "a stage before", "the same set again"],
)
def test_loras_that_act_at_the_end_have_a_line_with_their_strength(stages: tuple[Stage, ...]) -> None:
    run = run_of(*stages)
    assert idle_lora(run) is None
    assert (
        acting_lora(run) == "The LoRA acts: ‖ΔW‖ / ‖W‖ is 20 % in the denoiser. 1 weight in use confirmed it."
    )


STYLE = {"strength": [1.0, 1.0], "layers": 8, "active": 8, "content": "a"}
WORDS = {**STYLE, "layers": 4, "active": 3, "call_scale": 0.5}
OFF = {**STYLE, "active": 0}
MIXED = {**STYLE, "strength": [0.5, 1.0], "merged": 8}


def looked_at(*findings: dict[str, Any], **loras: dict[str, Any]) -> Stage:
    """A call with LoRAs, which were looked at."""
    by_name = {name.replace("__", "."): lora for name, lora in loras.items()}
    return Stage("generation", 0.2, 8.0, facts={"recipe": {"loras": by_name}, "idle_loras": list(findings)})


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ((looked_at(unet__style=STYLE),), " In the call a LoRA acted."),
        ((looked_at(unet__style=STYLE), looked_at(unet__style=STYLE)), " In all 2 calls a LoRA acted."),
        (
            (looked_at(unet__style=STYLE), looked_at(ZEROS, unet__style=STYLE), looked_at()),
            " In 1 of the 3 calls a LoRA acted.",
        ),
        ((looked_at(unet__style=OFF), looked_at(ZEROS, unet__style=STYLE)), ""),
        ((applied(None), looked_at(unet__style=STYLE)), ""),  # whether it does in this one is open
        (
            (applied(None), looked_at(unet__style=STYLE), applied(True), looked_at(unet__style=STYLE)),
            " In 1 of the 2 calls a LoRA acted.",
        ),
    ],
)
def test_of_loras_that_do_nothing_in_the_end_the_calls_are_counted_in_which_one_acted(
    calls: tuple[Stage, ...], says: str
) -> None:
    assert headline(run_of(*calls, applied(False, ZEROS))) == f"{ZEROS['message']}{says}"


def test_calls_after_a_lora_was_lost_in_merging_are_not_counted_as_those_in_which_it_acted() -> None:
    lost = {
        "id": "lora_arrives_weak",
        "severity": "warning",
        "message": "Only 0 % of the LoRA arrives.",
        "evidence": {"share": 0.002},
    }
    merged = applied(False, lost)
    analysis = merged.facts["lora_application"]
    analysis["unet_lora_patches"] = {"total_patched_keys": 8, "loras": {"style": {"states": {"merged": 8}}}}
    run = run_of(merged, looked_at(unet__style=STYLE))
    assert headline(run) == lost["message"]
    before = run_of(looked_at(unet__style=STYLE), merged, looked_at(unet__style=STYLE))
    assert headline(before) == f"{lost['message']} In 1 of the 2 calls a LoRA acted."


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (
            (looked_at(unet__style=STYLE),),
            "The LoRA acts in the call: style on 8 layers of unet at strength 1.",
        ),
        (
            (looked_at(ZEROS, unet__style=STYLE), looked_at(unet__style=STYLE, text_encoder__style=WORDS)),
            "The LoRA acts in the last call: style on 8 layers of unet at strength 1 and "
            "3 layers of text_encoder at strength 1, which the call scales by 0.5.",
        ),
        (
            (looked_at(unet__b=MIXED, unet__a=STYLE, unet__c=OFF),),
            "At least one of the LoRAs acts in the call: a on 8 layers of unet at strength 1; "
            "b on 8 layers of unet, merged (its strength is set to 0.5 to 1 now).",
        ),
    ],
)
def test_loras_that_were_there_before_the_watch_are_said_to_act(stages: tuple[Stage, ...], says: str) -> None:
    run = run_of(*stages)
    assert acting_lora(run) == f"{says} ‖ΔW‖ / ‖W‖ is known only of what is loaded inside the watch."
    assert says in unescape(to_html(run))
    told = standing(run)
    assert told is not None
    assert (told.words, told.is_well) == ("acts", True)


@pytest.mark.parametrize(
    "stage",
    [
        looked_at(ZEROS, unet__style=STYLE),
        looked_at(unet__style=OFF),
        looked_at(),
        Stage("generation", 0.2, 8.0, facts={"recipe": {"loras": {"unet.style": STYLE}}}),
        replace(looked_at(unet__style=STYLE), error="RuntimeError"),
    ],
    ids=["they do nothing", "they are off", "there are none", "nobody looked", "the call failed"],
)
def test_loras_that_were_there_before_are_not_said_to_act(stage: Stage) -> None:
    assert acting_lora(run_of(stage)) is None


NAN = TensorFacts((1,), "float32", "cpu", 4, 1, nan_count=1)
NAN_MADE = Stage("denoising", 0.3, 4.0, tensors={"latent": NAN})
CHANGED = {
    "id": "lora_changed_in_call",
    "severity": "info",
    "message": "LoRAs were changed while the call ran: set_adapters after step 1 of 3.",
}


@pytest.mark.parametrize(
    ("stage", "because"),
    [
        (looked_at(CHANGED, unet__style=STYLE), f". {CHANGED['message']}"),
        (
            replace(looked_at(unet__style=STYLE), children=(NAN_MADE,)),
            ": the last call made NaN or Inf, which may come from it.",
        ),
        (
            Stage("generation", 0.2, 8.0, facts={"recipe": {"loras": {"unet.style": STYLE}}}),
            ": what it did in the last call was not measured.",
        ),
        (replace(looked_at(unet__style=STYLE), error="RuntimeError"), ": the last call failed."),
    ],
    ids=["changed between steps", "NaN", "nobody looked", "the call failed"],
)
def test_of_a_lora_on_the_models_of_the_last_call_it_is_said_why_nothing_is_known(
    stage: Stage, because: str
) -> None:
    run = run_of(stage)
    says = f"Whether the LoRA acts is unknown{because}"
    assert standing(run) == ("unknown", says, None)
    assert says in unescape(to_html(run))


def test_nothing_is_said_of_loras_where_the_last_call_has_none() -> None:
    assert standing(run_of(looked_at(CHANGED, unet__style=STYLE), looked_at())) is None
    assert standing(run_of(call())) is None


@pytest.mark.parametrize("change", [applied(False, ZEROS), applied(True)], ids=["zeros", "switched off"])
def test_what_one_model_lost_leaves_the_loras_on_others_as_they_were(change: Stage) -> None:
    alone = replace(change, facts={**change.facts, "only_on": "unet"})
    predicted = {"predicted": True, "relative_change": 0.2}
    alone.facts["lora_application"]["unet_weight_changes"] = predicted
    both = looked_at(unet__style=OFF, text_encoder__style=STYLE)
    says = "The LoRA acts in the call: style on 8 layers of text_encoder at strength 1."
    assert (acting_lora(run_of(alone, both)) or "").startswith(says)
    assert acting_lora(run_of(alone, looked_at(unet__style=OFF))) is None
    assert acting_lora(run_of(both, alone)) is None


def call_with(strength: float | None, active: int = 2, content: str = "a") -> Stage:
    """A call with "style" on the U-Net; without any LoRA where there is no strength."""
    style = {"strength": [strength, strength], "layers": 2, "active": active, "content": content}
    lora = {"unet.style": style}
    return Stage("generation", 0.2, 8.0, facts={"recipe": {"loras": {} if strength is None else lora}})


def loaded(strength: float) -> Stage:
    stage = applied(True, share=0.199)
    style = {"states": {"lazy": 2}, "strengths": [strength], "delta_norm": 1.0, "relative_change": 0.199}
    facts = {**stage.facts["lora_application"], "unet_lora_patches": {"loras": {"style": style}}}
    return replace(stage, facts={"lora_application": facts})


NOT_LOADED = {"id": "lora_not_loaded", "severity": "critical", "message": "None of it is on the model."}


@pytest.mark.parametrize(
    ("stages", "idle"),
    [
        ((call(ZEROS), call_with(1.0)), None),
        ((call_with(1.0), call(ZEROS)), ZEROS["message"]),
        ((call(ZEROS), call_with(1.0, active=0)), ZEROS["message"]),
        ((call(ZEROS), call_with(None)), ZEROS["message"]),
        ((applied(False, ZEROS), call_with(1.0)), None),
        ((applied(False, NOT_LOADED), call_with(1.0)), NOT_LOADED["message"]),
    ],
    ids=["a call before", "the last call", "inactive", "no more there", "a stage before", "another file"],
)
def test_a_lora_that_acts_in_the_last_call_is_not_said_to_do_nothing(
    stages: tuple[Stage, ...], idle: str | None
) -> None:
    assert idle_lora(run_of(*stages)) == idle


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (call_with(1.0), "The LoRA acts: ‖ΔW‖ / ‖W‖ is 20 % in the denoiser."),
        (
            call_with(0.1),
            "The LoRA acts at strength 0.1 in the last call, not at 1: other code set it. "
            "‖ΔW‖ / ‖W‖ was 20 % in the denoiser before.",
        ),
        (
            call_with(1.0, content="b"),
            "The LoRA acts with other factors in the last call than in the first: other code wrote them. "
            "‖ΔW‖ / ‖W‖ was 20 % in the denoiser before.",
        ),
        (call_with(None), None),
        (call(), "The LoRA acts: ‖ΔW‖ / ‖W‖ is 20 % in the denoiser."),
    ],
    ids=["as it was set", "scaled by other code", "trained", "a clean model in its place", "not told"],
)
def test_how_a_lora_acts_is_told_by_the_last_call_too(last: Stage, words: str | None) -> None:
    told = acting_lora(run_of(loaded(1.0), call_with(1.0), last))
    assert (told or "").removesuffix(" 1 weight in use confirmed it.") == (words or "")


@pytest.mark.parametrize(("steps", "says"), [(1, None), (0, ZEROS["message"])])
def test_loras_that_were_switched_off_between_two_steps_acted_in_those_before(
    steps: int, says: str | None
) -> None:
    off = applied(False, ZEROS)
    off = replace(off, facts={**off.facts, "after_step": steps})
    assert idle_lora(run_of(applied(True, share=0.199), replace(call(), children=(off,)))) == says


def put_on(effective: bool | None = True, **states: int) -> Stage:
    on = applied(effective, share=0.199)
    patches = {"loras": {"a": lora(0.199, **states)}}
    return replace(
        on, facts={"lora_application": {**on.facts["lora_application"], "unet_lora_patches": patches}}
    )


def ran_with(loras: dict[str, Any] | None) -> Stage:
    return replace(call(), facts={"recipe": {"loras": loras}})


WITH, WITHOUT, NOT_SEEN = ran_with({"unet.a": {}}), ran_with({}), ran_with(None)


@pytest.mark.parametrize(
    ("stages", "calls"),
    [
        ((put_on(lazy=8), WITHOUT), 1),
        ((WITH, put_on(lazy=8), WITHOUT, WITHOUT), 2),
        ((put_on(lazy=8), WITHOUT, WITH), 0),
        ((put_on(lazy=8), WITH, WITHOUT), 0),
        ((put_on(lazy=8), NOT_SEEN), 0),
        ((put_on(merged=8), WITHOUT), 0),
        ((put_on(lazy=8), put_on(False, merged=8), put_on(False), WITHOUT), 0),
        ((put_on(lazy=8), put_on(False, lazy=8), WITHOUT), 1),
        ((put_on(lazy=8), put_on(None, lazy=8), WITHOUT), 0),
        ((WITHOUT, put_on(lazy=8)), 0),
    ],
)
def test_a_lora_that_no_call_had_since_is_on_other_models(stages: tuple[Stage, ...], calls: int) -> None:
    run = run_of(*stages)
    found = [finding for finding in diagnose(run) if finding.id == "model.lora_elsewhere"]
    assert [finding.evidence["calls"] for finding in found] == [calls] * bool(calls)
    assert idle_lora(run) == (found[0].message if found else None)
    assert not (found and acting_lora(run))


def merged_into(**before: str) -> Stage:
    """A LoRA that was merged into weights of these fingerprints, and is no longer beside them."""
    left = {"unet": [1.0], "clip": [1.0] if "text_encoder" in before else []}
    facts = {"effective": False, "findings": [], "left_in_weights": left}
    weights = {
        "weights_before": before,
        "weights_left": {name: f"{one} and a LoRA" for name, one in before.items()},
    }
    taken_off = {"method": "unload_lora_weights", **weights, "lora_application": facts}
    return Stage("lora_application", 0.0, 0.1, facts=taken_off)


def ran_on(loras: dict[str, Any] | None = None, **models: str | None) -> Stage:
    return replace(call(), facts={"recipe": {"loras": loras or {}, "models": models}})


@pytest.mark.parametrize(
    ("last", "is_back"),
    [
        (ran_on(unet="bare", vae="v"), True),
        (ran_on(unet="merged", vae="v"), False),
        (ran_on(unet=None), False),
        (ran_on({"unet.a": {"active": 2, "merged": 2}}, unet="bare"), True),
        (ran_on({"unet.b": {"active": 2}}, unet="bare"), False),
        (merged_into(unet="others"), False),
    ],
    ids=["back", "merged", "not read", "listed as merged", "another beside", "merged again"],
)
def test_a_lora_does_nothing_where_the_weights_are_those_from_before_it_was_merged(
    last: Stage, is_back: bool
) -> None:
    run = run_of(merged_into(unet="bare"), ran_on(unet="bare"), last)
    assert ("the same as before it was merged" in (idle_lora(run) or "")) is is_back
    assert any(finding.id == "model.lora_elsewhere" for finding in diagnose(run)) is is_back
    assert not (is_back and acting_lora(run))


@pytest.mark.parametrize("method", ["unfuse_lora", "unmerge_adapter"])
def test_a_lora_that_was_taken_out_of_the_weights_is_not_said_to_be_in_others(method: str) -> None:
    """Where nothing is lost in rounding, the weights are the same as before it was merged."""
    facts = {"method": method, "lora_application": {"effective": True, "findings": []}}
    taken_out = Stage("lora_application", 0.0, 0.1, facts=facts)
    run = run_of(merged_into(unet="bare"), ran_on(unet="merged"), taken_out, ran_on(unet="bare"))
    assert idle_lora(run) is None
    assert not any(finding.id == "model.lora_elsewhere" for finding in diagnose(run))


@pytest.mark.parametrize(
    ("loras", "content", "is_elsewhere"),
    [({}, "a", True), ({}, "b", False), ({"unet.a": MIXED}, "a", False), (None, "a", False)],
    ids=["exchanged", "other weights", "the same model", "not looked at"],
)
def test_a_fused_lora_does_nothing_where_another_model_runs_with_the_weights_from_before(
    loras: dict[str, Any] | None, content: str, is_elsewhere: bool
) -> None:
    fused = changed({"a": {**lora(0.05, merged=9), "strengths": [1.0]}})
    fused = replace(fused, facts={**fused.facts, "method": "fuse_lora", "weights_before": {"unet": "a"}})
    ran = replace(call(), facts={"recipe": {"loras": loras, "models": {"unet": content}}, "idle_loras": []})
    found = {finding.id for finding in diagnose(run_of(fused, ran))}
    assert ("model.lora_elsewhere" in found) is is_elsewhere
    assert (acting_lora(run_of(fused, ran)) is None) is is_elsewhere


def test_of_two_parts_that_a_lora_was_merged_into_one_may_still_have_it() -> None:
    run = run_of(merged_into(unet="bare", text_encoder="plain"), ran_on(unet="bare", text_encoder="merged"))
    assert idle_lora(run) is None
    assert acting_lora(run) == "The LoRA acts in the text encoders: it is merged into the weights."


def nan(acting: int) -> dict[str, Any]:
    message = "Denoiser: the LoRA's change of 1 weight holds NaN or Inf: a."
    return {
        "id": "lora_not_finite",
        "severity": "error",
        "message": message,
        "evidence": {"keys": 1, "acting": acting},
    }


def test_a_lora_with_nan_acts_in_no_sentence_of_any_surface() -> None:
    run = run_of(applied(True, nan(1), share=0.199), call())
    assert (acting_lora(run), spoiling_lora(run)) == (None, nan(1)["message"])
    page = to_html(run)
    assert "NaN or Inf" in page
    assert "The LoRA acts" not in page
    assert "in use confirmed it" not in page


def test_nan_in_an_adapter_that_is_off_spoils_nothing_of_one_that_acts() -> None:
    run = run_of(applied(True, nan(0), share=0.199), call())
    assert spoiling_lora(run) is None
    assert acting_lora(run) is not None


def test_a_fault_beside_the_same_set_again_is_no_reason_why_loras_do_nothing() -> None:
    as_before = {"id": "lora_as_before", "severity": "info", "message": "Nothing changed."}
    partly = {
        "id": "lora_partly_loaded",
        "severity": "error",
        "message": "1 of 3 modules is not on the model.",
    }
    run = run_of(applied(True, partly, share=0.199), applied(False, partly, as_before), call())
    assert idle_lora(run) is None
    assert acting_lora(run) is not None


def changed(loras: dict[str, Any], *findings: dict[str, Any]) -> Stage:
    """A change of strengths of LoRAs, or one that took some off: by 0.15 of the weights."""
    changes = {"relative_change": 0.15, "predicted": True}
    facts = {
        "effective": True,
        "findings": [*findings],
        "unet_weight_changes": changes,
        "clip_weight_changes": {},
    }
    facts["unet_lora_patches"] = {"loras": loras, "total_patched_keys": len(loras)}
    return Stage("lora_application", 0.0, 0.1, facts={"lora_application": facts})


@pytest.mark.parametrize(
    ("loras", "words"),
    [
        ({"a": lora(0.05, lazy=9)}, "The LoRA acts: ‖ΔW‖ / ‖W‖ is 5 % in the denoiser."),
        (
            {"a": lora(0.05, lazy=9), "b": lora(0.2, merged=3, inactive=1), "c": lora(0.3, inactive=2)},
            "The LoRAs act: ‖ΔW‖ / ‖W‖ is 5 % (a), 20 % (b) in the denoiser. LoRA c is off or at strength 0.",
        ),
        ({"a": lora(None, lazy=9)}, "The LoRA acts."),
        ({"a": lora(0.05, inactive=9), "b": lora(None, failed=1)}, None),
        ({"a": {**lora(0.0, merged=9), "delta_norm": 0.0}}, None),
        ({}, None),
    ],
    ids=["weaker", "two of three", "not measured", "switched off", "fused at 0", "unloaded"],
)
def test_a_lora_acts_as_it_is_on_the_model_now_not_as_it_changed_last(
    loras: dict[str, Any], words: str | None
) -> None:
    assert acting_lora(run_of(applied(True, share=0.2), changed(loras), call())) == words


@pytest.mark.parametrize(
    ("method", "others", "words"),
    [
        ("load_lora_weights", {}, "The LoRA acts: ‖ΔW‖ / ‖W‖ is 15 % in the denoiser."),
        ("set_adapters", {}, "The LoRA acts."),
        (
            "load_lora_weights",
            {"b": lora(0.2, inactive=9)},
            "The LoRA acts. LoRA b is off or at strength 0.",
        ),
    ],
    ids=["alone", "set since", "beside another"],
)
def test_a_dora_is_as_strong_as_what_loading_it_changed(
    method: str, others: dict[str, Any], words: str
) -> None:
    change = changed({"a": {**lora(None, lazy=9), "adapter_types": {"dora": 9}}, **others})
    change = replace(change, facts={**change.facts, "method": method})
    assert acting_lora(run_of(change, call())) == words


def test_a_lora_beside_one_that_stays_in_the_weights_does_not_act_alone() -> None:
    fused = changed({"a": {**lora(0.05, merged=9), "strengths": [1.0]}})
    fused = replace(fused, facts={**fused.facts, "method": "fuse_lora"})
    off = taken_off("unload_lora_weights", False, {"unet": [1.0], "clip": []})
    words = "The LoRA acts: ‖ΔW‖ / ‖W‖ is 5 % in the denoiser."
    besides = " What was fused before stays in the weights of the denoiser, and acts too."
    again = changed({"a": lora(0.05, lazy=9)})
    assert acting_lora(run_of(fused, off, again, call())) == words + besides
    assert acting_lora(run_of(again, call())) == words


def test_what_taking_a_fused_dora_off_leaves_open_is_settled_by_what_stays_in_the_weights() -> None:
    open_change = {
        "id": "lora_not_seen",
        "severity": "warning",
        "message": "Whether the LoRA acts is unknown.",
    }
    fused = changed({"a": {**lora(None, merged=9), "strengths": [1.0], "adapter_types": {"dora": 9}}})
    fused = replace(fused, facts={**fused.facts, "method": "fuse_lora"})
    off = taken_off("unload_lora_weights", False, {"unet": [1.0], "clip": []})
    analysis = {**off.facts["lora_application"], "effective": None, "findings": [open_change]}
    off = replace(off, facts={**off.facts, "lora_application": analysis})
    run = run_of(fused, off, call())
    assert acting_lora(run) == "The LoRA acts in the denoiser: it is merged into the weights."
    assert find_stage_findings(run) == []
    alone = run_of(changed({}, open_change), call())
    assert [finding.id for finding in find_stage_findings(alone)] == ["lora_not_seen"]


def test_a_lora_of_zeros_beside_others_is_named() -> None:
    loras = {"a": lora(0.05, lazy=9), "b": {**lora(0.0, lazy=9), "delta_norm": 0.0}}
    words = "is 5 % in the denoiser. LoRA b changes nothing: all its changes are zero."
    assert acting_lora(run_of(changed(loras), call())) == f"The LoRA acts: ‖ΔW‖ / ‖W‖ {words}"


def test_a_lora_that_was_loaded_after_all_calls_ran_in_none() -> None:
    loras = {"a": lora(0.05, lazy=9)}
    words = "The LoRA acts: ‖ΔW‖ / ‖W‖ is 5 % in the denoiser."
    assert acting_lora(run_of(changed(loras), call())) == words
    assert acting_lora(run_of(call(), changed(loras))) == f"{words} No call has run since this change."
    assert acting_lora(run_of(changed(loras))) == words


@pytest.mark.parametrize(("over", "is_told"), [(1, False), (2, True)])
def test_a_lora_that_came_after_the_last_step_of_a_call_ran_in_none(over: int, is_told: bool) -> None:
    change = changed({"a": lora(0.05, lazy=9)})
    change = replace(change, facts={**change.facts, "after_step": over})
    steps = Steps(started=(0.2, 0.5), seconds=(0.2, 0.2))
    inside = replace(call(), children=(Stage("denoising", 0.1, 8.0, steps=steps), change))
    says = acting_lora(run_of(inside))
    assert says is not None
    assert (" No call has run since this change." in says) is is_told


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (WEAK, WEAK["message"]),
        (NOISY, f"The LoRA acts: ‖ΔW‖ / ‖W‖ is 5 % in the denoiser. {NOISY['message']}"),
    ],
    ids=["weak", "noisy"],
)
def test_what_arrived_of_a_fused_lora_is_said_in_place_of_what_was_confirmed(
    finding: dict[str, Any], words: str
) -> None:
    loaded, fused = changed({"a": lora(0.05, lazy=9)}), changed({"a": lora(0.05, merged=9)}, finding)
    assert acting_lora(run_of(loaded, fused, call())) == words
    assert acting_lora(run_of(loaded, fused, taken_off("unload_lora_weights", False), call())) == (
        words if finding is WEAK else words.replace("denoiser.", "denoiser. It is merged into the weights.")
    )


@pytest.mark.parametrize(
    ("share", "states", "does_nothing"),
    [(0.004, {"merged": 9}, True), (0.02, {"merged": 9}, False), (0.004, {"merged": 9, "lazy": 1}, False)],
    ids=["lost", "some arrives", "another acts beside"],
)
def test_a_lora_of_which_nothing_arrives_does_nothing(
    share: float, states: dict[str, int], does_nothing: bool
) -> None:
    fused = changed({"a": lora(0.05, **states)}, {**WEAK, "evidence": {"share": share}})
    run = run_of(changed({"a": lora(0.05, lazy=9)}), fused, call())
    assert (idle_lora(run) == WEAK["message"]) is does_nothing
    assert headline(run).startswith(WEAK["message"]) is does_nothing


def test_it_is_not_said_to_act_after_the_adapter_of_what_was_lost_is_gone() -> None:
    fused = changed({"a": lora(0.05, merged=9)}, {**WEAK, "evidence": {"share": 0.004}})
    off = taken_off("unload_lora_weights", False, {"unet": [1.0], "clip": []})
    run = run_of(changed({"a": lora(0.05, lazy=9)}), fused, off, call())
    assert idle_lora(run) == WEAK["message"]
    assert acting_lora(run) is None


def test_a_call_after_a_lora_was_taken_off_has_none() -> None:
    loaded, off = changed({"a": lora(0.05, lazy=9)}), taken_off("unload_lora_weights", True)
    off.facts["lora_application"]["unet_weight_changes"] = {"predicted": True}
    assert acting_lora(run_of(loaded, call(), off)) is None
    words = "No LoRA acts: unload_lora_weights took off what was on, before the last call."
    assert acting_lora(run_of(loaded, off, call())) == words


OPEN = {"id": "lora_encoder_not_run", "severity": "warning", "message": "Whether the LoRA acts is unknown."}


@pytest.mark.parametrize(
    ("stages", "words", "is_well"),
    [
        ((applied(False, ZEROS),), "does nothing", False),
        ((call(OPEN),), "unknown", None),
        ((changed({"a": lora(0.05, lazy=9)}), call()), "acts", True),
        ((changed({"a": lora(0.05, merged=9)}, WEAK), call()), "arrives weak", False),
        ((changed({"a": lora(0.05, merged=9)}, NOISY), call()), "arrives noisy", False),
    ],
    ids=["zeros", "not known", "acts", "weak", "noisy"],
)
def test_two_words_and_sentences_say_the_same_of_loras_on_every_surface(
    stages: tuple[Stage, ...], words: str, is_well: bool | None
) -> None:
    run = run_of(*stages)
    told = standing(run)
    assert told is not None
    assert (told.words, told.is_well) == (words, is_well)
    page = to_html(run)
    assert f">{words}<" in page.replace("\n", "")
    assert told.says in unescape(page)
    assert told.says in unescape(to_markdown(run))


@pytest.mark.parametrize(
    ("id", "message", "words"),
    [
        ("lora_without_values", "Denoiser: 9 changes are without values.", "without values"),
        ("lora_not_finite", "Denoiser: the LoRA's changes of 9 weights hold NaN or Inf.", "NaN or Inf"),
    ],
)
def test_what_spoils_a_picture_has_its_own_two_words(id: str, message: str, words: str) -> None:
    spoils = {"id": id, "severity": "error", "message": message, "evidence": {"acting": 9}}
    told = standing(run_of(changed({"a": lora(None, lazy=9)}, spoils), call()))
    assert told == (words, message, False)


def test_a_new_adapter_that_ran_untrained_is_told_as_new() -> None:
    untrained = {
        "id": "lora_untrained",
        "severity": "info",
        "message": "The new adapter changes nothing yet.",
    }
    run = run_of(applied(False, untrained), call(ZEROS))
    assert idle_lora(run) == untrained["message"]
    assert [one.id for one in find_stage_findings(run)] == ["lora_untrained"]
    assert (
        idle_lora(run_of(applied(False, untrained), applied(True, share=0.1), call(ZEROS)))
        == ZEROS["message"]
    )


def test_a_comparison_begins_with_what_became_of_the_lora() -> None:
    good, zeros = run_of(changed({"a": lora(0.05, lazy=9)}), call()), run_of(applied(False, ZEROS), call())
    acts = "The LoRA acts: ‖ΔW‖ / ‖W‖ is 5 % in the denoiser."
    worse, better = (what_changed([now], [was]).headline for now, was in ((zeros, good), (good, zeros)))
    assert worse.startswith(f"{ZEROS['message']} Before, the LoRA acted.")
    assert better.startswith(f"{acts} In the run before: {ZEROS['message']}")
    assert "LoRA" not in what_changed([good], [good]).headline
    assert "LoRA" not in what_changed([good], [run_of(call())]).headline
    assert "LoRA" not in what_changed([zeros, good], [good]).headline
    assert what_changed([zeros], [run_of(call())]).headline.startswith(ZEROS["message"])
    without = what_changed([run_of(call())], [zeros]).headline
    assert without.startswith(f"In the run before: {ZEROS['message']}")


def test_a_remark_on_how_loras_are_set_is_that_of_the_last_change() -> None:
    several = [changed({}, {**REMARK, "message": text}) for text in ("first", "last")]
    assert [one.message for one in find_stage_findings(run_of(*several))] == ["last"]


NOT_ACTIVE = {"id": "lora_not_active", "severity": "warning", "message": "The LoRA b changes nothing."}
SAME = {"id": "lora_as_before", "severity": "info", "message": "Nothing changed."}


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ((changed({"a": lora(0.1, lazy=8), "b": lora(None, lazy=8)}),), []),
        (
            (call(), changed({"a": lora(0.1, lazy=8), "b": lora(None, lazy=8)})),
            ["lora_not_active", "lora_as_before"],
        ),
        (
            (changed({"a": lora(0.1, lazy=8), "b": lora(None, inactive=8)}),),
            ["lora_not_active", "lora_as_before"],
        ),
        ((changed({"c": lora(0.1, lazy=8)}),), ["lora_not_active", "lora_as_before"]),
        ((call(),), ["lora_not_active", "lora_as_before"]),
    ],
    ids=["switched on", "after a call", "still off", "another", "used so"],
)
def test_an_adapter_that_is_switched_on_before_any_call_was_never_off(
    stages: tuple[Stage, ...], said: list[str]
) -> None:
    added = changed({"a": lora(0.1, lazy=8), "b": lora(None, inactive=8)}, NOT_ACTIVE, SAME)
    assert [one.id for one in find_stage_findings(run_of(added, *stages, call()))] == said


def test_what_one_model_left_out_is_not_told_where_another_took_it() -> None:
    left_out = {
        "id": "lora_part_left_out",
        "severity": "info",
        "message": "25 modules are for the text encoders.",
    }
    on_unet, on_words = changed({"a": lora(0.1, lazy=8)}, left_out), changed({})
    on_words.facts["lora_application"]["clip_lora_patches"] = {"loras": {"a": lora(0.1, lazy=8)}}
    first = replace(on_unet, facts={**on_unet.facts, "only_on": "unet"})
    second = replace(on_words, facts={**on_words.facts, "only_on": "text_encoder"})
    others = changed({})
    others.facts["lora_application"]["clip_lora_patches"] = {"loras": {"b": lora(0.1, lazy=8)}}
    assert find_stage_findings(run_of(first, second, call())) == []
    for run in (
        run_of(first, call()),
        run_of(first, call(), second),
        run_of(first, others),
        run_of(on_unet, second),
    ):
        assert [one.id for one in find_stage_findings(run)] == ["lora_part_left_out"]


def call_that_scales(**loras: dict[str, Any]) -> Stage:
    named = {
        name.replace("__", "."): {"active": 9, "strength": (1.0, 1.0), **one} for name, one in loras.items()
    }
    return replace(call(), facts={"recipe": {"loras": named}})


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (call_that_scales(unet__a={"call_scale": 0.5}), " The last call scaled this by 0.5 in the unet."),
        (
            call_that_scales(unet__a={"call_scale": 0.5}, text_encoder__a={"call_scale": 0.5}),
            " The last call scaled this by 0.5 in the unet and by 0.5 in the text_encoder.",
        ),
        (call_that_scales(unet__a={"call_scale": 1.0}), ""),
        (call_that_scales(unet__a={}), ""),
        (call_that_scales(unet__b={"call_scale": 0.5}, unet__a={}), ""),
    ],
    ids=["one", "two", "by 1", "not scaled", "another"],
)
def test_what_the_last_call_scaled_a_lora_by_is_said_with_its_strength(last: Stage, words: str) -> None:
    run = run_of(changed({"a": {**lora(0.05, lazy=9), "strengths": [1.0]}}), call(), last)
    assert acting_lora(run) == f"The LoRA acts: ‖ΔW‖ / ‖W‖ is 5 % in the denoiser.{words}"


def taken_off(
    method: str, effective: bool, left: dict[str, list[float]] | None = None, **loras: dict[str, Any]
) -> Stage:
    patches = {"loras": loras, "total_patched_keys": len(loras)}
    facts = {"effective": effective, "findings": [], "unet_lora_patches": patches}
    facts |= {} if left is None else {"left_in_weights": left}
    return Stage("lora_application", 0.0, 0.1, facts={"method": method, "lora_application": facts})


@pytest.mark.parametrize(
    ("stage", "is_in_weights"),
    [
        (taken_off("unload_lora_weights", False), True),
        (taken_off("unload_lora_weights", False, {"unet": [1.0], "clip": []}), True),
        (taken_off("unload_lora_weights", False, {"unet": [], "clip": []}), False),
        (taken_off("merge_and_unload", False), True),
        (taken_off("set_adapters", False), False),
        (taken_off("delete_adapters", False, a=lora(0.05, lazy=9)), False),
    ],
    ids=[
        "fused",
        "fused at 1",
        "set to 0 by other code",
        "merged by PEFT",
        "taken off by other code",
        "another deleted",
    ],
)
def test_a_lora_that_was_taken_off_without_any_change_is_in_the_weights(
    stage: Stage, is_in_weights: bool
) -> None:
    run = run_of(changed({"a": lora(0.05, lazy=9)}), stage, call_that_scales())
    words = "The LoRA acts: ‖ΔW‖ / ‖W‖ is 5 % in the denoiser. It is merged into the weights."
    assert acting_lora(run) == (words if is_in_weights else None)


def test_a_lora_that_was_off_and_is_deleted_is_no_longer_named() -> None:
    on = changed({"a": lora(0.05, lazy=9), "b": lora(None, inactive=9)})
    acts = "The LoRA acts: ‖ΔW‖ / ‖W‖ is 5 % in the denoiser."
    assert acting_lora(run_of(on)) == f"{acts} LoRA b is off or at strength 0."
    deleted = taken_off("delete_adapters", False, {"unet": [], "clip": []}, a=lora(0.05, lazy=9))
    assert acting_lora(run_of(on, deleted)) == acts


def test_a_lora_that_was_fused_before_another_is_in_the_weights_beside_it() -> None:
    off = taken_off("unload_lora_weights", False, {"unet": [1.0], "clip": []})
    one = (changed({"a": lora(0.05, lazy=9)}), off)
    words = "The LoRA acts: ‖ΔW‖ / ‖W‖ is 5 % in the denoiser. It is merged into the weights."
    assert acting_lora(run_of(*one, call_that_scales())) == words
    other = changed({"b": lora(0.2, lazy=9)})
    assert acting_lora(run_of(*one, other, off, call_that_scales())) == (
        f"{words.replace('5 %', '20 %')} What was fused before stays in the weights of the denoiser, and acts too."
    )


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("unload_lora_weights", "took off"),
        ("delete_adapters", "took off"),
        ("disable_lora", "switched off"),
        ("set_adapters", "switched off"),
    ],
)
def test_a_lora_that_was_taken_off_after_the_last_call_acted_in_it(method: str, words: str) -> None:
    off = taken_off(method, True, {"unet": [], "clip": []})
    off.facts["lora_application"]["unet_weight_changes"] = {"predicted": True, "relative_change": 0.05}
    said = f" After the last call, {method} {words} what was on."
    on = changed({"a": {**lora(0.05, lazy=9), "strengths": [1.0]}})
    with_it = looked_at(unet__a=STYLE)
    acts = "The LoRA acts: ‖ΔW‖ / ‖W‖ is 5 % in the denoiser."
    assert standing(run_of(on, with_it, off)) == ("acts", f"{acts}{said}", True)
    there = acting_lora(run_of(with_it))
    assert acting_lora(run_of(with_it, off)) == f"{there}{said}"
    one_of_two = replace(off, facts={**off.facts, "only_on": "unet"})
    assert acting_lora(run_of(with_it, one_of_two)) == f"{there}{said}"
    both = looked_at(unet__a=STYLE, text_encoder__a=STYLE)
    told = standing(run_of(both, one_of_two))
    assert told == (
        "unknown",
        "Whether the LoRA acts is unknown: no call has run since the last change.",
        None,
    )


def test_a_lora_that_did_nothing_in_the_last_call_is_not_said_to_have_acted_once_it_is_taken_off() -> None:
    off = taken_off("unload_lora_weights", True, {"unet": [], "clip": []})
    off.facts["lora_application"]["unet_weight_changes"] = {"predicted": True, "relative_change": 0.05}
    on = changed({"a": {**lora(0.05, lazy=9), "strengths": [1.0]}})
    says = f"{ZEROS['message']} After the last call, unload_lora_weights took off what was on."
    for before in ((on, looked_at(ZEROS, unet__a=STYLE)), (looked_at(ZEROS, unet__a=STYLE),)):
        assert standing(run_of(*before, off)) == ("does nothing", says, False)
        assert acting_lora(run_of(*before, off)) is None
    says = f"Whether the LoRA acts is unknown. {CHANGED['message']}"
    assert standing(run_of(looked_at(CHANGED, unet__a=STYLE), off)) == ("unknown", says, None)


def test_layers_that_get_their_shape_back_are_no_lora_that_acts() -> None:
    off = taken_off("unload_lora_weights", True, {"unet": [], "clip": []})
    off.facts["lora_application"]["unet_weight_changes"] = {"predicted": False, "relative_change": None}
    on = changed({"a": lora(0.05, lazy=9)})
    assert standing(run_of(on, off, looked_at())) == (
        "taken off",
        "No LoRA acts: unload_lora_weights took off what was on, before the last call.",
        None,
    )


def test_a_call_of_another_pipeline_without_the_lora_does_not_take_it_off() -> None:
    kinds = ("StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline")
    base, refiner, again = (
        replace(one, facts={**one.facts, "pipeline": {"class_name": kind}})
        for one, kind in zip(
            (call_that_scales(unet__a={}), call_that_scales(), call_that_scales()),
            (*kinds, kinds[0]),
            strict=True,
        )
    )
    stages = (changed({"a": {**lora(0.05, lazy=9), "strengths": [1.0]}}), base)
    assert acting_lora(run_of(*stages, refiner)) == "The LoRA acts: ‖ΔW‖ / ‖W‖ is 5 % in the denoiser."
    assert acting_lora(run_of(*stages, again)) is None


def test_findings_that_leave_it_open_are_those_that_say_so() -> None:
    says_so = {id for id, row in VERDICTS.items() if row.says.startswith("Whether the LoRA acts")}
    assert says_so == OPEN_VERDICTS


@pytest.mark.parametrize("stage", [applied(None), applied(False, REMARK), call()])
def test_what_is_not_known_or_only_a_remark_is_no_sentence(stage: Stage) -> None:
    run = run_of(stage)
    assert (idle_lora(run), acting_lora(run)) == (None, None)


def test_damaged_facts_are_passed_over() -> None:
    odd: dict[str, Any] = {"effective": True, "unet_weight_changes": {"checked": [1], "relative_change": "x"}}
    assert (
        acting_lora(run_of(Stage("lora_application", 0.0, 1.0, facts={"lora_application": odd})))
        == "The LoRA acts."
    )


REFUSED = "None of the file's 3 modules is on the model: 3 of 3 modules are for another architecture."


@pytest.mark.parametrize(
    ("id", "evidence", "names_it"),
    [
        ("lora_not_loaded", {"cause": "lora_other_architecture"}, True),
        ("lora_unreadable", {}, True),
        ("lora_not_loaded", {}, False),
        ("lora_not_applied", {}, False),
    ],
)
def test_a_loader_that_fails_is_explained_by_what_the_file_shows(
    id: str, evidence: dict[str, str], names_it: bool
) -> None:
    finding = {"id": id, "severity": "critical", "message": REFUSED, "evidence": evidence}
    failed = replace(applied(False, finding), success=False, error="RuntimeError: size mismatch for a.weight")
    said = headline(run_of(failed))
    why = f"{REFUSED[:-1]}. It raised " if names_it else ""
    assert said == f"lora_application failed after 100 ms: {why}RuntimeError: size mismatch for a.weight."


def test_a_lora_with_nan_comes_before_the_tensors_that_it_spoilt() -> None:
    tensors = Finding("values.not_finite", "error", "latent is the first tensor with NaN.", {})
    lora = Finding("lora_not_finite", "error", "The LoRA's change of 1 weight holds NaN.", {})
    picture = Finding("picture.not_finite", "error", "1 of 1 picture holds NaN or infinity.", {})
    run = replace(run_of(call()), findings=(picture, tensors, lora))
    assert headline(run).startswith(lora.message)
    assert headline(replace(run, findings=(tensors,))).startswith(tensors.message)


IDLE = {
    "lora": "b",
    "effective": False,
    "says": "b: 0 of 7 modules used; The LoRA changes nothing: all are zero.",
}
ACTS = {"lora": "a", "effective": True, "says": "a: 7 of 7 modules used"}
UNKNOWN = {"lora": "c", "effective": None, "says": "c: unknown (nothing was read)"}
A, B = "LoRA a: 7 of 7 modules used.", "LoRA b: 0 of 7 modules used; The LoRA changes nothing: all are zero."


@pytest.mark.parametrize(
    ("verdicts", "idle", "acting"),
    [
        ([ACTS], None, A),
        ([IDLE], B, None),
        ([IDLE, IDLE], f"{B} {B}", None),
        ([IDLE, ACTS], None, f"{A} {B}"),
        ([IDLE, UNKNOWN], None, None),
        ([], None, None),
    ],
)
def test_a_prompt_of_comfyui_says_what_its_nodes_loras_do(
    verdicts: list[dict[str, Any]], idle: str | None, acting: str | None
) -> None:
    loaders = tuple(Stage("LoraLoader", 0.1, 1.0, facts={"lora_verdicts": [one]}) for one in verdicts)
    run = run_of(Stage("generation", 0.1, 8.0, children=loaders))
    assert (idle_lora(run), acting_lora(run)) == (idle, acting)
    assert idle is None or headline(run).startswith(idle)


def test_a_component_that_is_no_denoiser_has_its_name_in_the_line() -> None:
    stage = applied(True, share=1.036)
    named = replace(stage, facts={**stage.facts, "component": "controlnet"})
    said = acting_lora(run_of(named))
    assert said is not None
    assert said.startswith("The LoRA acts: ‖ΔW‖ / ‖W‖ is 104 % in the controlnet.")


def test_a_lora_does_not_act_on_weights_that_hold_nan() -> None:
    spoilt = {"id": "weights_not_finite", "severity": "error", "message": "Denoiser: 1 weight holds NaN."}
    run = run_of(applied(True, {**spoilt, "evidence": {"acting": 1}}, share=0.2))
    assert acting_lora(run) is None
    assert spoiling_lora(run) == spoilt["message"]
