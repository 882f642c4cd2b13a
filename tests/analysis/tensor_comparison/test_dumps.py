from pathlib import Path

import pytest
import torch

from sigmascope import TensorDumps, compare_tensors, load_tensors, save_tensors
from sigmascope.analysis.tensor_comparison import compare_dumps, compare_runs
from sigmascope.errors import ConfigError

ONE, TWO = torch.ones(2, 3), torch.full((2, 3), 2.0)


def test_tensors_of_the_same_name_are_compared() -> None:
    found = compare_tensors({"x": ONE, "y": ONE}, {"y": TWO, "x": ONE})
    assert [(pair.name_a, pair.comparison.verdict) for pair in found.pairs] == [
        ("x", "identical"),
        ("y", "different"),
    ]
    assert found.verdict == "different"


def test_a_tensor_without_counterpart_makes_dumps_different() -> None:
    found = compare_tensors({"x": ONE, "y": ONE}, {"x": ONE, "z": ONE})
    assert (found.only_a, found.only_b, found.verdict) == (("y",), ("z",), "different")


def test_the_only_tensors_of_two_dumps_are_compared_whatever_their_names() -> None:
    found = compare_tensors({"positive.0.cond": ONE}, {"prompt_embeds": ONE})
    assert (found.pairs[0].name_b, found.verdict) == ("prompt_embeds", "identical")


def test_names_can_be_paired() -> None:
    found = compare_tensors({"a": ONE, "b": TWO}, {"c": ONE}, names={"a": "c"})
    assert (len(found.pairs), found.verdict) == (1, "identical")


@pytest.mark.parametrize(("names", "side"), [({"posi": "x"}, "A"), ({"x": "posi"}, "B")])
def test_a_name_that_is_not_there_is_an_error_with_the_nearest(names: dict[str, str], side: str) -> None:
    with pytest.raises(ConfigError, match=f"{side} has no tensor 'posi'.*positive"):
        compare_tensors({"x": ONE, "positive": ONE}, {"x": ONE, "positive": ONE}, names=names)


def test_the_worst_verdict_counts() -> None:
    found = compare_tensors({"x": ONE / 3, "y": ONE}, {"x": (ONE / 3).half(), "y": ONE})
    assert found.verdict == "rounding"
    assert found.agrees


def test_two_dumps_without_a_common_tensor_are_different() -> None:
    assert compare_tensors({}, {}).verdict == "different"


def test_a_tensor_and_a_dump_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match="mapping"):
        compare_tensors(ONE, {"x": ONE})  # type: ignore[call-overload]


def test_what_the_headers_say_differently_is_told(tmp_path: Path) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_tensors(a, {"x": ONE}, prompt="a red cat", encoder="CLIP-L")
    save_tensors(b, {"x": ONE}, prompt="a red dog", encoder="CLIP-G", prompt_privacy="full")
    found = compare_tensors(load_tensors(a), load_tensors(b))
    assert found.verdict == "identical"
    assert found.context["encoder"] == ("CLIP-L", "CLIP-G")
    assert found.context["prompt"][0].startswith("sha256 ")
    assert "red" not in str(found.context)


def test_one_prompt_kept_in_two_ways_is_the_same(tmp_path: Path) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_tensors(a, {"x": ONE}, prompt="a red cat")
    save_tensors(b, {"x": ONE}, prompt="a red cat", prompt_privacy="full")
    assert compare_tensors(load_tensors(a), load_tensors(b)).context == {}


def test_the_device_is_that_of_the_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"x": ONE})
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'\\"device\\":\\"cpu\\"', b'\\"device\\":\\"mps\\"'))
    found = compare_tensors(load_tensors(path), {"x": ONE})
    assert found.pairs[0].comparison.differences == {"device": ("mps", "cpu")}
    assert found.verdict == "identical"


def test_progress_tells_of_each_tensor() -> None:
    done = []
    tensors = {"x": ONE, "y": ONE}
    compare_dumps(tensors, tensors, progress=lambda count, total, name: done.append((count, total, name)))
    assert done == [(0, 2, "x"), (1, 2, "y"), (2, 2, "")]


def folders(tmp_path: Path) -> tuple[TensorDumps, TensorDumps]:
    a, b = TensorDumps(tmp_path / "a"), TensorDumps(tmp_path / "b")
    for dumps, second in ((a, ONE), (b, TWO)):
        dumps.save("positive", {"cond": ONE})
        dumps.save("negative", {"cond": second})
        dumps.save("latent", {"latent": second})
    return a, b


def test_two_runs_are_compared_dump_by_dump(tmp_path: Path) -> None:
    found = compare_runs(*folders(tmp_path))
    assert [(name, dump.verdict) for name, dump in found.dumps.items()] == [
        ("positive", "identical"),
        ("negative", "different"),
        ("latent", "different"),
    ]
    assert (found.first_difference, found.verdict, found.agrees) == ("negative", "different", False)


def test_a_dump_that_one_run_lacks_makes_them_different(tmp_path: Path) -> None:
    a, b = TensorDumps(tmp_path / "a"), TensorDumps(tmp_path / "b")
    a.save("x", ONE)
    b.save("x", ONE)
    b.save("x", ONE)
    found = compare_runs(a, b)
    assert (found.only_a, found.only_b, found.verdict) == ((), ("x-2",), "different")


def test_names_choose_in_the_dumps_that_have_them(tmp_path: Path) -> None:
    a, b = folders(tmp_path)
    assert list(compare_runs(a, b, names={"latent": "latent"}).dumps) == ["latent"]
    with pytest.raises(ConfigError, match="nowhere"):
        compare_runs(a, b, names={"nowhere": "latent"})
