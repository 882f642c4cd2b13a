"""Grids of LoRAs on a small Stable Diffusion: what each cell says, what is kept, and what is refused."""

import copy
import inspect
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests.families import make_pipeline
from tests.families.loras import lora_state

from sigmascope import lora_grid
from sigmascope.errors import ConfigError, FileError, ModelMismatchError
from sigmascope.lbm.images import load_image, psnr
from sigmascope.pipeline.lora_grid import picture_of

PROMPTS = ("a red fox", "the lazy dog <b>&")
CALL: dict[str, Any] = {"num_inference_steps": 1, "width": 32, "height": 32}
SETTINGS: dict[str, Any] = {"call": CALL}


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return make_pipeline("sd15")


@pytest.fixture(scope="module")
def loras(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A LoRA that acts, one whose up factors are zero, and one for a layer that the model has not."""
    folder = tmp_path_factory.mktemp("loras")
    state = lora_state(pipeline, ["unet"], size=0.6)
    fresh = {name: torch.zeros_like(value) if "lora_B" in name else value for name, value in state.items()}
    other = {name.replace("conv_in", "conv_other"): value for name, value in state.items()}
    paths = {name: folder / f"{name}.safetensors" for name in ("style", "fresh", "other")}
    for name, made in zip(paths, (state, fresh, other), strict=True):
        save_file(made, paths[name])
    return paths


@pytest.fixture
def painted(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that the pipeline is called with."""
    calls: list[str] = []
    original = type(pipeline).__call__

    def call(self: Any, prompt: str, *arguments: Any, **options: Any) -> Any:
        calls.append(prompt)
        return original(self, prompt, *arguments, **options)

    call.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(type(pipeline), "__call__", call)
    return calls


@pytest.mark.slow
def test_each_cell_is_as_far_from_no_lora_as_its_pictures_say(
    pipeline: Any, loras: dict[str, Path], tmp_path: Path
) -> None:
    made = lora_grid(
        pipeline, loras["style"], PROMPTS, output=tmp_path / "grid.png", scales=(-1.0, 0.0, 2.0), **SETTINGS
    )
    assert [(cell.row, cell.lora, cell.scale) for cell in made.cells] == [
        (row, *rest) for row in (0, 1) for rest in ((None, None), (0, -1.0), (0, 2.0))
    ]
    for cell in made.cells:
        if cell.lora is None:
            assert (cell.psnr_db, cell.mean_difference, cell.figures) == (None, None, "")
            continue
        this, bare = (load_image(one.picture) for one in (cell, made.cell(cell.row)))
        apart = np.asarray(this, np.float64) - np.asarray(bare, np.float64)
        assert apart.any()
        assert cell.mean_difference == pytest.approx(np.abs(apart).mean() / 255)
        assert cell.psnr_db == pytest.approx(psnr(this, bare))
    assert made.idle == ()


def test_the_picture_is_what_the_pipeline_paints_by_itself_and_no_hook_stays(
    pipeline: Any, loras: dict[str, Path], tmp_path: Path
) -> None:
    made = lora_grid(pipeline, loras["style"], PROMPTS[0], output=tmp_path / "grid.png", seed=5, **SETTINGS)
    alone = pipeline(
        PROMPTS[0], num_inference_steps=1, width=32, height=32, generator=torch.Generator().manual_seed(5)
    ).images[0]
    assert np.array_equal(np.asarray(load_image(made.cell(0).picture)), np.asarray(alone))
    assert not any(module._forward_hooks for module in pipeline.unet.modules())


@pytest.mark.slow
def test_a_lora_that_does_nothing_is_named(pipeline: Any, loras: dict[str, Path], tmp_path: Path) -> None:
    made = lora_grid(
        pipeline,
        [loras["style"], loras["fresh"]],
        PROMPTS[0],
        output=tmp_path / "g.html",
        scales=1.0,
        **SETTINGS,
    )
    assert [lora.label for lora in made.idle] == ["fresh"]
    assert [cell.figures for cell in made.cells if cell.lora == 1] == ["identical"]
    assert [found.message for found in made.findings()] == [
        "fresh changes no picture: it does nothing, or less than one step of their colours."
    ]
    assert "fresh changes no picture" in (tmp_path / "g.html").read_text()
    assert [lora["does_nothing"] for lora in made.as_dict()["loras"]] == [False, True]
    assert json.loads(json.dumps(made.as_dict())) == made.as_dict()


@pytest.mark.slow
def test_cells_are_painted_once_and_again_only_for_what_changed(
    pipeline: Any, loras: dict[str, Path], tmp_path: Path, painted: list[str]
) -> None:
    def grid(**changed: Any) -> list[bool]:
        painted.clear()
        arguments = {"output": tmp_path / "grid.png", "scales": (1.0,), **SETTINGS, **changed}
        return [cell.reused for cell in lora_grid(pipeline, loras["style"], PROMPTS, **arguments).cells]

    assert grid() == [False] * 4
    assert len(painted) == 4
    assert grid() == [True] * 4
    assert painted == []
    assert grid(scales=(1.0, 0.5)) == [True, True, False] * 2
    assert grid(seed=1) == [False] * 4
    for changed in ({"num_inference_steps": 2}, {"guidance_scale": 2.0}, {"width": 40}):
        assert grid(call=CALL | changed) == [False] * 4
    with torch.no_grad():
        weight = pipeline.unet.conv_in.weight
        kept = weight.clone()
        weight.mul_(1.5)
        try:
            assert grid() == [False] * 4
        finally:
            weight.copy_(kept)
    assert grid() == [True] * 4


@pytest.mark.slow
def test_a_lora_of_the_same_name_and_other_content_is_painted(
    pipeline: Any, loras: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "lora.safetensors"
    reused = []
    for name in ("style", "fresh"):
        path.write_bytes(loras[name].read_bytes())
        made = lora_grid(pipeline, path, PROMPTS[0], output=tmp_path / "grid.png", scales=1.0, **SETTINGS)
        reused.append([cell.reused for cell in made.cells])
    assert reused == [[False, False], [True, False]]


@pytest.mark.slow
def test_stopped_it_keeps_what_is_done_and_leaves_no_half_file(
    pipeline: Any, loras: dict[str, Path], tmp_path: Path
) -> None:
    def stop(done: int, total: int, what: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    arguments: dict[str, Any] = {"output": tmp_path / "grid.png", "scales": 1.0, **SETTINGS}
    with pytest.raises(KeyboardInterrupt):
        lora_grid(pipeline, loras["style"], PROMPTS, progress=stop, **arguments)
    assert not any(module._forward_hooks for module in pipeline.unet.modules())
    assert [path.name for path in tmp_path.iterdir()] == ["grid.cells"]
    assert len(list((tmp_path / "grid.cells").iterdir())) == 3
    made = lora_grid(pipeline, loras["style"], PROMPTS, **arguments)
    assert [cell.reused for cell in made.cells] == [True, True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"", b"not a picture", None])
def test_a_damaged_cell_is_painted_again(
    pipeline: Any, loras: dict[str, Path], tmp_path: Path, damage: bytes | None
) -> None:
    arguments: dict[str, Any] = {"output": tmp_path / "grid.png", "scales": 1.0, **SETTINGS}
    first = lora_grid(pipeline, loras["style"], PROMPTS[0], **arguments)
    cell = first.cells[0].picture
    cell.write_bytes(cell.read_bytes()[:-30] if damage is None else damage)
    again = lora_grid(pipeline, loras["style"], PROMPTS[0], **arguments)
    assert [cell.reused for cell in again.cells] == [False, True]
    assert load_image(again.cells[0].picture).size == (32, 32)


class Page(HTMLParser):
    """What a browser would take from a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.headings: list[str] = []
        self._in_heading = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_heading = tag == "h2"
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._in_heading:
            self.headings.append(data)
            self._in_heading = False


@pytest.mark.slow
def test_the_page_holds_its_pictures_and_no_prompt_is_markup(
    pipeline: Any, loras: dict[str, Path], tmp_path: Path
) -> None:
    lora_grid(pipeline, loras["style"], PROMPTS, output=tmp_path / "grid.html", **SETTINGS)
    page = Page((tmp_path / "grid.html").read_text())
    assert page.headings == [f"{number}. {prompt}" for number, prompt in enumerate(PROMPTS, start=1)]
    assert len(page.sources) == 2 * 3
    assert all(source.startswith("data:image/jpeg;base64,") for source in page.sources)


def test_prompts_can_be_kept_off_what_is_shown(pipeline: Any, loras: dict[str, Path], tmp_path: Path) -> None:
    made = lora_grid(
        pipeline,
        loras["style"],
        PROMPTS,
        output=tmp_path / "grid.png",
        hide_prompts=True,
        scales=1.0,
        **SETTINGS,
    )
    assert made.rows == ("prompt 1", "prompt 2")
    files = [*tmp_path.glob("grid.*"), *(tmp_path / "grid.cells").iterdir()]
    for file in files:
        assert file.is_dir() or b"lazy" not in file.read_bytes()


@pytest.mark.slow
def test_the_sheet_has_a_line_for_each_lora_of_a_row_and_shows_what_each_cell_is(
    pipeline: Any, loras: dict[str, Path], tmp_path: Path
) -> None:
    both = [loras["style"], loras["fresh"]]
    lora_grid(pipeline, both, PROMPTS, output=tmp_path / "grid.png", scales=(0.1, 0.2, 0.3), **SETTINGS)
    sheet = np.asarray(load_image(tmp_path / "grid.png")).astype(int)
    assert sheet.shape == (2 * 2 * 320, 4 * 320, 3)
    orange = (sheet == (255, 69, 0)).all(axis=-1)
    marked = orange.reshape(4, 320, 4, 320).any(axis=(1, 3))  # words that say "identical"
    assert marked.tolist() == [[False] * 4, [False, True, True, True]] * 2


Change = Callable[[dict[str, Path]], dict[str, Any]]


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"loras": "missing.safetensors"}, FileError, r"missing\.safetensors"),
        ({"loras": []}, ConfigError, "--lora is missing"),
        ({"prompts": ()}, ConfigError, "--prompt is missing"),
        ({"prompts": (" ",)}, ConfigError, "--prompt is empty"),
        ({"scales": ()}, ConfigError, "--scales names no strength"),
        ({"scales": 0.0}, ConfigError, "--scales names no strength"),
        ({"scales": float("nan")}, ConfigError, "scale nan is not a finite"),
        ({"seed": -1}, ConfigError, "--seed is -1"),
        ({"output": "grid.gif"}, ConfigError, r"--output grid\.gif"),
        ({"call": {"colour": 1}}, ConfigError, "does not take colour"),
        ({"call": {"clip_skip": lambda: 1}}, ConfigError, "cannot be told"),
        ({"subject": torch.nn.Linear(1, 1)}, ConfigError, "Linear is neither"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_painted(
    pipeline: Any,
    loras: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {
        "subject": pipeline,
        "loras": loras["style"],
        "prompts": PROMPTS,
        "output": "grid.png",
    } | changed
    with pytest.raises(error, match=words):
        lora_grid(arguments.pop("subject"), arguments.pop("loras"), arguments.pop("prompts"), **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_lora_for_another_model_is_named_by_its_file(
    pipeline: Any, loras: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelMismatchError, match=r"other\.safetensors"):
        lora_grid(pipeline, [loras["style"], loras["other"]], PROMPTS, output=tmp_path / "grid.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_pipeline_with_an_adapter_is_told_from_one_without(
    pipeline: Any, loras: dict[str, Path], tmp_path: Path
) -> None:
    adapted = make_pipeline("sd15")
    adapted.load_lora_weights(loras["style"])
    arguments: dict[str, Any] = {"output": tmp_path / "grid.png", "scales": 1.0, **SETTINGS}
    lora_grid(pipeline, loras["style"], PROMPTS[0], **arguments)
    made = lora_grid(adapted, loras["style"], PROMPTS[0], **arguments)
    assert [cell.reused for cell in made.cells] == [False, False]


def test_of_a_video_the_middle_frame_is_shown() -> None:
    frames = np.zeros((1, 3, 4, 6, 3))
    frames[0, 1] = 1.0
    pictures = [[Image.fromarray((frame * 255).astype(np.uint8)) for frame in frames[0]]]
    for output in ((frames,), (pictures,)):
        picture = picture_of(output)
        assert (picture.size, picture.getextrema()) == ((6, 4), ((255, 255),) * 3)


def test_latents_are_no_picture() -> None:
    with pytest.raises(ConfigError, match="no picture"):
        picture_of((torch.zeros(1, 4, 8, 8),))


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        [Image.new("RGB", (2, 2), colour) for colour in ("black", "white")],
        [torch.zeros(2), torch.ones(2)],
        [np.zeros(2), np.zeros(2, np.float32)],
    ],
)
def test_cells_are_told_apart_by_the_content_of_pictures_arrays_and_tensors(
    pipeline: Any, loras: dict[str, Path], tmp_path: Path, values: list[Any]
) -> None:
    def paint(value: Any) -> bool:
        call = CALL | {"cross_attention_kwargs": {"unused": value}}
        arguments: dict[str, Any] = {"output": tmp_path / "grid.png", "scales": 1.0, "call": call}
        return lora_grid(pipeline, loras["style"], PROMPTS[0], **arguments).cells[0].reused

    assert [paint(value) for value in (values[0], copy.deepcopy(values[0]), values[1])] == [
        False,
        True,
        False,
    ]
