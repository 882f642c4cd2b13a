"""Prompts of ComfyUI go to the store of runs, beside their files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.comfyui.conftest import Watch
from tests.integrations.comfyui.host import Host, Interrupted, Node, latent

from sigmascope.analysis.breakdown import headline
from sigmascope.analysis.recipe import recipe_differences
from sigmascope.analysis.what_changed import what_changed
from sigmascope.history import live
from sigmascope.history.keeper import finish
from sigmascope.history.live import Announcer, LiveRun, live_runs
from sigmascope.history.store import open_store
from sigmascope.monitor.publishing import Published
from sigmascope.reports.measurements import measured

GRAPH: dict[str, Any] = {
    "1": {"class_type": "Load", "inputs": {"ckpt_name": "flux.safetensors"}},
    "2": {"class_type": "Empty", "inputs": {}},
    "3": {"class_type": "Sampler", "inputs": {"latent_image": ["2", 0], "steps": 3, "sampler_name": "euler"}},
}


def test_a_prompt_is_kept_with_what_it_ran(watch: Watch, store_file: Path) -> None:
    run = watch().run(GRAPH)
    finish()
    with open_store() as store:
        [row] = store.runs()
        assert store.record(row.number) == run
    assert (row.source, row.row.outcome, row.row.steps) == ("comfyui", "ok", 3)
    assert (row.row.pipeline or "").startswith("ComfyUI ")
    assert row.row.model == "flux.safetensors"


@pytest.mark.parametrize("hears_errors", [True, False])
@pytest.mark.parametrize("lies_in_another", [True, False])
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("a cat was planted"), "failed"),
        (torch.OutOfMemoryError("planted"), "out of memory"),
        (Interrupted(), "interrupted"),
    ],
)
def test_a_prompt_that_was_stopped_is_kept_and_told_as_that(
    error: Exception,
    outcome: str,
    lies_in_another: bool,
    hears_errors: bool,
    watch: Watch,
    host: Host,
    store_file: Path,
) -> None:
    def stop(x: Any) -> Any:
        raise error

    def expand(x: Any) -> Any:
        return {"expand": {"a": {"class_type": "Stop", "inputs": {"x": x}}}, "last": "a"}

    host.nodes |= {"Stop": Node(("LATENT",), stop), "Around": Node(("LATENT",), expand)}
    kind = "Around" if lies_in_another else "Stop"
    watched = watch()
    if not hears_errors:
        next(one for one in watched.session.instruments if one.name == "execution").stop()
    run = watched.run({**GRAPH, "4": {"class_type": kind, "inputs": {"x": ["2", 0]}}})
    finish()
    with open_store() as store:
        [row] = store.runs()
    assert (row.row.outcome, run.complete, run.facts["comfyui"]["success"]) == (outcome, True, False)
    failed = "Stop" if hears_errors else "generation"
    assert headline(run).startswith(f"{failed} failed after ")
    assert type(error).__name__ in headline(run)


@pytest.mark.parametrize(
    ("node", "change", "told"),
    [
        ("4", {"strength_model": 0.3}, ["LoraLoader (4) strength_model 0.8 → 0.3"]),
        ("3", {"steps": 4}, ["num_inference_steps 3 → 4"]),
        ("3", {"cfg": 7, "denoise": 0.5}, ["guidance_scale 5.0 → 7.0", "Sampler (3) denoise 1.0 → 0.5"]),
        ("3", {"text": "a dog"}, ["3 text a cat → a dog"]),
    ],
)
def test_a_comparison_names_what_was_set_anew_on_nodes(
    node: str, change: dict[str, Any], told: list[str], watch: Watch, host: Host, store_file: Path
) -> None:
    host.nodes["LoraLoader"] = Node(("LATENT",), lambda x, lora_name, strength_model: (x,))
    asked = {
        **GRAPH,
        "3": {**GRAPH["3"], "inputs": {**GRAPH["3"]["inputs"], "cfg": 5.0, "denoise": 1.0, "text": "a cat"}},
        "4": {
            "class_type": "LoraLoader",
            "inputs": {"x": ["2", 0], "lora_name": "a.safetensors", "strength_model": 0.8},
        },
    }
    other = {**asked, node: {**asked[node], "inputs": {**asked[node]["inputs"], **change}}}
    watched = watch()
    before = watched.run(asked)
    host.cache.clear()
    after = watched.run(other, "prompt-2")
    differences = recipe_differences([after], [before])
    assert [f"{name} {was} → {now}" for name, (was, now) in differences.items()] == told
    assert told[0] in what_changed([after], [before]).headline
    finish()
    with open_store() as store:
        assert len({row.row.recipe for row in store.runs()}) == 2


@pytest.fixture
def announcer(store_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Announcer]:
    """What tells of this process's runs, here and now and not once a second."""
    monkeypatch.setattr(live, "SECONDS", 3600.0)
    made = Announcer()
    monkeypatch.setattr(live, "_announcer", made)
    yield made
    made.end()


def test_a_prompt_in_progress_is_seen_from_outside(
    host: Host, watch: Watch, announcer: Announcer, store_file: Path
) -> None:
    seen: list[LiveRun] = []

    def look() -> None:
        announcer.tell()
        seen.extend(live_runs(f"sqlite:///{store_file}"))

    def sample(latent_image: Any, steps: int, **_: Any) -> Any:
        for _pass in range(2):  # a list of latents is sampled one after the other
            host.module("comfy.model_management").load_models_gpu([])
            host.step_through(steps)
            look()
        return (latent(),)

    host.nodes["Sampler"] = Node(("LATENT",), sample)
    run = watch().run(GRAPH)
    first, second = seen
    assert (first.id, first.name, first.stage) == (run.id, run.name, "generation/Sampler")
    assert (first.steps, first.planned) == (3, 3)
    assert (second.steps, second.planned) == (6, 6)
    assert len(second.step_seconds) == 6
    look()
    assert len(seen) == 2  # it is over


def test_how_many_steps_are_to_come_is_told_from_the_first_one_on(
    host: Host, watch: Watch, announcer: Announcer, store_file: Path
) -> None:
    planned: list[tuple[int, int | None]] = []

    def sample(latent_image: Any, steps: int, **_: Any) -> Any:
        bar = host.module("comfy.utils").ProgressBar(steps)
        for step in range(steps):
            bar.update_absolute(step + 1, steps)
            announcer.tell()
            [told] = live_runs(f"sqlite:///{store_file}")
            planned.append((told.steps, told.planned))
        return (latent(),)

    host.nodes["Sampler"] = Node(("LATENT",), sample)
    watch().run(GRAPH)
    assert planned == [(1, 3), (2, 3), (3, 3)]


def test_a_prompt_that_is_not_kept_is_not_told_of(
    host: Host, watch: Watch, announcer: Announcer, store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGMASCOPE_KEEP", "0")

    def look() -> Any:
        announcer.tell()
        return (latent(0.0),)

    host.nodes["Empty"] = Node(("LATENT",), look)
    watch().run(GRAPH)
    assert live_runs(f"sqlite:///{store_file}") == []
    assert not store_file.with_suffix(".live").exists()


def test_a_watch_that_ends_in_a_prompt_tells_of_it_no_longer(
    host: Host, watch: Watch, announcer: Announcer, store_file: Path
) -> None:
    watched = watch()

    def end() -> Any:
        announcer.tell()
        assert len(live_runs(f"sqlite:///{store_file}")) == 1
        watched.session.stop()
        return (latent(0.0),)

    host.nodes["Empty"] = Node(("LATENT",), end)
    host.prompt(GRAPH, "prompt-1")
    announcer.tell()
    assert live_runs(f"sqlite:///{store_file}") == []


def test_a_prompt_is_handed_over_to_be_exported(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = list[Published]()
    monkeypatch.setattr(
        "sigmascope.integrations.comfyui.session.publish", lambda run: heard.append(Published(run))
    )
    run = watch().run(GRAPH)
    [part] = [part for published in heard for part in measured(published.run)]
    assert (part.pipeline, part.outcome, len(part.steps)) == ("ComfyUI", "ok", 3)
    assert part.generation_seconds == run.seconds
    assert [name for name, _ in part.stages] == ["Load", "Empty", "Sampler"]
    assert part.queue_seconds is not None
