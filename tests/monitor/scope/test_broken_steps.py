"""What is known of the steps survives an accelerator that breaks, and Ctrl-C wherever it comes."""

import dis
import sys
from itertools import pairwise
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import pytest

from sigmascope.monitor import Recorder, scope
from sigmascope.probes import NullAccelerator

if TYPE_CHECKING:
    from tests.monitor.conftest import FakeAccelerator, FakeClock, FakeHost

OWN_FILE = str(scope.__file__)


@pytest.mark.parametrize("method", ["record", "query", "elapsed_seconds"])
def test_a_device_that_can_no_longer_be_timed_leaves_what_was_timed_before(
    accelerator: "FakeAccelerator", host: "FakeHost", monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("device-side assert triggered")

    recorder = Recorder(sample_hz=None, accelerator=accelerator)
    with recorder.stage("denoising"):
        for number in range(5):
            if number == 2:
                recorder.run()
                monkeypatch.setattr(type(accelerator.new_event()), method, broken)
            with recorder.step():
                accelerator.queued_seconds += 0.5
            accelerator.done_seconds = accelerator.queued_seconds
    found = recorder.run().stages[0].steps
    assert found.gpu_seconds == (0.5, 0.5, None, None, None)
    assert found.unavailable["gpu_seconds"] == "RuntimeError: device-side assert triggered"


class Interruption:
    """Raises KeyboardInterrupt after one of the calls that the monitor's own code makes: there Python looks for it.

    Args:
        number: After which, from 0.
    """

    def __init__(self, number: int) -> None:
        self.left = number
        self._places: dict[CodeType, set[int]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != OWN_FILE:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in self._after_calls(frame.f_code):
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        return self

    def _after_calls(self, code: CodeType) -> set[int]:
        if code not in self._places:
            made = list(dis.get_instructions(code))
            pairs = pairwise(made)
            self._places[code] = {after.offset for call, after in pairs if call.opname.startswith("CALL")}
        return self._places[code]


@pytest.mark.parametrize("has_device", [True, False])
def test_wherever_ctrl_c_comes_rows_stay_whole_and_have_their_own_times(
    has_device: bool, accelerator: "FakeAccelerator", host: "FakeHost", clock: "FakeClock"
) -> None:
    sys._getframe().f_trace_opcodes = True  # Python 3.12 begins no trace of opcodes inside a trace
    for number in range(100):
        device = accelerator if has_device else NullAccelerator("none")
        recorder = Recorder(sample_hz=None, accelerator=device, clock=clock)
        interruption = Interruption(number)
        with recorder.stage("denoising"):
            for length in (1.0, 2.0, 4.0):
                step = recorder.step()
                step.__enter__()
                clock.pass_seconds(length)
                accelerator.queued_seconds += length
                host.rss = round(1000 * length)
                before = sys.gettrace()
                sys.settrace(interruption if length == 2.0 else before)
                try:
                    step.__exit__(None, None, None)
                except KeyboardInterrupt:
                    pass
                finally:
                    sys.settrace(before)
            accelerator.done_seconds = accelerator.queued_seconds
        found = recorder.run().stages[0].steps
        rows = list(zip(found.seconds, found.rss_bytes, found.gpu_seconds or found.seconds, strict=True))
        expected = [(1.0, 1000, 1.0), (2.0, 2000, 2.0), (4.0, 4000, 4.0)]
        assert [row for row in rows if row[2] is not None] in (expected, [expected[0], expected[2]])
        if interruption.left >= 0:
            break
    assert 5 < number < 99
