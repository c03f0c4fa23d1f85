"""Plain, gzip and zstd files are read alike, to the last byte, and damage is an error of a known kind."""

from __future__ import annotations

import gzip
import random

import pytest
import zstandard

from eagle3_utils.corpus.reading.compressed import READ_ERRORS, open_bytes

TEXT = "".join(f"line {random.Random(i).random()}\n" for i in range(3000)).encode()
PACK = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor(write_checksum=True).compress}


def read(path) -> bytes:
    with open_bytes(path) as file:
        return file.read()


def test_all_kinds_give_the_same_bytes(tmp_path):
    (tmp_path / "r.jsonl").write_bytes(TEXT)
    assert read(tmp_path / "r.jsonl") == TEXT
    for kind, compress in PACK.items():
        (tmp_path / f"r.jsonl.{kind}").write_bytes(compress(TEXT))
        assert read(tmp_path / f"r.jsonl.{kind}") == TEXT


@pytest.mark.parametrize("kind", PACK)
def test_zstd_frames_and_gzip_members_are_read_to_the_last_and_the_last_must_be_whole(tmp_path, kind):
    whole, path = PACK[kind](TEXT), tmp_path / f"r.jsonl.{kind}"
    path.write_bytes(whole * 2 + PACK[kind](TEXT * 40) + whole)
    assert read(path) == TEXT * 43
    for cut in (1, len(whole) - 5):  # in the block, in the header
        path.write_bytes(whole * 2 + whole[:-cut])
        with open_bytes(path) as file:
            assert file.read(2 * len(TEXT)) == 2 * TEXT
            with pytest.raises(EOFError):
                file.read()


@pytest.mark.parametrize("kind", PACK)
def test_damage_at_any_place_raises_an_error_of_a_known_kind_or_hides_nothing(tmp_path, kind):
    whole, path = PACK[kind](TEXT), tmp_path / f"r.jsonl.{kind}"
    kinds = set()
    for place in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:place] + bytes(byte ^ 0xFF for byte in whole[place : place + 8]) + whole[place + 8 :])
        try:
            assert read(path) == TEXT
        except READ_ERRORS as error:
            kinds.add(type(error).__name__)
    assert {"gz": "error", "zst": "ZstdError"}[kind] in kinds  # zlib.error has so short a name
