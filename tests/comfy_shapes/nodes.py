"""What ComfyUI's nodes give: a tuple, in V3 within a `NodeOutput`, or a dict where there is something for the page."""

from typing import Any


class NodeOutput:
    """As `comfy_api.latest.io.NodeOutput`: no sequence, and its outputs are its `result`."""

    def __init__(self, *args: Any, ui: dict[str, Any] | None = None) -> None:
        self.args = args
        self.ui = ui

    @property
    def result(self) -> tuple[Any, ...] | None:
        return self.args if len(self.args) > 0 else None

    def __getitem__(self, index: int) -> Any:
        return self.args[index]


def in_dict(*outputs: Any) -> dict[str, Any]:
    """The same as a node of the first kind with something to show gives it."""
    return {"ui": {"text": ["done"]}, "result": outputs}
