"""What a file is, told by its first bytes and not by its name."""

from pathlib import Path
from typing import Literal

from sigmascope.errors import CheckpointError

FileKind = Literal["safetensors", "zip", "pickle", "lfs-pointer", "html", "gguf", "hdf5", "text", "unknown"]

HEAD_BYTES = 512
_PREFIXES: tuple[tuple[bytes, FileKind], ...] = (
    (b"version https://git-lfs.github.com/spec/", "lfs-pointer"),
    (b"PK\x03\x04", "zip"),
    (b"\x80\x02", "pickle"),
    (b"\x80\x03", "pickle"),
    (b"\x80\x04", "pickle"),
    (b"\x80\x05", "pickle"),
    (b"GGUF", "gguf"),
    (b"\x89HDF\r\n\x1a\n", "hdf5"),
)
_DOWNLOAD = "Download the file itself again"
_IN_WORDS: dict[FileKind, tuple[str, str]] = {
    "zip": ("it is a zip archive, as torch.save writes", "If it is a PyTorch checkpoint, name it .ckpt."),
    "pickle": ("it is a pickle, as old versions of torch.save write", "If you trust it, name it .ckpt."),
    "lfs-pointer": (
        "it is a Git LFS pointer: a few lines of text in place of the weights",
        "Run `git lfs pull` in the repository it came from, or download the file itself.",
    ),
    "html": (
        "it is a web page saved under this name",
        f"{_DOWNLOAD}: use the direct link, and log in if the site asks for it.",
    ),
    "gguf": ("it is a GGUF file", "Convert it to safetensors first."),
    "hdf5": ("it is an HDF5 (Keras) file", "Convert it to safetensors first."),
    "text": ("it is a text file", f"{_DOWNLOAD}; the text may say why the download failed."),
}


def sniff(head: bytes) -> FileKind:
    """Tell the kind of a file from its first bytes.

    Args:
        head: The first `HEAD_BYTES` bytes, or all of a shorter file.

    Returns:
        The kind; "safetensors" when a length and a JSON object start the file.
    """
    # First: the length may begin with the very bytes that begin a pickle or a zip.
    if head[4:8] == b"\0\0\0\0" and head[8:9] == b"{":
        return "safetensors"
    for prefix, kind in _PREFIXES:
        if head.startswith(prefix):
            return kind
    if len(head) > 8 and head[8:9] == b"{":
        return "safetensors"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head", b"<script")):
        return "html"
    if head and all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in head):
        return "text"
    return "unknown"


def foreign_file_error(path: Path, kind: FileKind, wanted: str) -> CheckpointError | None:
    """The error for a file that is plainly something else than `wanted`, or None if nothing is known."""
    if kind not in _IN_WORDS:
        return None
    what, hint = _IN_WORDS[kind]
    return CheckpointError(path, f"is not {wanted}: {what}.", hint=hint)
