import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.lora.conftest import Terminal

from sigmascope.lora import arrival
from sigmascope.lora.arrival import Arrival, Arrivals

Tensors = dict[str, torch.Tensor]
SHAPES = {
    "denoiser.conv_in": (8, 4, 3, 3),
    "denoiser.down_blocks.0.attentions.0.proj_in": (16, 16),
    "denoiser.conv_out": (4, 8, 3, 3),
}
PROJ = "denoiser.down_blocks.0.attentions.0.proj_in"


@pytest.fixture
def inspect(terminal: Terminal) -> Terminal:
    """Run `sigmascope lora inspect` in this process, with an 80-column terminal's width."""
    return partial(terminal, "lora", "inspect")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({f"{name}.weight": randn(*shape, seed=1) for name, shape in SHAPES.items()}, path)
    return path


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    path = tmp_path / "lora.safetensors"
    state: Tensors = {}
    for name, shape in SHAPES.items():
        state[f"{name}.lora_up.weight"] = randn(shape[0], 2, *(1 for _ in shape[2:]))
        state[f"{name}.lora_down.weight"] = randn(2, *shape[1:])
        state[f"{name}.alpha"] = torch.tensor(1.0)
    save_file(state, path)
    return path


UNET_LAYER = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.fixture
def model_of_unet(tmp_path: Path) -> Path:
    """A U-Net by its names."""
    path = tmp_path / "unet.safetensors"
    layers = {
        f"{UNET_LAYER}.weight": (16, 16),
        UNET_LAYER.replace("attn1.to_q", "attn2.to_k") + ".weight": (16, 16),
    }
    tensors = {"conv_in.weight": (16, 4, 3, 3), "time_embedding.linear_1.weight": (16, 16)} | layers
    save_file({name: randn(*shape) for name, shape in tensors.items()}, path)
    return path


@pytest.fixture
def half(lora: Path) -> Path:
    """The LoRA with one module renamed."""
    state = {key.replace("conv_out", "conv_away"): tensor for key, tensor in load_file(lora).items()}
    save_file(state, lora)
    return lora


def test_a_lora_that_fits_exits_with_zero(lora: Path, model: Path, inspect: Terminal) -> None:
    outcome = inspect(lora, "--model", model)
    assert outcome.code == 0
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("Modules that match"))
    assert line.split() == ["Modules", "that", "match", "3", "of", "3"]


def test_the_first_sentence_answers_before_the_figures(lora: Path, model: Path, inspect: Terminal) -> None:
    def first(*arguments: object) -> str:
        return " ".join(inspect(lora, *arguments).out.split())

    sound = load_file(lora)
    assert first().startswith("LoRA: lora.safetensors")
    assert first("--model", model).startswith("All 3 modules of the LoRA match model.safetensors. LoRA: ")
    save_file({key.replace("conv_out", "conv_away"): tensor for key, tensor in sound.items()}, lora)
    assert first("--model", model).startswith(
        "2 of 3 modules of the LoRA match model.safetensors: 1 has a name that the model does not have ("
    )
    save_file({key.replace("denoiser.", "denoiser.away_"): tensor for key, tensor in sound.items()}, lora)
    assert first("--model", model).startswith("None of the 3 modules changes a weight of the model: ")
    save_file({key: tensor * (".lora_down" not in key) for key, tensor in sound.items()}, lora)
    zeros = "The LoRA changes nothing: all its changes are zero, in 3 modules. LoRA: "
    assert first().startswith(zeros)
    assert first("--model", model).startswith(zeros)
    assert "Modules that do almost nothing: 3" in first()
    assert "columns that change nothing" not in first()  # which all of them are
    assert "Strongest modules" not in first()
    save_file({key: tensor / (".lora_down" not in key) for key, tensor in sound.items()}, lora)
    assert first("--model", model).startswith("3 of 3 modules hold NaN or Inf: ")


def test_what_does_not_match_is_named_with_reason_and_nearest(
    half: Path, model: Path, inspect: Terminal
) -> None:
    outcome = inspect(half, "--model", model)
    assert outcome.code == 1
    assert "2 of 3" in outcome.out
    assert "denoiser.conv_away" in outcome.out
    assert "nearest: denoiser.conv_in" in outcome.out


def test_reasons_are_grouped_with_what_to_do(half: Path, model: Path, inspect: Terminal) -> None:
    words = " ".join(inspect(half, "--model", model).out.split())
    assert (
        "1 module has a name that the model does not have. Compare the names with the model's nearest ones"
        in words
    )


def test_lines_fit_eighty_columns(half: Path, model: Path, inspect: Terminal) -> None:
    lines = inspect(half, "--model", model, "--relative_strength").out.splitlines()
    assert max(map(len, lines)) <= 80


def test_json_holds_the_inspection_and_the_verdict(half: Path, model: Path, inspect: Terminal) -> None:
    found = json.loads(inspect(half, "--model", model, "--json").out)
    verdict = found["model"]["verdict"]
    assert found["total_modules"] == verdict["total_modules"] == 3
    assert (verdict["matched_modules"], verdict["fits"]) == (2, False)
    assert verdict["reasons"] == {"unknown": 1}
    assert "relative_strength" not in found["model"]


def test_relative_strength_is_the_norm_of_the_change_by_that_of_the_weight(
    lora: Path, model: Path, inspect: Terminal
) -> None:
    found = json.loads(inspect(lora, "--model", model, "--relative_strength", "--json").out)
    measured = found["model"]["relative_strength"]["modules"][PROJ]
    tensors = load_file(lora)
    delta = 0.5 * tensors[f"{PROJ}.lora_up.weight"].double() @ tensors[f"{PROJ}.lora_down.weight"].double()
    weight = load_file(model)[f"{PROJ}.weight"].double()
    assert measured["relative_change"] == pytest.approx(float(delta.norm() / weight.norm()), rel=1e-7)


def test_relative_strength_needs_a_model(lora: Path, inspect: Terminal) -> None:
    outcome = inspect(lora, "--relative_strength")
    assert outcome.code == 2
    assert "--relative_strength" in outcome.err


def test_the_picture_has_a_bar_for_each_block(lora: Path, tmp_path: Path, inspect: Terminal) -> None:
    picture = tmp_path / "blocks.svg"
    assert inspect(lora, "--picture", picture).code == 0
    tips = [element.text for element in ElementTree.parse(picture).iter() if element.tag.endswith("title")]
    bars, cells = tips[:3], tips[3:]
    assert [tip.partition(",")[0] for tip in bars if tip] == [
        "conv_in: 1 module",
        "down_blocks.0: 1 module",
        "conv_out: 1 module",
    ]
    assert [tip.partition(":")[0].rpartition(".")[2] for tip in cells if tip][::2] == ["conv_in", "conv_out"]


def test_the_picture_shows_what_does_not_match_in_red(
    half: Path, model: Path, tmp_path: Path, inspect: Terminal
) -> None:
    picture = tmp_path / "blocks.svg"
    inspect(half, "--model", model, "--picture", picture)
    drawn = picture.read_text()
    assert "#c62828" in drawn
    assert "1 of 1 do not match" in drawn


def test_a_png_is_drawn_too(lora: Path, tmp_path: Path, inspect: Terminal) -> None:
    pytest.importorskip("PIL")
    picture = tmp_path / "blocks.png"
    assert inspect(lora, "--picture", picture).code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["blocks.pdf", "blocks"])
def test_other_pictures_are_refused(lora: Path, tmp_path: Path, inspect: Terminal, name: str) -> None:
    outcome = inspect(lora, "--picture", tmp_path / name)
    assert outcome.code == 2
    assert not (tmp_path / name).exists()


def test_a_missing_model_is_named(lora: Path, tmp_path: Path, inspect: Terminal) -> None:
    outcome = inspect(lora, "--model", tmp_path / "none.safetensors")
    assert outcome.code == 1
    assert "none.safetensors" in outcome.err


def test_markup_in_names_is_text(tmp_path: Path, model: Path, inspect: Terminal) -> None:
    path = tmp_path / "odd.safetensors"
    name = "denoiser.[bold]\x1b[31mred"
    save_file({f"{name}.lora_up.weight": randn(4, 1), f"{name}.lora_down.weight": randn(1, 4)}, path)
    outcome = inspect(path, "--model", model)
    assert "[bold]" in outcome.out
    assert "\x1b" not in outcome.out


def test_a_lora_of_zeros_changes_nothing_and_that_is_said(lora: Path, model: Path, inspect: Terminal) -> None:
    """As a training begins: up is zero, and every module matches."""
    state = {key: value * (".lora_up" not in key) for key, value in load_file(lora).items()}
    save_file(state, lora)
    outcome = inspect(lora, "--model", model)
    words = " ".join(outcome.out.split())
    assert "warning: The LoRA changes nothing: all its changes are zero, in 3 modules." in words
    assert json.loads(inspect(lora, "--model", model, "--json").out)["model"]["verdict"]["changes_nothing"]


def test_a_lora_with_one_change_is_not_said_to_change_nothing(
    lora: Path, model: Path, inspect: Terminal
) -> None:
    state = {key: value * (".lora_up" not in key or PROJ in key) for key, value in load_file(lora).items()}
    save_file(state, lora)
    assert "changes nothing" not in inspect(lora, "--model", model).out


def test_a_dora_has_no_strongest_modules_without_its_base(tmp_path: Path, inspect: Terminal) -> None:
    state = {
        f"{PROJ}.lora_up.weight": randn(16, 2),
        f"{PROJ}.lora_down.weight": randn(2, 16),
        f"{PROJ}.dora_scale": torch.ones(16, 1),
    }
    save_file(state, tmp_path / "dora.safetensors")
    out = inspect(tmp_path / "dora.safetensors").out
    assert "Strongest" not in out
    assert "Measured only beside their base model: 1" in " ".join(out.split())
    assert "Every module" in inspect(tmp_path / "dora.safetensors", "--verbose").out


def test_an_alpha_of_a_wrong_shape_is_named_with_the_file_once(
    lora: Path, tmp_path: Path, terminal: Terminal, inspect: Terminal
) -> None:
    save_file(load_file(lora) | {f"{PROJ}.alpha": torch.ones(2, 2)}, lora)
    outcome = terminal("lora", "convert", lora, tmp_path / "new.safetensors", "--format", "kohya")
    error = " ".join(outcome.err.split())
    assert error.count(lora.name) == 1
    assert f"{PROJ}.alpha has the shape (2, 2), and alpha is one number." in error
    said = " ".join(inspect(lora).out.split())
    assert f"{PROJ} (alpha has the shape (2, 2), and alpha is one number)" in said


@pytest.fixture
def fp8_model(model: Path) -> Path:
    """The same model in fp8 with a scale per tensor."""
    state: Tensors = {}
    for key, weight in load_file(model).items():
        scale = weight.abs().max() / 448
        state |= {key: (weight / scale).to(torch.float8_e4m3fn), f"{key}_scale": scale}
    save_file(state, model)
    return model


def test_what_arrives_is_shown_by_block_with_a_finding(
    lora: Path, fp8_model: Path, inspect: Terminal
) -> None:
    outcome = inspect(lora, "--model", fp8_model, "--arrives", "--strength", 0.002, "--json")
    assert outcome.code == 0
    arrives = json.loads(outcome.out)["model"]["arrives"]
    assert arrives["strength"] == 0.002
    assert [block["name"] for block in arrives["blocks"]] == ["conv_in", "down_blocks.0", "conv_out"]
    assert arrives["way"] == "comfyui"
    assert arrives["noise"] > 0.5
    assert arrives["other_ways"]["nearest"]["share"] < 0.8
    assert [finding["id"] for finding in arrives["findings"]] == ["lora_arrives_noisy"]


def test_a_lora_that_arrives_weak_and_noisy_is_warned_of_once(
    lora: Path, model: Path, inspect: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        arrival, "arrivals", lambda *_, **__: Arrivals(1.0, {PROJ: Arrival(4.0, 2.0, 5.0, "NVFP4")})
    )
    said = " ".join(inspect(lora, "--model", model, "--arrives").out.split())
    assert "warning: Only 50 % of the LoRA arrives in 1 weight, with noise of 100 % of its size" in said
    assert "The LoRA arrives with noise" not in said


def test_the_first_sentence_says_how_much_arrives_and_how_noisy(
    lora: Path, fp8_model: Path, inspect: Terminal
) -> None:
    found = json.loads(inspect(lora, "--model", fp8_model, "--arrives", "--strength", 0.002, "--json").out)
    arrives = found["model"]["arrives"]
    outcome = inspect(lora, "--model", fp8_model, "--arrives", "--strength", 0.002)
    first = " ".join(outcome.out.split())
    assert first.startswith(
        f"Merged at strength 0.002, {100 * arrives['share']:.0f} % of the LoRA arrives, with noise of "
        f"{100 * arrives['noise']:.0f} % of its size."
    )
    assert not inspect(lora, "--model", fp8_model).out.startswith("Merged")


def test_what_does_not_match_comes_before_how_much_arrives(
    half: Path, fp8_model: Path, inspect: Terminal
) -> None:
    first = " ".join(inspect(half, "--model", fp8_model, "--arrives").out.split())
    answer = first.partition(" LoRA: ")[0]
    assert answer.startswith(f"2 of 3 modules of the LoRA match {fp8_model.name}: 1 has a name that ")
    assert ". Merged at strength 1, " in answer


def test_a_host_that_loads_none_comes_before_how_much_arrives(tmp_path: Path, inspect: Terminal) -> None:
    layer = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    save_file({f"unet.{layer}.weight": randn(8, 8, seed=1)}, tmp_path / "unet.safetensors")
    factors = {f"unet.{layer}.lora_A.weight": randn(2, 8), f"unet.{layer}.lora_B.weight": randn(8, 2)}
    save_file(factors, tmp_path / "style.safetensors")
    said = inspect(tmp_path / "style.safetensors", "--model", tmp_path / "unet.safetensors", "--arrives").out
    first = " ".join(said.split())
    assert first.startswith(
        "1 of 1 module of the LoRA matches unet.safetensors, but ComfyUI 0.33 loads none of this file. "
        "Merged at strength 1, 100 % of the LoRA arrives"
    )


def test_a_strong_lora_arrives_whole(lora: Path, fp8_model: Path, inspect: Terminal) -> None:
    outcome = inspect(lora, "--model", fp8_model, "--arrives")
    assert outcome.code == 0
    assert "float8_e4m3fn" in outcome.out
    assert "lora_arrives" not in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_a_model_is_never_refused_for_its_storage(lora: Path, model: Path, inspect: Terminal) -> None:
    mark = torch.tensor(list(b'{"format": "fp2"}'), dtype=torch.uint8)
    state = {key: weight.to(torch.float8_e4m3fn) for key, weight in load_file(model).items()}
    marks = {key.replace(".weight", ".comfy_quant"): mark.clone() for key in state}
    save_file(state | marks, model)
    assert inspect(lora, "--model", model).code == 0
    outcome = inspect(lora, "--model", model, "--arrives")
    assert outcome.code == 0
    assert "unknown, because" in outcome.out


def test_a_reason_that_all_weights_share_is_said_once_above_them(
    lora: Path, fp8_model: Path, inspect: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arrivals(*_: object, **__: object) -> Arrivals:
        why = dict.fromkeys("ab", "a package is missing.") | {"c": "it is damaged"}
        return Arrivals(1.0, {key: Arrival(0.0, 0.0, 0.0, unavailable=reason) for key, reason in why.items()})

    monkeypatch.setattr(arrival, "arrivals", arrivals)
    out = inspect(lora, "--model", fp8_model, "--arrives").out
    assert out.count("Unknown, because a package is missing. Weights: 2\n  a\n  b\n") == 1
    assert "Unknown, because it is damaged. Weights: 1\n  c\n" in out


def test_nothing_is_said_to_arrive_of_a_file_that_matches_nothing(
    lora: Path, tmp_path: Path, model: Path, inspect: Terminal
) -> None:
    away = {key.replace("denoiser.", "denoiser.away_"): tensor for key, tensor in load_file(lora).items()}
    save_file(away, tmp_path / "away.safetensors")
    out = inspect(tmp_path / "away.safetensors", "--model", model, "--arrives").out
    assert "0 of 3" in out
    assert "Arrives" not in out
    assert "Leave it unmerged" not in out


@pytest.mark.parametrize("flags", [["--arrives"], ["--strength", "0.5"]])
def test_what_arrives_needs_a_model_and_a_strength_needs_that(
    lora: Path, inspect: Terminal, flags: list[str]
) -> None:
    outcome = inspect(lora, *flags)
    assert outcome.code == 2
    assert "--arrives" in outcome.err


@pytest.mark.parametrize("strength", ["nan", "inf", "-inf"])
def test_a_strength_that_is_not_finite_is_refused(
    lora: Path, model: Path, inspect: Terminal, strength: str
) -> None:
    outcome = inspect(lora, "--model", model, "--arrives", "--strength", strength)
    assert outcome.code == 2
    assert "--strength must be finite" in outcome.err


def test_loras_together_show_signed_interference(inspect: Terminal, lora: Path, tmp_path: Path) -> None:
    opposite = tmp_path / "opposite.safetensors"
    tensors = load_file(lora)
    tensors[f"{PROJ}.alpha"] *= -1.0
    save_file(tensors, opposite)
    outcome = inspect(lora, opposite, "--together")
    assert outcome.code == 0
    assert "3 of 3" in outcome.out
    assert {"+100.0 %", "-100.0 %"} <= {line.rsplit("  ", 1)[-1].strip() for line in outcome.out.splitlines()}
    assert "No module is changed by two" not in outcome.out
    modules = json.loads(inspect(lora, opposite, "--together", "--json").out)["modules"]
    signs = {module["name"]: round(module["interference"], 6) for module in modules}
    assert signs == {name: -1.0 if name == PROJ else 1.0 for name in SHAPES}


def test_loras_that_change_no_module_in_common_are_said_to(
    inspect: Terminal, lora: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.safetensors"
    save_file(
        {key.replace("denoiser.", "denoiser.away_"): tensor for key, tensor in load_file(lora).items()}, other
    )
    assert "No module is changed by two of these LoRAs." in inspect(lora, other, "--together").out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((), "Add --together"), (("--together", "--full_spectrum"), "with --verbose and --json alone")],
)
def test_several_loras_need_together_alone(
    inspect: Terminal, lora: Path, arguments: tuple[str, ...], says: str
) -> None:
    outcome = inspect(lora, lora, *arguments)
    assert (outcome.code, says in " ".join(outcome.err.split())) == (2, True)


def test_intruders_are_counted_by_weight_and_need_a_model(lora: Path, model: Path, inspect: Terminal) -> None:
    told = json.loads(inspect(lora, "--model", model, "--intruders", "--strength", "8", "--json").out)[
        "model"
    ]["intruder_dimensions"]
    state, weight = load_file(lora), load_file(model)[f"{PROJ}.weight"]
    changed = weight + 8 * 0.5 * state[f"{PROJ}.lora_up.weight"] @ state[f"{PROJ}.lora_down.weight"]
    own, vectors = (torch.linalg.svd(matrix).U for matrix in (weight, changed))
    expected = int(((own.mT @ vectors[:, :10]).abs().amax(dim=0) < 0.5).sum())
    assert told["weights"][f"{PROJ}.weight"]["intruders"] == expected > 0
    assert told["examined"] == 10 + 8 + 4  # as many as the smaller weights have
    assert "Intruder dimensions" in inspect(lora, "--model", model, "--intruders").out
    assert "--intruders needs a model" in inspect(lora, "--intruders").err


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "LORA", "--model", "LORA"),
        ("merge", "LORA", "--into", "LORA", "--save_to", "out.safetensors"),
        ("convert", "LORA", "out.safetensors", "--format", "kohya", "--model", "LORA"),
    ],
    ids=lambda command: command[0],
)
def test_a_lora_in_place_of_the_model_is_refused(
    command: tuple[str, ...], lora: Path, terminal: Terminal
) -> None:
    outcome = terminal("lora", *(str(lora) if word == "LORA" else word for word in command))
    assert outcome.code == 1
    assert "lora.safetensors is a LoRA, not a model." in " ".join(outcome.err.split())


def test_a_file_with_only_the_ending_in_common_is_not_suggested(inspect: Terminal, lora: Path) -> None:
    missing = inspect(lora.with_name("house.safetensors")).err
    assert "Checkpoints there: lora.safetensors" in " ".join(missing.split())
    assert "Did you mean" not in missing


@pytest.mark.parametrize("asked", ["--arrives", "--intruders"])
def test_strength_0_is_the_first_thing_said(asked: str, lora: Path, model: Path, inspect: Terminal) -> None:
    out = " ".join(inspect(lora, "--model", model, asked, "--strength", 0).out.split())
    cause = "The LoRA changes nothing: it has strength 0 on 3 weights."
    assert out.startswith(cause)
    assert f"warning: {cause} Set its strength" in out
    assert "Leave it unmerged" not in out
    told = json.loads(inspect(lora, "--model", model, asked, "--strength", 0, "--json").out)
    assert [finding["id"] for finding in told["model"]["findings"]] == ["lora_strength_zero"]


def test_modules_that_do_not_match_are_said_before_what_arrives_of_the_others(
    half: Path, model: Path, inspect: Terminal
) -> None:
    out = " ".join(inspect(half, "--model", model, "--arrives").out.split())
    assert out.startswith("2 of 3 modules of the LoRA match model.safetensors: 1 has a name that")
    assert "Merged at strength 1, 100 % of the LoRA arrives" in out


def test_what_arrives_in_a_base_that_does_not_say_its_format_is_unknown_first(
    lora: Path, model: Path, inspect: Terminal
) -> None:
    state: Tensors = {}
    for key, weight in load_file(model).items():
        name = key.removesuffix(".weight")
        text = torch.tensor(list(b"{}"), dtype=torch.uint8)
        state |= {key: weight.to(torch.float8_e4m3fn), f"{name}.comfy_quant": text}
    save_file(state, model)
    out = " ".join(inspect(lora, "--model", model, "--arrives").out.split())
    assert out.startswith("How much of the LoRA arrives is unknown, because ")
    assert re.search(r"'([\w.]+)\.comfy_quant' gives no format for \1\.weight", out)
    assert "None'" not in out


def test_a_change_far_above_the_weights_has_a_figure_that_can_be_read(
    lora: Path, model: Path, inspect: Terminal
) -> None:
    save_file({k: v * (1 if "alpha" in k else 1e30) for k, v in load_file(lora).items()}, lora)
    out = inspect(lora, "--model", model, "--relative_strength").out
    assert "e+62 %" in out or "e+61 %" in out
    assert "000,000" not in out


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_ctrl_c_ends_a_command_within_one_long_call(command: str, lora: Path) -> None:
    """No signal is heard within a call of LAPACK, as none is within a sleep of another thread."""
    code = f"""if True:
        import sys, time
        from sigmascope.lora import compare, inspect
        def slow(*_, **__):
            print("begun", flush=True)
            time.sleep(60)
        inspect.measured_modules = compare._compare = slow
        from sigmascope.cli import main
        sys.argv = ["sigmascope", "lora", {command!r}, *sys.argv[1:]]
        main()
    """
    files = [str(lora)] * (2 if command == "diff" else 1)
    with subprocess.Popen(
        [sys.executable, "-c", code, *files], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, said) == (130, "Stopped by Ctrl-C.\n")
    assert [path.name for path in lora.parent.iterdir()] == [lora.name]


def test_where_no_host_loads_a_file_there_is_one_advice(
    model_of_unet: Path, tmp_path: Path, inspect: Terminal
) -> None:
    """Each host's own was to convert to another format, or to load the file with a function that refuses it."""
    path = tmp_path / "bare.safetensors"
    save_file({f"{UNET_LAYER}.lora_{end}.weight": torch.ones(16, 16) for end in "AB"}, path)
    outcome = inspect(path, "--model", model_of_unet)
    said = " ".join(outcome.out.split())
    assert said.count("onvert") == 2  # "Convert the file … sigmascope lora convert"
    assert "--format kohya" in said
    assert "diffusers loads nothing from this file with load_lora_weights" in said
    assert "load_lora_adapter" not in said
    (own,) = (
        finding
        for finding in json.loads(inspect(path, "--model", model_of_unet, "--json").out)["model"]["verdict"][
            "findings"
        ]
        if finding["id"] == "lora_part_unnamed"
    )
    assert own["advice"] is None
