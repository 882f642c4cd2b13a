"""Read a YAML file as its writer meant it: a key given twice is an error, where YAML's loaders let the last one win."""

from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, ScalarNode

from sigmascope.errors import ConfigError


def read_yaml(path: Path, *, hint: str = "Check the path.") -> Any:
    """Give what a YAML file holds; an empty file is an empty mapping.

    Raises:
        ConfigError: The file cannot be read (then with the hint), is not UTF-8 or not YAML, or gives a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read ({error}).", hint="Save it as UTF-8.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}).", hint=hint) from error
    try:
        data = yaml.load(text, Loader=_OnceLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML ({error}).", hint="Correct that line.") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: is nested too deeply.", hint="Correct its brackets.") from error
    return data if data is not None else {}


class _OnceLoader(yaml.SafeLoader):
    """A SafeLoader that takes each key of a mapping once; `<<` may repeat keys, which it is there to change."""

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        """Look at the keys as they are written."""
        node: MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, ScalarNode):
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"{key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return node
