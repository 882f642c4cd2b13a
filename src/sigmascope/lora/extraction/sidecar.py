"""The YAML beside a LoRA file that describes its extraction (SPEC section 7)."""

from pathlib import Path
from types import ModuleType

from sigmascope.errors import ConfigError
from sigmascope.lora.extraction.extraction_report import ExtractionReport
from sigmascope.lora.paths import as_text
from sigmascope.records.atomic import require_writable


def sidecar_path(lora: Path) -> Path:
    """`<name>_config.yaml` beside `<name>.safetensors`."""
    return lora.with_name(f"{lora.stem}_config.yaml")


def require_yaml() -> ModuleType:
    """Import PyYAML, which is needed to describe an extraction.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ConfigError(
            "PyYAML is not installed, and the LoRA's description is YAML.",
            hint='Install it with: pip install "sigmascope[lbm]"',
        ) from error
    return yaml


def refuse_other_yaml(sidecar: Path) -> None:
    """Refuse to replace a file of the side-car's name that describes no extraction.

    Raises:
        ConfigError: Some file is there without the key `extraction_method`, or it cannot be read.
        WriteError: What is there is a folder, no regular file or write-protected.
    """
    require_writable(sidecar)
    if not sidecar.is_file():
        return
    yaml = require_yaml()
    try:
        facts = yaml.safe_load(sidecar.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        facts = None
    if not isinstance(facts, dict) or "extraction_method" not in facts:
        raise ConfigError(
            f"{sidecar} is where the LoRA's description goes, and the file there is no such description.",
            hint="Choose another name for --save_to, or move that file.",
        )


def sidecar_text(report: ExtractionReport) -> str:
    """The side-car's text, with exactly the keys of SPEC section 7 in its order."""
    fixed = report.options.fixed_rank
    facts = {
        "base_model": as_text(report.base),
        "extraction_method": "svd",
        "rank": report.options.asked_rank if fixed is None else fixed.rank,
        "conv_rank": report.options.asked_rank if fixed is None else fixed.conv_rank,
        "architecture": report.architecture,
        "native_naming": report.format == "native",
        "total_analyzed_layers": report.total_analyzed_layers,
        "total_lora_modules": report.total_lora_modules,
        "change_threshold": report.options.min_diff,
        "coverage_percentage": round(report.coverage_percentage, 2),
    }
    return str(require_yaml().safe_dump(facts, sort_keys=False, allow_unicode=True))
