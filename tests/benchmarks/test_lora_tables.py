"""How results are shown."""

import json

from lora_bench.accuracy import LayerError
from lora_bench.children import Finished
from lora_bench.limits import Limits
from lora_bench.optimum import LayerOptimum, Optimum
from lora_bench.peers import PeerRun
from lora_bench.run import PairResult, PeerResult
from lora_bench.tables import as_json, class_table, limit_lines, time_table, whole_model_line

SHAPES = {"denoiser.a.weight": (3, 5), "denoiser.conv.weight": (1280, 2560, 3, 3)}
WHOLE = SHAPES | {f"denoiser.more.{place}.weight": (3, 5) for place in range(8)}


def peer(name: str, seconds: float, error: float, *, reckoned: bool = False) -> PeerResult:
    runs = [
        Finished(
            PeerRun(seconds, {"denoiser.a.weight": 2.0, "denoiser.conv.weight": 5.0}, reckoned), 3_000_000_000
        )
    ]
    errors = {"denoiser.a": LayerError(1, error), "denoiser.conv": LayerError(1, 3.0)}
    return PeerResult(name, 1.0, runs, errors)


def result() -> PairResult:
    layers = {
        name.removesuffix(".weight"): LayerOptimum(shape, (16.0, 9.0)) for name, shape in SHAPES.items()
    }
    return PairResult(
        name="default",
        shapes=SHAPES,
        peers=(
            peer("ours", 2.0, 3.0),
            peer("svd_lowrank", 5.0, 3.3),
            peer("full_svd", 90.0, 3.6, reckoned=True),
        ),
        optimum=Optimum("", 1, 1e-13, layers),
        limits=Limits(1_000_000_000, 0.25, 0.25, 1e9, {"float32": 0.1, "bfloat16": 0.05}),
        validation_seconds=1.2,
    )


def row(table: str, name: str) -> list[str]:
    return next(line.split() for line in table.splitlines() if line.startswith(name))


def test_times_stand_beside_their_ratio_to_ours() -> None:
    assert row(time_table(result()), "svd_lowrank")[1:4] == ["5.00", "2.50", "3.00"]


def test_errors_stand_beside_the_optimum() -> None:
    assert row(time_table(result()), "svd_lowrank")[4:] == ["2", "1.05000", "1.10000"]


def test_a_reckoned_time_is_marked() -> None:
    assert row(time_table(result()), "full_svd")[1] == "90.00*"


def test_the_limit_is_reading_forming_and_six_products() -> None:
    assert row(time_table(result()), "limit float32")[2:] == ["1.10", "0.55"]


def test_validation_stands_beside_one_reading_and_one_product() -> None:
    assert "validate 1.20 s = 2.00 x" in limit_lines(result())


def test_each_shape_has_a_row() -> None:
    table = class_table(result())
    assert row(table, "3x5")[1:] == ["1", "1.00000", "1.00000", "1.10000", "1.10000", "1.20000", "1.20000"]
    assert row(table, "1280x2560x3x3")[1] == "1"


def test_the_whole_model_is_reckoned_from_the_shapes() -> None:
    line = whole_model_line(result(), WHOLE)
    assert line is not None
    assert line.startswith("all 10 layers")
    assert line.endswith("ours 23 s, svd_lowrank 23 s, full_svd 23 s")  # nine of 2 s and one of 5 s


def test_nothing_is_reckoned_for_a_whole_pair() -> None:
    assert whole_model_line(result(), SHAPES) is None


def test_tables_fit_into_80_columns() -> None:
    for text in (time_table(result()), limit_lines(result()), class_table(result())):
        assert max(map(len, text.splitlines())) <= 80


def test_results_are_json() -> None:
    content = json.loads(json.dumps(as_json(result())))
    assert content["peers"][1]["seconds"] == 5.0
    assert content["peers"][1]["ratios"]["denoiser.a"] == 3.3 / 3.0
