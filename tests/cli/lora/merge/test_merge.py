import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.lora.conftest import Outcome, Terminal

Tensors = dict[str, torch.Tensor]
LONG = "denoiser.down_blocks.2.attentions.1.transformer_blocks.9.attn1.to_q"
SHAPES = {"denoiser.conv_in": (8, 4, 3, 3), LONG: (16, 12), "denoiser.conv_out": (4, 8, 3, 3)}


@pytest.fixture
def sigmascope(terminal: Terminal) -> Terminal:
    """Run the command line in this process, with an 80-column terminal's width."""
    return terminal


def tensors_of(seed: int = 0, scale: float = 1.0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, shape in SHAPES.items():
        up = torch.randn(shape[0], 4, *(1 for _ in shape[2:]), generator=generator)
        tensors[f"{name}.lora_up.weight"] = 0.1 * scale * up
        tensors[f"{name}.lora_down.weight"] = torch.randn(4, *shape[1:], generator=generator)
        tensors[f"{name}.alpha"] = torch.tensor(4.0)
    return tensors


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    path = tmp_path / "lora.safetensors"
    save_file(tensors_of(), path, {"ss_training_comment": "[bold]mine[/bold]"})
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "other.safetensors"
    save_file(tensors_of(seed=1), path)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    generator = torch.Generator().manual_seed(5)
    save_file(
        {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}, path
    )
    return path


def fits_a_terminal(outcome: Outcome) -> None:
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "\x1b" not in outcome.out + outcome.err


def test_resize_shows_ranks_energy_error_and_sizes(lora: Path, sigmascope: Terminal) -> None:
    target = lora.with_name("small.safetensors")
    outcome = sigmascope("lora", "resize", lora, target, "--rank", 2, "--verbose")
    assert outcome.code == 0, outcome.err
    fits_a_terminal(outcome)
    for said in ("Old rank", "Energy", "conv_out", "fixed:2,conv=2", "Error, overall", "before,", "Written:"):
        assert said in outcome.out
    assert load_file(target)[f"{LONG}.lora_down.weight"].shape == (2, 12)


def test_resize_prints_json_alone(lora: Path, sigmascope: Terminal) -> None:
    outcome = sigmascope(
        "lora", "resize", lora, lora.with_name("s.safetensors"), "--rank", 9999, "--conv-rank", 1, "--json"
    )
    report = json.loads(outcome.out)
    assert {entry["name"]: entry["rank"] for entry in report["modules"]} == {
        "denoiser.conv_in": 1,
        LONG: 4,
        "denoiser.conv_out": 1,
    }


def test_resize_takes_any_way_to_choose_ranks(lora: Path, sigmascope: Terminal) -> None:
    for flags in (
        ("--rank_method", "energy:0.8"),
        ("--max_size", "3KB"),
        ("--max_error", "20%"),
        ("--dynamic_method", "sv_ratio", "--dynamic_param", 2),
        ("--rank_for", "conv_in=1"),
        ("--exclude", "conv_in"),
    ):
        outcome = sigmascope("lora", "resize", lora, lora.with_name("s.safetensors"), *flags, "--json")
        assert outcome.code == 0, outcome.err
        assert any(entry["rank"] < 4 for entry in json.loads(outcome.out)["modules"])


def test_a_size_and_an_error_are_said_in_words(lora: Path, sigmascope: Terminal) -> None:
    for flags, says in (
        (("--max_size", "3KB"), "a file of at most 3 KB"),
        (("--max_error", "20%"), "an error of at most 20 %"),
    ):
        out = sigmascope("lora", "resize", lora, lora.with_name("s.safetensors"), *flags).out
        (line,) = (line for line in out.splitlines() if line.startswith("Ranks asked for"))
        assert line.removeprefix("Ranks asked for").strip() == says


def test_resize_wants_to_know_how_much_rank(lora: Path, sigmascope: Terminal) -> None:
    outcome = sigmascope("lora", "resize", lora, lora.with_name("s.safetensors"))
    assert outcome.code == 2
    assert "no rank is given" in outcome.err
    assert "--rank 16" in outcome.err


def test_resize_writes_another_format_and_precision(lora: Path, sigmascope: Terminal) -> None:
    target = lora.with_name("s.safetensors")
    flags = ("--rank", 2, "--format", "peft", "--save_precision", "bf16")
    assert sigmascope("lora", "resize", lora, target, *flags).code == 0
    assert load_file(target)["unet.conv_in.lora_A.weight"].dtype == torch.bfloat16


def test_merge_of_two_loras(lora: Path, other: Path, sigmascope: Terminal) -> None:
    target = lora.with_name("both.safetensors")
    outcome = sigmascope("lora", "merge", lora, other, "--weights", "0.5,2", "--save_to", target)
    assert outcome.code == 0, outcome.err
    fits_a_terminal(outcome)
    assert "0.5 × " in outcome.out
    one, two, after = (load_file(path) for path in (lora, other, target))
    up = torch.cat([0.5 * one[f"{LONG}.lora_up.weight"], 2.0 * two[f"{LONG}.lora_up.weight"]], dim=1)
    assert torch.equal(after[f"{LONG}.lora_up.weight"], up)


@pytest.mark.parametrize("method", ["ties", "dare"])
def test_merge_by_other_methods(lora: Path, other: Path, sigmascope: Terminal, method: str) -> None:
    flags = ("--save_to", lora.with_name("both.safetensors"), "--method", method, "--density", 0.4)
    needs_rank = sigmascope("lora", "merge", lora, other, *flags)
    assert needs_rank.code == 2
    assert "a rank has to be chosen" in needs_rank.err
    outcome = sigmascope("lora", "merge", lora, other, *flags, "--rank", 3)
    assert outcome.code == 0, outcome.err
    assert f"{method}, density 0.4" in outcome.out


def test_merge_into_a_checkpoint(lora: Path, other: Path, model: Path, sigmascope: Terminal) -> None:
    target = lora.with_name("merged.safetensors")
    outcome = sigmascope("lora", "merge", lora, other, "--into", model, "--save_to", target, "--verbose")
    assert outcome.code == 0, outcome.err
    fits_a_terminal(outcome)
    assert "3 (0 copied bit for bit)" in outcome.out
    assert "Lost to rounding" in outcome.out
    before, after = load_file(model), load_file(target)
    expected = before[f"{LONG}.weight"]
    for path in (lora, other):
        tensors = load_file(path)
        expected = expected + tensors[f"{LONG}.lora_up.weight"] @ tensors[f"{LONG}.lora_down.weight"]
    torch.testing.assert_close(after[f"{LONG}.weight"], expected)


def test_merge_into_a_checkpoint_that_lacks_layers(lora: Path, model: Path, sigmascope: Terminal) -> None:
    state = load_file(model)
    del state[f"{LONG}.weight"]
    save_file(state, model)
    command = ("lora", "merge", lora, "--into", model, "--save_to", lora.with_name("merged.safetensors"))
    refused = sigmascope(*command)
    assert refused.code == 1
    assert LONG in refused.err
    assert "--allow_unmatched" in refused.err
    allowed = sigmascope(*command, "--allow_unmatched", "--json")
    assert json.loads(allowed.out)["unmatched"] == {"0": [LONG]}


def test_merge_into_another_variant_of_the_model(tmp_path: Path, sigmascope: Terminal) -> None:
    """A LoRA of WAN 2.1's I2V model on WAN 2.2, which has no image attention (ostris/ai-toolkit 349)."""
    own, other = "blocks.0.self_attn.q", "blocks.0.cross_attn.k_img"
    model, lora = tmp_path / "wan.safetensors", tmp_path / "i2v.safetensors"
    keys = ("patch_embedding.weight", "head.modulation", f"{own}.weight")
    save_file({key: torch.zeros(4, 4) for key in keys}, model)
    ends = {"lora_up.weight": torch.eye(4)[:, :1], "lora_down.weight": torch.eye(4)[:1]}
    save_file(
        {f"diffusion_model.{name}.{end}": t.clone() for name in (own, other) for end, t in ends.items()}, lora
    )
    outcome = sigmascope("lora", "merge", lora, "--into", model, "--save_to", tmp_path / "merged.safetensors")
    assert outcome.code == 0, outcome.err
    assert "1 of 2 modules of i2v.safetensors is for a layer" in " ".join(outcome.out.split())
    assert "k_img" in outcome.out
    assert "Energy kept       50 %" in outcome.out
    assert load_file(tmp_path / "merged.safetensors")[f"{own}.weight"][0, 0] == 1.0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--weights", "0.5"), "1 number for 2 LoRAs"),
        (("--weights", "a,b"), "--weights a,b: these are not numbers"),
        (("--density", 0.5), "--density has no effect"),
        (("--seed", 1), "--seed has no effect"),
        (("--allow_unmatched",), "--allow_unmatched: for --into only"),
        (("--into", "model.safetensors", "--rank", 4), "a rank option: for LoRAs that become one LoRA only"),
        (
            ("--into", "model.safetensors", "--format", "peft"),
            "--format: for LoRAs that become one LoRA only",
        ),
        (("--method", "ties", "--density", 2, "--rank", 2), "--density 2.0"),
    ],
)
def test_merge_refuses_what_makes_no_sense(
    lora: Path, other: Path, sigmascope: Terminal, flags: tuple[object, ...], said: str
) -> None:
    outcome = sigmascope(
        "lora", "merge", lora, other, "--save_to", lora.with_name("both.safetensors"), *flags
    )
    assert outcome.code == 2
    assert said in " ".join(outcome.err.split())


def test_inspect_shows_blocks_modules_and_header(lora: Path, sigmascope: Terminal) -> None:
    outcome = sigmascope("lora", "inspect", lora, "--verbose")
    assert outcome.code == 0, outcome.err
    fits_a_terminal(outcome)
    for said in ("native", "Effective", "down_blocks.2", "4 (3)", "[bold]mine[/bold]"):
        assert said in outcome.out


def test_inspect_prints_spectra_as_json_on_request(lora: Path, sigmascope: Terminal) -> None:
    plain = json.loads(sigmascope("lora", "inspect", lora, "--json").out)
    full = json.loads(sigmascope("lora", "inspect", lora, "--json", "--verbose").out)
    assert "singular_values" not in plain["modules"][0]
    assert len(full["modules"][0]["singular_values"]) == 4


def test_inspect_lets_no_markup_or_control_characters_through(tmp_path: Path, sigmascope: Terminal) -> None:
    header = {
        "ss_output_name": "[link=file:///etc/passwd]click[/link]",
        "modelspec.title": "\x1b[2J\x07wiped\r\nline",
        "modelspec.[red]x": "y" * 5000,
        "[bold]": "z",
        "ss_tag_frequency": json.dumps({"a": {"[blink]tag": 3}}),
    }
    name = "denoiser.[bold]layer"
    tensors = {f"{name}.lora_up.weight": torch.ones(4, 1), f"{name}.lora_down.weight": torch.ones(1, 4)}
    save_file(tensors, tmp_path / "odd.safetensors", header)
    outcome = sigmascope("lora", "inspect", tmp_path / "odd.safetensors")
    assert outcome.code == 0, outcome.err
    assert "\x1b" not in outcome.out
    assert "\x07" not in outcome.out
    for said in ("[link=file:///etc/passwd]click[/link]", "[bold]layer", "[blink]tag (3)"):
        assert said in outcome.out
    assert outcome.out.count("y") < 1000


def test_inspect_names_modules_that_hold_nan(lora: Path, sigmascope: Terminal) -> None:
    tensors = load_file(lora)
    tensors[f"{LONG}.lora_up.weight"][0, 0] = float("nan")
    save_file(tensors, lora)
    outcome = sigmascope("lora", "inspect", lora)
    assert outcome.code == 0
    assert "Modules with NaN or Inf: 1" in outcome.out
    assert json.loads(sigmascope("lora", "inspect", lora, "--json").out)["not_finite"] == [LONG]


@pytest.mark.parametrize("command", ["inspect", "resize", "merge", "diff"])
def test_a_damaged_file_gets_one_clear_error(lora: Path, sigmascope: Terminal, command: str) -> None:
    damaged = lora.with_name("damaged.safetensors")
    damaged.write_bytes(lora.read_bytes()[:-7])
    more: dict[str, tuple[object, ...]] = {
        "inspect": (),
        "resize": (lora.with_name("o.safetensors"), "--rank", 1),
        "merge": ("--save_to", lora.with_name("o.safetensors")),
        "diff": (lora,),
    }
    outcome = sigmascope("lora", command, damaged, *more[command])
    assert outcome.code == (2 if command == "diff" else 1)
    assert outcome.out == ""
    assert outcome.err.count("Error:") == 1
    assert "damaged.safetensors: is truncated" in outcome.err
    assert not lora.with_name("o.safetensors").exists()


def test_diff_of_the_same_change_exits_with_0(lora: Path, sigmascope: Terminal) -> None:
    copied = lora.with_name("kohya.safetensors")
    assert sigmascope("lora", "convert", lora, copied, "--format", "kohya").code == 0
    outcome = sigmascope("lora", "diff", lora, copied)
    assert outcome.code == 0, outcome.err
    fits_a_terminal(outcome)
    assert "the same change" in outcome.out
    assert "kohya" in outcome.out


def test_diff_of_a_scaled_change_exits_with_1_and_names_the_factor(lora: Path, sigmascope: Terminal) -> None:
    scaled = lora.with_name("scaled.safetensors")
    save_file(tensors_of(scale=0.5), scaled)
    outcome = sigmascope("lora", "diff", lora, scaled)
    assert outcome.code == 1
    assert "B = 0.5 · A" in outcome.out


def test_diff_of_different_changes_lists_the_most_different(
    lora: Path, other: Path, sigmascope: Terminal
) -> None:
    outcome = sigmascope("lora", "diff", lora, other)
    assert outcome.code == 1
    fits_a_terminal(outcome)
    assert "Most different modules" in outcome.out
    assert json.loads(sigmascope("lora", "diff", lora, other, "--json").out)["verdict"] == "different"


def test_diff_of_a_missing_file_exits_with_2(lora: Path, sigmascope: Terminal) -> None:
    outcome = sigmascope("lora", "diff", lora, lora.with_name("none.safetensors"))
    assert outcome.code == 2
    assert "none.safetensors" in outcome.err


@pytest.mark.parametrize("command", ["resize", "merge", "inspect", "diff"])
def test_help_has_an_example(sigmascope: Terminal, command: str) -> None:
    outcome = sigmascope("lora", command, "--help")
    assert outcome.code == 0
    assert f"sigmascope lora {command} " in " ".join(outcome.out.split())


def test_inspect_survives_header_names_that_look_like_markup(tmp_path: Path, sigmascope: Terminal) -> None:
    tensors = {"a.lora_up.weight": torch.ones(4, 1), "a.lora_down.weight": torch.ones(1, 4)}
    save_file(tensors, tmp_path / "odd.safetensors", {"modelspec.[/red]x": "y", "sigmascope_[bold]": "z"})
    outcome = sigmascope("lora", "inspect", tmp_path / "odd.safetensors")
    assert outcome.code == 0, outcome.err
    assert "[/red]x" in outcome.out
    assert "[bold]" in outcome.out


def test_a_merge_that_changes_nothing_says_so(
    lora: Path, model: Path, sigmascope: Terminal, tmp_path: Path
) -> None:
    target = tmp_path / "merged.safetensors"
    zero = tmp_path / "zero.safetensors"
    save_file(tensors_of(scale=0.0), zero)
    said = " ".join(sigmascope("lora", "merge", zero, "--into", model, "--save_to", target).out.split())
    assert "The merge changes nothing: all changes are zero." in said
    before, after = load_file(model), load_file(target)
    assert all(before[key].equal(after[key]) for key in before)
    command = ("lora", "merge", lora, "--into", model, "--save_to", target)
    weightless = " ".join(sigmascope(*command, "--weights", "0").out.split())
    assert "The merge changes nothing: each has the weight 0." in weightless
    assert not json.loads(sigmascope(*command, "--json").out)["changes_nothing"]
