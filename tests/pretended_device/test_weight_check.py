"""The weights in use are compared where they are: their check makes the host wait for no device."""

import pytest
from tests.conftest import Pretend
from tests.stages.weight_check.test_peft import Tiny, with_lora

from sigmascope.probes.copies import Pending
from sigmascope.stages import lora_application
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


@pytest.mark.parametrize("is_fused", [False, True])
def test_the_check_waits_for_nothing(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, is_fused: bool
) -> None:
    with pretend("cuda") as device:
        model = with_lora(Tiny()).to("cuda")
        baseline = capture_lora_baseline(model, None)
        model.set_adapters(["style"], [0.5])
        if is_fused:
            model.fuse_lora()
        waits, results = [], set()
        for is_checked in (True, False):
            if not is_checked:
                monkeypatch.setattr(lora_application, "begin_checks", lambda *_: Pending(dict))
            device.waits.clear()
            device.uploads.clear()
            found = analyze_lora_application_results(baseline, model, None, model)
            waits.append((len(device.waits), len(device.uploads)))
            results |= {check["result"] for check in found["unet_weight_changes"]["checked"].values()}
    assert waits[0] == waits[1]
    assert results == {"confirmed"}
