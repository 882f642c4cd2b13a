"""LoRAs that are set, fused and taken off in a watch, on a device: how often the host waits for us."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.conftest import Pretend
from tests.families import make_pipeline
from tests.families.loras import lora_state, modules_of

from sigmascope import watch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

ACTS: dict[str, Callable[[Any], object]] = {
    "set_adapters": lambda pipeline: pipeline.set_adapters(["style"], [0.5]),
    "fuse": lambda pipeline: pipeline.fuse_lora(),
    "unfuse": lambda pipeline: pipeline.unfuse_lora(),
    "delete": lambda pipeline: pipeline.delete_adapters("style"),
}
MOST_WAITS = {"set_adapters": 12, "fuse": 12, "unfuse": 12, "delete": 12}


def test_the_host_waits_a_few_times_for_a_method_and_not_for_each_layer(pretend: Pretend) -> None:
    pipeline = make_pipeline("sd15")
    state = lora_state(pipeline, ["unet"], only="attn")
    waits: dict[str, Counter[str]] = {}
    with pretend("cuda") as device:
        pipeline.to("cuda")
        pipeline.load_lora_weights(state, adapter_name="style")
        for name, act in ACTS.items():
            with watch(pipeline) as run:
                device.waits.clear()
                act(pipeline)
                waits[name] = Counter(wait.place for wait in device.waits if wait.is_ours)
            facts = run.stage("lora_application").facts["lora_application"]
            assert facts["effective"] is (name in ("set_adapters", "delete"))
    assert len(modules_of(state)) > 30
    assert {
        name: sum(found.values()) for name, found in waits.items() if sum(found.values()) > MOST_WAITS[name]
    } == {}, waits
