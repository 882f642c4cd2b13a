from importlib import metadata

import pytest

from sigmascope.probes.doctor import extras_facts


@pytest.fixture
def distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with two extras, one of which contains the other, and one for developers."""
    requires = ["torch>=2", 'diffusers>=0.3; extra == "small"', 'ours[small]; extra == "large"',
                'webdataset>=0.2; extra == "large"', 'pytest; extra == "test"']  # fmt: skip
    headers = {"Provides-Extra": ["small", "large", "test"]}

    class Metadata:
        def get_all(self, name: str) -> list[str]:
            return headers[name]

    def version(package: str) -> str:
        if package != "diffusers":
            raise metadata.PackageNotFoundError(package)
        return "0.42"

    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    monkeypatch.setattr(metadata, "metadata", lambda name: Metadata())
    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.usefixtures("distribution")
def test_each_extra_lists_its_packages_and_those_it_contains() -> None:
    found = {extra.name: extra.versions for extra in extras_facts("ours")}
    assert found == {"small": {"diffusers": "0.42"}, "large": {"diffusers": "0.42", "webdataset": None}}


@pytest.mark.usefixtures("distribution")
def test_missing_packages_are_named() -> None:
    assert [extra.missing for extra in extras_facts("ours")] == [[], ["webdataset"]]


def test_our_own_extras_are_those_of_the_project() -> None:
    names = [extra.name for extra in extras_facts()]
    extras = "diffusers lbm train ui nvidia prometheus otel parquet gguf comfyui postgres"
    assert set(extras.split()) == set(names)
    installed = {name: version for extra in extras_facts() for name, version in extra.versions.items()}
    assert installed["diffusers"] == metadata.version("diffusers")


def test_what_is_not_installed_has_no_extras() -> None:
    assert extras_facts("no-such-distribution") == []
