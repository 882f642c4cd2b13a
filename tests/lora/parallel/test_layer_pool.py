import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sigmascope.lora.adapters import DiffChange, form_delta
from sigmascope.lora.decompose import decompose, exact_right_subspace
from sigmascope.lora.parallel import in_thread, is_left_working, run_layers, run_layers_in_order, worker_count


def test_every_layer_is_worked_on_once() -> None:
    sizes = {f"layer{number}": number + 1 for number in range(50)}
    results = dict(run_layers(sizes, len, workers=4))
    assert results == {name: len(name) for name in sizes}


def test_nothing_to_do_gives_nothing() -> None:
    assert list(run_layers({}, len)) == []


def test_what_is_done_early_waits_for_the_layers_before_it() -> None:
    third_is_done = threading.Event()

    def work(name: str) -> str:
        if name == "first":
            assert third_is_done.wait(60)
        if name == "third":
            third_is_done.set()
        return name.upper()

    sizes = {"first": 1, "second": 1, "third": 1}
    in_order = [("first", "FIRST"), ("second", "SECOND"), ("third", "THIRD")]
    assert list(run_layers_in_order(sizes, work)) == in_order


def test_work_runs_on_one_thread_of_torch_and_the_callers_setting_stays() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inside = {
            threads for _, threads in run_layers(dict.fromkeys("abcd", 1), lambda _: torch.get_num_threads())
        }
        in_new_thread: list[int] = []
        thread = threading.Thread(target=lambda: in_new_thread.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert inside == {1}
        assert torch.get_num_threads() == 2
        assert in_new_thread == [2]
    finally:
        torch.set_num_threads(before)


def test_no_more_than_two_of_the_largest_layers_are_under_way() -> None:
    sizes = {f"{number}": 1 + 9 * (number % 3 == 0) for number in range(40)}
    lock, inside, most = threading.Lock(), [0], [0]

    def work(name: str) -> None:
        with lock:
            inside[0] += sizes[name]
            most[0] = max(most[0], inside[0])
        time.sleep(0.001)
        with lock:
            inside[0] -= sizes[name]

    list(run_layers(sizes, work, workers=8))
    assert most[0] <= 20


def test_an_exception_reaches_the_caller_and_stops_what_has_not_begun() -> None:
    begun: list[str] = []

    def work(name: str) -> None:
        begun.append(name)
        raise ValueError(name)

    with pytest.raises(ValueError, match=r"^0$"):
        list(run_layers({str(number): 1 for number in range(1000)}, work, workers=1))
    assert begun == ["0"]


def test_leaving_the_loop_waits_for_what_is_under_way() -> None:
    done = []

    def work(name: str) -> None:
        time.sleep(0.01)
        done.append(name)

    layers = run_layers({str(number): 1 for number in range(500)}, work, workers=2)
    next(layers)
    layers.close()  # type: ignore[attr-defined]
    finished = len(done)
    time.sleep(0.05)
    assert finished == len(done) < 500


def test_after_ctrl_c_no_layer_begins_that_waited_for_room() -> None:
    begun: list[str] = []
    two_have_begun, may_end = threading.Barrier(3), threading.Event()

    def work(name: str) -> None:
        begun.append(name)
        if name != "first":
            two_have_begun.wait(60)
            assert may_end.wait(60)

    layers = run_layers(dict.fromkeys(("first", "second", "third", "waits"), 1), work, workers=3)
    next(layers)
    two_have_begun.wait(60)
    threading.Timer(0.1, may_end.set).start()
    with pytest.raises(KeyboardInterrupt):
        layers.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert begun == ["first", "second", "third"]


@pytest.mark.parametrize(
    "compute",
    [
        lambda: decompose(torch.ones(256, 200), 4, torch.float32),
        lambda: exact_right_subspace(torch.eye(260), 200),
        lambda: form_delta("layer", DiffChange({"diff": torch.ones(4, 4)})),
    ],
    ids=["iterating", "all singular values", "forming"],
)
def test_ctrl_c_ends_the_work_on_a_layer_before_it_is_done(compute: Callable[[], object]) -> None:
    slow_has_begun, is_interrupted, finished = threading.Event(), threading.Event(), []

    def work(name: str) -> None:
        if name == "slow":
            slow_has_begun.set()
            assert is_interrupted.wait(60)
            for _ in range(100):
                compute()
        finished.append(name)

    layers = run_layers({"quick": 1, "slow": 1}, work, workers=1)
    next(layers)
    slow_has_begun.wait(60)
    threading.Timer(0.1, is_interrupted.set).start()
    with pytest.raises(KeyboardInterrupt):
        layers.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert finished == ["quick"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("how", ["while it waits", "in the loop", "in a thread of its own"])
def test_ctrl_c_does_not_wait_for_a_call_that_takes_long(how: str) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def work(name: str) -> None:
        if name == "slow":
            has_begun.set()
            assert may_end.wait(60)

    def stop() -> None:
        assert has_begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    def run() -> None:
        for _ in run_layers({"quick": 1, "slow": 1}, work, workers=1):
            if how == "in the loop":
                assert has_begun.wait(60)
                raise KeyboardInterrupt

    if how != "in the loop":
        threading.Thread(target=stop).start()
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        in_thread(lambda: work("slow")) if how == "in a thread of its own" else run()
    assert time.monotonic() - before < 30
    assert is_left_working()
    may_end.set()
    for thread in threading.enumerate():
        if thread.name.startswith("sigmascope-pool"):
            thread.join(60)
    assert not is_left_working()


def test_there_is_a_worker_for_each_core_and_never_none() -> None:
    assert 1 <= worker_count() <= 8


def test_a_host_that_traded_digits_for_speed_gets_its_setting_back() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = {
            precision for _, precision in run_layers({"a": 1}, lambda _: torch.get_float32_matmul_precision())
        }
        assert found == {"highest"}
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="PyTorch before 2.9")
@pytest.mark.parametrize("name", ["cuda", "mkldnn"])
def test_a_host_that_set_one_backend_gets_the_bits_of_others_and_its_setting_back(name: str) -> None:
    backend: Any = getattr(torch.backends, name).matmul
    factors = torch.randn(96, 64), torch.randn(64, 96)
    expected = factors[0] @ factors[1]
    before = backend.fp32_precision
    backend.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="without a specific backend"):
            torch.get_float32_matmul_precision()
        ((_, product),) = run_layers({"a": 1}, lambda _: factors[0] @ factors[1])
        assert torch.equal(product, expected)
        assert backend.fp32_precision == "tf32"
    finally:
        backend.fp32_precision = before


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="PyTorch before 2.9")
def test_backends_that_follow_one_setting_still_follow_it() -> None:
    setting: Any = torch.backends
    backends = [setting.cuda.matmul, setting.mkldnn.matmul]
    before = setting.fp32_precision, [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "none"
        setting.fp32_precision = "tf32"
        assert {backend.fp32_precision for backend in backends} == {"tf32"}
        list(run_layers({"a": 1}, lambda _: None))
        setting.fp32_precision = "ieee"
        assert {backend.fp32_precision for backend in backends} == {"ieee"}
    finally:
        setting.fp32_precision = before[0]
        for backend, own in zip(backends, before[1], strict=True):
            backend.fp32_precision = own
