"""The HTTP client and the reading of dumps."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from eagle3_utils.errors import UserError
from eagle3_utils.serving.client import Client, DumpError, read_dump


def write(path, num_tokens: int = 3, said: int | None = None, **changes):
    tensors = {
        "input_ids": torch.arange(num_tokens),
        "aux": torch.ones(num_tokens, 2, 4),
        "final": torch.ones(num_tokens, 4),
    }
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    save_file(tensors, path, {"num_tokens": str(said or num_tokens), "boundaries": "[2, 3]"})
    return path


def test_a_dump_is_read_with_its_boundaries(tmp_path):
    dump = read_dump(write(tmp_path / "hs-1.safetensors"))
    assert dump.boundaries == [2, 3] and dump.aux.shape == (3, 2, 4) and dump.hidden is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"final": None}, "not a whole dump"),
        ({"final": torch.ones(2, 4)}, r"disagree on the number of tokens: \[2, 3\]"),
        ({"said": 4}, r"disagree on the number of tokens: \[3, 4\]"),
    ],
)
def test_a_dump_that_is_not_whole_is_refused(tmp_path, changes, words):
    with pytest.raises(DumpError, match=words):
        read_dump(write(tmp_path / "hs-1.safetensors", **changes))


def test_a_truncated_dump_is_refused(tmp_path):
    path = write(tmp_path / "hs-1.safetensors")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DumpError, match="not a whole dump"):
        read_dump(path)


def test_a_note_of_the_writer_is_the_error(tmp_path):
    (tmp_path / "hs-1.error").write_text(json.dumps({"error": "no space left"}))
    with pytest.raises(DumpError, match="no space left"):
        Client("http://127.0.0.1:9", tmp_path).wait_for_dump("hs-1", 1.0)


def test_a_dump_that_never_comes_is_an_error(tmp_path):
    with pytest.raises(DumpError, match="no dump of hs-1"):
        Client("http://127.0.0.1:9", tmp_path).wait_for_dump("hs-1", 0.05)


def test_a_server_without_a_dump_folder_cannot_be_waited_for():
    with pytest.raises(UserError, match="captures nothing"):
        Client("http://127.0.0.1:9").wait_for_dump("hs-1")


def test_a_server_that_does_not_answer_is_an_error_that_a_gate_can_report():
    with pytest.raises(DumpError, match="does not answer: ConnectError"):
        Client("http://127.0.0.1:9").generate([1, 2])


def test_a_dead_server_is_not_healthy():
    assert not Client("http://127.0.0.1:9").is_healthy(1.0)
