import re
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import pytest

from sigmascope.lora.validate import ModuleError, Status, ValidationReport, save_validation_picture

SVG = "{http://www.w3.org/2000/svg}"


def module(name: str, error: float, status: Status = "applied") -> ModuleError:
    return ModuleError(name, (4, 4), status, 2, 1.0, error)


def report(*modules: ModuleError, lora: str = "lora.safetensors") -> ValidationReport:
    return ValidationReport(Path("b"), Path("t"), Path(lora), modules, 0, (), 1.0)


def drawn(*modules: ModuleError, lora: str = "lora.safetensors") -> ElementTree.Element:
    with TemporaryDirectory() as folder:
        save_validation_picture(f"{folder}/p.svg", report(*modules, lora=lora))
        return ElementTree.parse(f"{folder}/p.svg").getroot()


def tips(picture: ElementTree.Element, shape: str) -> dict[str, ElementTree.Element]:
    found = {element.findtext(f"{SVG}title"): element for element in picture.iter(f"{SVG}{shape}")}
    return {tip: element for tip, element in found.items() if tip}


def test_every_layer_is_a_point_that_names_it() -> None:
    layers = [module(f"denoiser.down_blocks.{i}.conv", 0.1 * i) for i in range(1, 7)]
    points = tips(drawn(*layers), "circle")
    assert len(points) == 6
    assert "denoiser.down_blocks.2.conv: 20 %, rank 2" in points


def test_a_larger_error_is_higher_up() -> None:
    points = tips(drawn(module("a", 0.01), module("b", 0.1), module("c", 3.0)), "circle")
    heights = [float(point.attrib["cy"]) for point in points.values()]
    assert heights == sorted(heights, reverse=True)
    assert len(set(heights)) == 3


def test_errors_of_one_size_are_on_a_linear_axis() -> None:
    points = tips(drawn(module("a", 0.1), module("b", 0.2), module("c", 0.4)), "circle")
    first, second, third = (float(point.attrib["cy"]) for point in points.values())
    assert second - third == pytest.approx(2 * (first - second), abs=0.2)


def test_on_errors_of_many_sizes_a_factor_is_the_same_distance_anywhere() -> None:
    picture = drawn(module("a", 0.0001), module("b", 0.01), module("c", 1.0))
    first, second, third = (float(point.attrib["cy"]) for point in tips(picture, "circle").values())
    assert first - second == pytest.approx(second - third, abs=0.2)
    assert "Error by layer, on a logarithmic axis" in [text.text for text in picture.iter(f"{SVG}text")]


def test_one_layer_of_noise_does_not_press_the_others_together() -> None:
    picture = drawn(*(module(f"a{i}", 0.02 * i) for i in range(1, 20)), module("noise", 500.0))
    heights = {
        tip.partition(":")[0]: float(point.attrib["cy"]) for tip, point in tips(picture, "circle").items()
    }
    assert heights["a1"] - heights["a19"] > 50
    assert min(heights, key=lambda name: heights[name]) == "noise"
    assert "Error by layer; 1 layer beyond the axis" in [text.text for text in picture.iter(f"{SVG}text")]


def test_a_block_has_a_cell_for_each_layer_the_darker_the_worse() -> None:
    layers = [module(f"denoiser.up_blocks.0.conv{i}", error) for i, error in enumerate((0.0, 0.5, 1.0))]
    gone = module("denoiser.up_blocks.0.gone", 1.0, "missing")
    cells = [
        rect.attrib
        for rect in drawn(*layers, gone).iter(f"{SVG}rect")
        if float(rect.attrib["x"]) >= 490 and float(rect.attrib["y"]) >= 460
    ]
    assert [cell["fill"] for cell in cells] == ["#f7f2ea", "#f0b452", "#c62828", "#757575"]
    assert len({cell["width"] for cell in cells}) == 1


def test_a_png_is_drawn_in_twice_the_pixels(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    save_validation_picture(tmp_path / "p.PNG", report(module("a", 0.1), module("b", 1.0, "missing")))
    svg = drawn(module("a", 0.1), module("b", 1.0, "missing"))
    with pillow.open(tmp_path / "p.PNG") as image:
        assert image.size == (2 * int(svg.attrib["width"]), 2 * int(svg.attrib["height"]))
        assert {(2, 119, 189), (198, 40, 40)} <= {colour for _, colour in image.getcolors(1 << 20)}


@pytest.mark.parametrize(
    ("error", "colour"), [(0.01, "#2e7d32"), (0.2, "#0277bd"), (0.7, "#e68a00"), (2.0, "#c62828")]
)
def test_the_band_is_the_colour(error: float, colour: str) -> None:
    picture = drawn(module("a", error))
    assert [point.attrib["fill"] for point in tips(picture, "circle").values()] == [colour]
    assert [bar.attrib["fill"] for bar in tips(picture, "rect").values()] == [colour]


def test_what_is_not_applied_is_a_cross_with_the_reason() -> None:
    picture = drawn(module("a", 0.1), module("gone", 1.0, "missing"), module("odd", 1.0, "wrong_shape"))
    assert set(tips(picture, "path")) == {"gone: missing", "odd: wrong shape"}
    assert "not applied: 2" in [text.text for text in picture.iter(f"{SVG}text")]


def test_bars_are_as_long_as_the_blocks_errors() -> None:
    bars = tips(drawn(module("denoiser.conv_in", 0.1), module("denoiser.conv_out", 0.3)), "rect")
    lengths = [float(bar.attrib["width"]) for bar in bars.values()]
    assert lengths[1] == pytest.approx(3 * lengths[0], rel=0.01)


def test_names_are_text_and_never_markup() -> None:
    evil = "denoiser.</text><script>alert(1)</script>&\"'\x1b\ud800"
    picture = drawn(module(evil, 0.1), lora="<b>&.safetensors")
    assert [element.tag for element in picture.iter() if "script" in element.tag] == []
    assert any("<script>alert(1)</script>" in tip for tip in tips(picture, "circle"))
    assert "LoRA validation: <b>&.safetensors" in [text.text for text in picture.iter(f"{SVG}text")]


@pytest.mark.parametrize("error", [0.0, 1e-12, 1e9])
def test_extreme_errors_stay_inside(error: float) -> None:
    for point in tips(drawn(module("a", error), module("b", 0.5)), "circle").values():
        assert 100 <= float(point.attrib["cy"]) <= 400


def test_a_layer_that_did_not_change_has_no_band() -> None:
    unchanged = ModuleError("a", (4, 4), "applied", 2, 0.0, 0.5)
    (point,) = tips(drawn(unchanged, module("b", 0.1)), "circle").keys() - {"b: 10 %, rank 2"}
    assert point == "a: -, rank 2"


def test_a_full_model_is_a_small_file(tmp_path: Path) -> None:
    layers = [module(f"denoiser.up_blocks.{i // 300}.attentions.{i}.to_q", 0.1) for i in range(792)]
    save_validation_picture(tmp_path / "p.svg", report(*layers))
    text = (tmp_path / "p.svg").read_text(encoding="utf-8")
    assert len(re.findall("<circle", text)) >= 792
    assert len(text) < 250_000
