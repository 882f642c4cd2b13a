"""`sigmascope lora statistics`, extractions that take what it wrote, and `sigmascope lora fit`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.cli.lora.conftest import Run
from tests.families import make_pipeline
from tests.lbm.conftest import TINY, save_tiny_pair
from torch import nn

from sigmascope.errors import ConfigError
from sigmascope.lbm.config import parse_config
from sigmascope.lbm.images import psnr
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import build_lbm, load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH, TUNED_PATH
from sigmascope.lbm.pocket.scenes import COOL, relighting_pair
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.reader import load_lora
from sigmascope.lora.statistics import load_statistics
from sigmascope.lora.statistics_collection import UnfinishedSums, checkpoint_gradients


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small LBM, `base.safetensors`, and one that was tuned from it, `tuned.safetensors`."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_pair(folder)
    return folder


@pytest.mark.slow
def test_an_lbm_is_run_on_noise(sigmascope: Run, tiny: Path) -> None:
    code, out, _ = sigmascope(
        "lora",
        "statistics",
        tiny / "tuned.safetensors",
        "--noise",
        1,
        "--size",
        "64x64",
        "--save_to",
        "s.safetensors",
        "--json",
    )
    assert code == 0
    told = json.loads(out)
    read = load_statistics("s.safetensors")
    layers = [each for each in build_lbm(parse_config(TINY)).denoiser.modules() if is_layer(each)]
    assert told["layers"] == len(read) == len(layers)
    assert (told["calls"], told["unmet"]) == (1, [])
    assert "down_blocks.0.resnets.0.conv1" in read


@pytest.mark.slow
@pytest.mark.parametrize("command", ["statistics", "fit"])
def test_memory_that_runs_out_says_what_takes_less(
    command: str, sigmascope: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned = tiny / "base.safetensors", tiny / "tuned.safetensors"
    extract_lora(base, tuned, Path("lora.safetensors"), ExtractOptions(rank=1, conv_rank=1))

    def too_large(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 MiB free.")

    monkeypatch.setattr(torch.Tensor, "backward", too_large)
    of = [tuned] if command == "statistics" else [
        "lora.safetensors", "--base_model_path", base, "--tuned_model_path", tuned,
    ]  # fmt: skip
    flags = ["--noise", 2, "--size", "32x32", "--save_to", "out.safetensors"]
    code, _, err = sigmascope("lora", command, *of, *flags)
    assert code == 2
    assert "the model with its gradients does not fit into memory (CUDA out of memory. Tried to" in err
    assert "--gradient_checkpointing" in err


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv2d)


@pytest.mark.slow
def test_a_pipeline_is_run_on_prompts_with_guidance_and_steps(sigmascope: Run) -> None:
    make_pipeline("sd15").save_pretrained("pipe")
    Path("prompts.txt").write_text("a fox\n\na house\n")
    code, out, err = sigmascope(
        "lora", "statistics", "pipe", "--prompts", "prompts.txt", "--num_inference_steps", 2,
        "--guidance_scale", 3, "--save_to", "s.safetensors", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["calls"] == 4
    assert "mid_block.resnets.0.conv1" in load_statistics("s.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("of_pipeline", [True, False])
def test_a_run_that_was_killed_goes_on(
    of_pipeline: bool, sigmascope: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if of_pipeline:
        make_pipeline("sd15").save_pretrained("pipe")
    model = "pipe" if of_pipeline else tiny / "tuned.safetensors"
    flags = ["--noise", 3, "--num_inference_steps", 1, "--size", "32x32", "--json"]
    code, out, err = sigmascope("lora", "statistics", model, *flags, "--save_to", "a.safetensors")
    assert code == 0, err
    counted: list[int] = []

    def dies_at_the_second_input(self: UnfinishedSums) -> None:
        counted.append(self.inputs)
        if len(counted) == 2:
            raise KeyError("the end of the process")
        input_done(self)

    input_done = UnfinishedSums.input_done
    with monkeypatch.context() as patched:
        patched.setattr("sigmascope.lora.statistics_collection._WRITE_INTERVAL_SECONDS", 0.0)
        patched.setattr(UnfinishedSums, "input_done", dies_at_the_second_input)
        patched.setattr(UnfinishedSums, "__exit__", lambda *_: None)
        with pytest.raises(KeyError, match="the end of the process"):
            sigmascope("lora", "statistics", model, *flags, "--save_to", "b.safetensors")
        assert Path(".b.safetensors.part").is_file()
        assert not Path("b.safetensors").exists()
        code, again, err = sigmascope("lora", "statistics", model, *flags, "--save_to", "b.safetensors")
    assert code == 0, err
    assert counted == [0, 1, 1, 2]
    assert json.loads(again) == json.loads(out)
    one, other = load_file("a.safetensors"), load_file("b.safetensors")
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_blocks_that_are_computed_twice_give_the_same(sigmascope: Run) -> None:
    make_pipeline("sd15").save_pretrained("pipe")
    flags = ["--noise", 1, "--num_inference_steps", 1, "--size", "64x64"]
    for name, more in (("a", []), ("b", ["--gradient_checkpointing"])):
        code, _, err = sigmascope(
            "lora", "statistics", "pipe", *flags, *more, "--save_to", f"{name}.safetensors"
        )
        assert code == 0, err
    one, other = load_file("a.safetensors"), load_file("b.safetensors")
    for key, moments in one.items():
        torch.testing.assert_close(other[key], moments)


@pytest.mark.slow
def test_on_the_cpu_an_lbm_always_computes_blocks_twice_and_gives_the_same(
    sigmascope: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointed: list[object] = []
    for name in ("a", "b"):
        with monkeypatch.context() as patched:
            if name == "b":
                patched.setattr("sigmascope.lbm.lbm_statistics.checkpoint_gradients", checkpointed.append)
            flags = ["--noise", 1, "--size", "64x64", "--device", "cpu", "--save_to", f"{name}.safetensors"]
            code, _, err = sigmascope("lora", "statistics", tiny / "tuned.safetensors", *flags)
            assert code == 0, err
    assert len(checkpointed) == 1
    one, other = load_file("a.safetensors"), load_file("b.safetensors")
    for key, moments in one.items():
        torch.testing.assert_close(other[key], moments)


def test_a_model_without_checkpointing_is_told() -> None:
    with pytest.raises(ConfigError, match="Linear has no gradient checkpointing"):
        checkpoint_gradients(nn.Linear(1, 1))


@pytest.mark.slow
def test_a_pipeline_is_run_on_prompts_of_random_words(sigmascope: Run) -> None:
    make_pipeline("sd15").save_pretrained("pipe")
    code, out, err = sigmascope(
        "lora", "statistics", "pipe", "--noise", 2, "--num_inference_steps", 1, "--size", "32x32",
        "--save_to", "s.safetensors", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["samplings"] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Give one kind of input"),
        (["--noise", 1, "--prompts", "prompts.txt"], "Give one kind of input"),
        (["--noise", 0], "--noise 0 makes no picture"),
        (["--images", "nothing"], "--images nothing cannot be listed"),
        (["--images", "."], "holds no picture that can be read"),
        (["--prompts", "nothing.txt"], "--prompts nothing.txt"),
        (["--noise", 1, "--probes", 0], "--probes 0 measures nothing"),
        (["--noise", 1, "--rank", -1], "--rank -1"),
        (["--noise", 1, "--guidance_scale", 2], "--guidance_scale is for a pipeline"),
        (["--noise", 1, "--through", "calls"], "--through is for a pipeline"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_lost(
    arguments: list[object], says: str, sigmascope: Run
) -> None:
    Path("s.safetensors").write_bytes(b"what was there")
    code, _, err = sigmascope("lora", "statistics", TUNED_PATH, *arguments, "--save_to", "s.safetensors")
    assert code == 2
    assert says in err
    assert Path("s.safetensors").read_bytes() == b"what was there"


def test_neither_the_model_nor_the_statistics_are_written_over(sigmascope: Run) -> None:
    shutil.copy(TUNED_PATH, "model.safetensors")
    code, _, err = sigmascope(
        "lora", "statistics", "model.safetensors", "--noise", 1, "--save_to", "model.safetensors"
    )
    assert (code, "part of the input" in err) == (2, True)
    Path("s.safetensors").write_bytes(Path("model.safetensors").read_bytes())
    models = ["--base_model_path", BASE_PATH, "--tuned_model_path", TUNED_PATH]
    code, _, err = sigmascope(
        "lora", "extract", *models, "--save_to", "s.safetensors", "--statistics", "s.safetensors"
    )
    assert (code, "is the input" in err) == (2, True)
    assert Path("s.safetensors").read_bytes() == TUNED_PATH.read_bytes()
    assert Path("model.safetensors").read_bytes() == TUNED_PATH.read_bytes()


@pytest.mark.slow
def test_an_extraction_calibrates_itself_as_the_two_commands_do(sigmascope: Run, tiny: Path) -> None:
    Path("scenes").mkdir()
    scene(101).resize((64, 64)).save("scenes/101.png")
    base, tuned = tiny / "base.safetensors", tiny / "tuned.safetensors"
    code, *_ = sigmascope("lora", "statistics", tuned, "--images", "scenes", "--save_to", "s.safetensors")
    assert code == 0
    models = ["--base_model_path", base, "--tuned_model_path", tuned, "--rank", 2, "--conv_rank", 2]
    for name, flags in (("two", ["--statistics", "s.safetensors"]), ("one", ["--calibrate", "scenes"])):
        code, _, err = sigmascope("lora", "extract", *models, "--save_to", f"{name}.safetensors", *flags)
        assert code == 0, err
    one, two = load_file("one.safetensors"), load_file("two.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in two)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"--calibrate": "no_folder"}, "no_folder"),
        ({"--calibrate": "empty"}, "empty"),
        ({"--base_model_path": "missing.safetensors"}, "there is no base model"),
        ({"--tuned_model_path": "missing.safetensors"}, "missing.safetensors"),
        ({"--save_to": "lora.bin"}, "lora.bin"),
        ({"--save_to": "scenes/000.png/lora.safetensors"}, "lora.safetensors"),
        ({"--rank_for": "no_such_layer=4"}, "no_such_layer"),
        ({"--max_error": "5%", "--budget_weights": "plain"}, "--budget_weights plain"),
        ({"--rank_method": "threshold:0.01"}, "threshold"),
    ],
)
def test_what_cannot_be_extracted_is_refused_before_the_model_is_run(
    changed: dict[str, str], says: str, sigmascope: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("scenes").mkdir()
    Path("empty").mkdir()
    scene(101).resize((64, 64)).save("scenes/000.png")

    def run_too_early(*_: object, **__: object) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr("sigmascope.lbm.lbm_statistics.lbm_statistics", run_too_early)
    flags = {
        "--base_model_path": str(tiny / "base.safetensors"),
        "--tuned_model_path": str(tiny / "tuned.safetensors"),
        "--save_to": "lora.safetensors",
        "--calibrate": "scenes",
    } | changed
    code, _, err = sigmascope("lora", "extract", *(part for pair in flags.items() for part in pair))
    assert code != 0
    assert says in err.replace("\n", " ")
    assert not Path("lora.safetensors").exists()


@pytest.mark.slow
def test_a_lora_of_a_pipeline_is_fitted(sigmascope: Run) -> None:
    pipeline = make_pipeline("sd15")
    pipeline.save_pretrained("base")
    with torch.no_grad():
        for parameter in pipeline.unet.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    pipeline.save_pretrained("tuned")
    models = ["--base_model_path", "base", "--tuned_model_path", "tuned"]
    code, _, err = sigmascope(
        "lora", "extract", *models, "--rank", 2, "--conv_rank", 2, "--save_to", "a.safetensors"
    )
    assert code == 0, err
    inputs = ["--noise", 3, "--num_inference_steps", 2, "--size", "32x32", "--steps", 20]
    inputs += ["--gradient_accumulation_steps", 1]
    code, out, err = sigmascope(
        "lora", "fit", "a.safetensors", *models, *inputs, "--save_to", "b.safetensors", "--json"
    )
    assert code == 0, err
    told = json.loads(out)
    assert told["is_nearer"]
    assert told["error_after"] < told["error_before"] < 1.0
    assert (told["calls"], told["held_out"]) == (4, 2)
    one, other = load_file("a.safetensors"), load_file("b.safetensors")
    assert {key: value.shape for key, value in one.items()} == {
        key: value.shape for key, value in other.items()
    }


@pytest.mark.slow
def test_a_lora_of_an_lbm_is_fitted_and_the_report_says_how_near(sigmascope: Run, tiny: Path) -> None:
    models = [
        "--base_model_path",
        tiny / "base.safetensors",
        "--tuned_model_path",
        tiny / "tuned.safetensors",
    ]
    code, _, err = sigmascope(
        "lora", "extract", *models, "--rank", 2, "--conv_rank", 2, "--save_to", "a.safetensors"
    )
    assert code == 0, err
    inputs = ["--noise", 3, "--size", "64x64", "--steps", 10, "--gradient_checkpointing"]
    inputs += ["--gradient_accumulation_steps", 1]
    code, out, err = sigmascope(
        "lora", "fit", "a.safetensors", *models, *inputs, "--save_to", "b.safetensors"
    )
    assert code == 0, err
    assert "of what tuning changes in the outputs" in out
    assert "1 of 3 calls, held out" in out
    one, other = load_file("a.safetensors"), load_file("b.safetensors")
    assert one.keys() == other.keys()
    assert any(not torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Give one kind of input"),
        (["--noise", 0], "--noise 0 makes no picture"),
        (["--images", "nothing"], "--images nothing cannot be listed"),
        (["--noise", 1, "--steps", 0], "--steps 0"),
        (["--noise", 1, "--learning_rate", 0], "--learning_rate 0"),
        (["--noise", 1, "--batch_size", 2], "--batch_size is for a pipeline"),
        (["--noise", 1, "--guidance_scale", 2], "--guidance_scale is for a pipeline"),
        (["--noise", 1, "--torch_dtype", "fp16"], "is in float16"),
        (["--prompts", "nothing.txt"], "--prompts nothing.txt"),
    ],
)
def test_a_fit_that_makes_no_sense_is_refused_and_nothing_is_lost(
    arguments: list[object], says: str, sigmascope: Run, tiny: Path
) -> None:
    models = [
        "--base_model_path",
        tiny / "base.safetensors",
        "--tuned_model_path",
        tiny / "tuned.safetensors",
    ]
    code, _, err = sigmascope("lora", "extract", *models, "--rank", 1, "--save_to", "a.safetensors")
    assert code == 0, err
    Path("b.safetensors").write_bytes(b"what was there")
    code, _, err = sigmascope(
        "lora", "fit", "a.safetensors", *models, "--size", "64x64", *arguments, "--save_to", "b.safetensors"
    )
    assert code == 2
    assert says in err
    assert Path("b.safetensors").read_bytes() == b"what was there"


@pytest.mark.slow
def test_what_cannot_be_fitted_is_told_before_the_model_is_run(
    sigmascope: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [
        "--base_model_path",
        tiny / "base.safetensors",
        "--tuned_model_path",
        tiny / "tuned.safetensors",
    ]
    code, _, err = sigmascope("lora", "extract", *models, "--rank", 1, "--save_to", "a.safetensors")
    assert code == 0, err

    def run_too_early(*_: object, **__: object) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr("sigmascope.lbm.lbm_statistics.record_calls", run_too_early)
    other = {key.replace("conv_in", "no_such"): value for key, value in load_file("a.safetensors").items()}
    save_file(other, "other.safetensors")
    for lora, flags, says in (
        ("a.safetensors", ["--steps", 0], "--steps 0"),
        ("a.safetensors", ["--torch_dtype", "fp16"], "is in float16"),
        ("other.safetensors", [], "no_such"),
    ):
        code, _, err = sigmascope(
            "lora", "fit", lora, *models, "--noise", 1, *flags, "--save_to", "b.safetensors"
        )
        assert code != 0
        assert says in err


def test_a_fit_writes_over_none_of_its_inputs(sigmascope: Run, tiny: Path) -> None:
    base, tuned = tiny / "base.safetensors", tiny / "tuned.safetensors"
    for target in (base, tuned):
        code, _, err = sigmascope(
            "lora", "fit", BASE_PATH, "--base_model_path", base, "--tuned_model_path", tuned, "--noise", 1,
            "--save_to", target,
        )  # fmt: skip
        assert (code, "is the input" in err) == (2, True)


def scene(seed: int) -> Image.Image:
    return Image.fromarray(relighting_pair(seed, COOL)[0])


@pytest.mark.slow
def test_at_the_bytes_of_rank_2_the_picture_is_10_db_nearer_to_the_tuned_model_s(sigmascope: Run) -> None:
    """Calibrated on two scenes, scored on four others."""
    Path("scenes").mkdir()
    for seed in (101, 102):
        scene(seed).save(f"scenes/{seed}.png")
    code, *_ = sigmascope(
        "lora", "statistics", TUNED_PATH, "--images", "scenes", "--save_to", "s.safetensors"
    )
    assert code == 0
    extract_lora(BASE_PATH, TUNED_PATH, "plain.safetensors", ExtractOptions(rank=2, conv_rank=2))
    size = Path("plain.safetensors").stat().st_size
    models = ["--base_model_path", BASE_PATH, "--tuned_model_path", TUNED_PATH]
    code, *_ = sigmascope(
        "lora", "extract", *models, "--save_to", "small.safetensors", "--max_size", size,
        "--statistics", "s.safetensors",
    )  # fmt: skip
    assert code == 0
    assert Path("small.safetensors").stat().st_size <= size
    base, tuned = load_lbm(BASE_PATH, CONFIG_PATH), load_lbm(TUNED_PATH, CONFIG_PATH)
    pictures = [scene(seed) for seed in (201, 202, 203, 204)]
    truth = [translate_image(tuned, picture, seed=1) for picture in pictures]

    def decibels(path: str) -> float:
        with attach_lora(base, load_lora(path)):
            results = [translate_image(base, picture, seed=1) for picture in pictures]
        return sorted(psnr(result, expected) for result, expected in zip(results, truth, strict=True))[1]

    assert decibels("small.safetensors") > decibels("plain.safetensors") + 10
