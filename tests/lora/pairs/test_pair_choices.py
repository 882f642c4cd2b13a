"""What does not fit between two checkpoints: refused by default, left out by choice, named always."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import nn

from sigmascope.errors import CheckpointError, ConfigError, ModelMismatchError
from sigmascope.lora.pairs import CheckpointPair, PairOptions, open_pair

if TYPE_CHECKING:
    from tests.conftest import MakePair, State

    from sigmascope.records.run import Finding

CONV_IN = "denoiser.conv_in.weight"
CONV_OUT = "denoiser.conv_out.weight"
CPU = torch.device("cpu")


def finding(pair: CheckpointPair, name: str) -> "Finding":
    (found,) = [found for found in pair.findings if found.id == f"lora.{name}"]
    return found


def test_two_models_that_fit_have_no_findings(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    with open_pair(files.base, files.tuned) as pair:
        assert pair.findings == ()
        assert pair.skipped == {}


@pytest.mark.parametrize(("side", "lacking"), [("tuned", "tuned model"), ("base", "base")])
def test_a_missing_key_may_be_left_out_and_is_named(
    make_model_pair: "MakePair", side: str, lacking: str
) -> None:
    files = make_model_pair(
        edit=lambda base, tuned: {"base": base, "tuned": tuned}[side].__delitem__(CONV_IN)
    )
    with pytest.raises(ModelMismatchError, match="--on_missing skip"), open_pair(files.base, files.tuned):
        pass
    with open_pair(files.base, files.tuned, PairOptions(on_missing="skip")) as pair:
        assert "denoiser.conv_in" not in pair.layers
        assert pair.skipped == {CONV_IN: f"the {lacking} lacks it"}
        found = finding(pair, "missing_keys")
    assert CONV_IN in found.message
    assert f"{side}.safetensors lacks 1 tensor" in found.message
    assert found.evidence["keys"] == CONV_IN


def test_a_changed_shape_may_be_left_out_and_is_named(make_model_pair: "MakePair") -> None:
    def widen(base: "State", tuned: "State") -> None:
        tuned[CONV_IN] = torch.zeros(8, 9, 3, 3)

    files = make_model_pair(edit=widen)
    with (
        pytest.raises(ModelMismatchError, match="--on_shape_change skip"),
        open_pair(files.base, files.tuned),
    ):
        pass
    with open_pair(files.base, files.tuned, PairOptions(on_shape_change="skip")) as pair:
        assert "denoiser.conv_in" not in pair.layers
        assert pair.skipped == {CONV_IN: "its shape differs"}
        found = finding(pair, "shapes_changed")
    assert "(8, 4, 3, 3) in the base and (8, 9, 3, 3) in the tuned model" in found.message


def add(key: str, base_value: Any, tuned_value: Any) -> Any:
    def edit(base: "State", tuned: "State") -> None:
        base[key], tuned[key] = torch.tensor(base_value), torch.tensor(tuned_value)

    return edit


@pytest.mark.parametrize("value", [[0, 1, 2], [True, False, True]])
def test_equal_integers_are_no_obstacle_and_are_named(make_model_pair: "MakePair", value: Any) -> None:
    files = make_model_pair(edit=add("denoiser.position_ids", value, value))
    with open_pair(files.base, files.tuned) as pair:
        assert "denoiser.position_ids" not in pair.others
        assert finding(pair, "integer_tensors").severity == "info"
        assert finding(pair, "integer_tensors").evidence["keys"] == "denoiser.position_ids"


def test_changed_integers_are_refused_unless_they_may_be_left_out(make_model_pair: "MakePair") -> None:
    files = make_model_pair(edit=add("denoiser.position_ids", [0, 1], [1, 0]))
    with (
        pytest.raises(ModelMismatchError, match=r"denoiser\.position_ids holds integers.*--on_integer skip"),
        open_pair(files.base, files.tuned),
    ):
        pass
    with open_pair(files.base, files.tuned, PairOptions(on_integer="skip")) as pair:
        assert finding(pair, "integer_tensors_changed").severity == "warning"
        assert pair.skipped == {"denoiser.position_ids": "it holds integers"}


def test_integer_weights_may_be_left_out_too(make_model_pair: "MakePair") -> None:
    def quantise(base: "State", tuned: "State") -> None:
        base[CONV_IN] = base[CONV_IN].to(torch.int8)

    files = make_model_pair(edit=quantise)
    with open_pair(files.base, files.tuned, PairOptions(on_integer="skip")) as pair:
        assert pair.skipped == {CONV_IN: "it holds integers"}


def narrow(base: "State", tuned: "State") -> None:
    for key in (CONV_IN, CONV_OUT):
        tuned[key] = tuned[key].bfloat16()


def test_mixed_dtypes_are_compared_and_named(make_model_pair: "MakePair") -> None:
    files = make_model_pair(edit=narrow)
    with open_pair(files.base, files.tuned) as pair:
        assert "denoiser.conv_in" in pair.layers
        found = finding(pair, "mixed_dtypes")
    assert found.evidence["keys"] == f"{CONV_IN} {CONV_OUT}"
    assert "float32 in the base, bfloat16 in the tuned model" in found.message


def test_mixed_dtypes_may_be_refused_or_left_out(make_model_pair: "MakePair") -> None:
    files = make_model_pair(edit=narrow)
    with (
        pytest.raises(ModelMismatchError, match=r"2 tensors in different dtypes.*conv_in"),
        open_pair(files.base, files.tuned, PairOptions(on_mixed_dtypes="error")),
    ):
        pass
    with open_pair(files.base, files.tuned, PairOptions(on_mixed_dtypes="skip")) as pair:
        assert set(pair.skipped) == {CONV_IN, CONV_OUT}
        assert "denoiser.conv_in" not in pair.layers


def test_many_names_are_counted_in_the_message_and_all_listed_as_evidence(
    make_model_pair: "MakePair",
) -> None:
    def cut(base: "State", tuned: "State") -> None:
        for key in list(tuned)[:-4]:
            if key.startswith("denoiser."):
                del tuned[key]

    files = make_model_pair(edit=cut)
    with open_pair(files.base, files.tuned, PairOptions(on_missing="skip")) as pair:
        found = finding(pair, "missing_keys")
        lost = [key for key in pair.skipped if pair.skipped[key] == "the tuned model lacks it"]
    assert f" and {len(lost) - 3} more" in found.message
    assert found.evidence["keys"] == " ".join(lost)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parts", ()),
        ("parts", ("unet",)),
        ("on_missing", "ignore"),
        ("on_shape_change", ""),
        ("on_integer", "x"),
        ("on_mixed_dtypes", "x"),
    ],
)
def test_options_that_are_not_known_are_refused_with_their_flag(name: str, value: Any) -> None:
    options = PairOptions()
    object.__setattr__(
        options, name, value
    )  # the annotations, which are checked in tests, would not let it in
    with pytest.raises(ConfigError, match=f"--{name} "):
        options.__post_init__()


def test_the_other_parts_are_listed_and_can_be_chosen(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    with open_pair(files.base, files.tuned) as pair:
        assert set(pair.outside) == {"num_iterations", "vae.vae_model.encoder.conv_in.weight"}
    with open_pair(files.base, files.tuned, PairOptions(parts=("vae",))) as pair:
        assert pair.layers == ("vae.vae_model.encoder.conv_in",)


def test_a_part_that_is_not_there_is_refused_with_those_that_are(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    with (
        pytest.raises(ModelMismatchError, match=r"of the part text_encoder.*the parts denoiser, other, vae"),
        open_pair(files.base, files.tuned, PairOptions(parts=("text_encoder",))),
    ):
        pass


def test_a_lora_in_place_of_a_model_is_refused(make_model_pair: "MakePair", tmp_path: Path) -> None:
    files = make_model_pair()
    save_file({"denoiser.conv_in.lora_up.weight": torch.ones(2, 2)}, tmp_path / "lora.safetensors")
    with (
        pytest.raises(ModelMismatchError, match=r"lora\.safetensors is a LoRA, not a model"),
        open_pair(files.base, tmp_path / "lora.safetensors"),
    ):
        pass


def test_a_model_that_was_saved_with_its_lora_in_place_is_called_so(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"]), model)
    base, tuned = save_pair(tmp_path, before, model.state_dict())
    with (
        pytest.raises(
            ModelMismatchError, match=r"b\.safetensors is a model with a LoRA in it: 2 tensors"
        ) as raised,
        open_pair(base, tuned),
    ):
        pass
    assert "merge_and_unload" in str(raised.value.hint)


def save_pair(tmp_path: Path, base: "State", tuned: "State") -> tuple[Path, Path]:
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path, state in zip(paths, (base, tuned), strict=True):
        save_file(state, path)
    return paths


def test_a_quantised_base_is_dequantised_and_named(tmp_path: Path) -> None:
    weight = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    base = {"a.weight": weight.to(torch.float8_e4m3fn), "a.weight_scale": torch.tensor(0.5)}
    paths = save_pair(tmp_path, base, {"a.weight": weight.bfloat16()})
    with open_pair(*paths) as pair:
        assert torch.equal(pair.change("a.weight", CPU).delta, weight * 0.5)
        found = finding(pair, "dequantised")
    assert found.evidence["keys"] == "a.weight"
    assert "float8_e4m3fn scaled per tensor" in found.message


def test_8_bit_floats_are_compared_as_numbers(tmp_path: Path) -> None:
    weight = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    states = [{"a.weight": (weight * scale).to(torch.float8_e4m3fn)} for scale in (1, 3)]
    with open_pair(*save_pair(tmp_path, *states)) as pair:
        assert torch.equal(pair.change("a.weight", CPU).delta, weight * 2)


def test_damaged_weights_are_an_error_and_not_a_finding(make_model_pair: "MakePair") -> None:
    files = make_model_pair()
    files.tuned.write_bytes(files.tuned.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated"), open_pair(files.base, files.tuned):
        pass
