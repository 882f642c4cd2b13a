from typing import TYPE_CHECKING

import pytest
import torch

from sigmascope.lora import extract
from sigmascope.lora.extract import ExtractOptions, job_identity
from sigmascope.lora.pairs import open_pair

if TYPE_CHECKING:
    from tests.conftest import MakePair

CPU = torch.device("cpu")


def test_a_processor_that_iterates_in_another_dtype_is_another_job(
    make_model_pair: "MakePair", monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_model_pair()
    texts = set()
    with open_pair(files.base, files.tuned) as pair:
        for dtype in (torch.bfloat16, None, torch.bfloat16):
            monkeypatch.setattr(extract, "fast_dtype", lambda device, dtype=dtype: dtype)
            texts.add(job_identity(pair, ExtractOptions(), CPU, "native"))
    assert len(texts) == 2
