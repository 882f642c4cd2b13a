import re
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import PydanticUndefined

from sigmascope.lbm.training.settings import TrainSettings, parse_train_settings

PAGE = Path(__file__).parents[4] / "docs" / "lbm-train-config.md"
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+) \|$", re.MULTILINE)


def rows() -> dict[str, tuple[str, str]]:
    """Type and default of each key in the page's tables."""
    found = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(found) == len({key for key, *_ in found})
    return {key: (kind, default) for key, kind, default, _ in found}


def default_of(key: str) -> Any:
    return TrainSettings.model_fields[key].get_default(call_default_factory=True)


def test_the_tables_name_every_key_and_no_other() -> None:
    assert set(rows()) == set(TrainSettings.model_fields) - {"allow_pipe"}  # only the command line has it


def test_the_tables_say_the_defaults() -> None:
    for key, (_, said) in rows().items():
        default = default_of(key)
        if default is PydanticUndefined:
            assert said == "required", key
        elif isinstance(default, bool):
            assert said == str(default).lower(), key
        elif isinstance(default, int | float):
            assert float(said) == default, key
        elif isinstance(default, str):
            assert said.strip("`") == default, key
        elif default and isinstance(default, tuple):
            assert said == ", ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in default), (
                key
            )


def test_a_type_that_is_one_of_several_words_names_them_all() -> None:
    for key, (kind, _) in rows().items():
        words = re.findall(r"`(\w+)`", kind)
        for word in words:
            given = {"rank": 4, "device": "cuda", key: word, "pixel_loss_weight": 0}
            required = {"train_shards": "a", "base_model_path": "b", "save_ckpt_path": "c"}
            assert getattr(parse_train_settings({**required, **given}), key) == word


def test_the_pages_example_is_read() -> None:
    example = re.search(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    settings = parse_train_settings(yaml.safe_load(example[1]))
    assert settings.optimizer_kwargs == {"betas": [0.9, 0.99], "weight_decay": 0.01}
    assert settings.num_steps == (1, 4)
    assert settings.pixel_loss_weight == 10
