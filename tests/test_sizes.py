import pytest
from fake_capture import HIDDEN, make_records, sample_of, store_meta

from eagle3_utils.errors import UserError
from eagle3_utils.states.sizes import CorpusNumbers, codec_table, format_bytes, format_codec, state_bytes
from eagle3_utils.states.store import StoreWriter

KIMI = CorpusNumbers(num_samples=37_312, num_tokens=87_800_000, num_final_rows=43_900_000, longest=8192)


def test_bytes_of_the_reference_run():
    sizes = state_bytes(KIMI, 7168, 3, "bf16", "all")
    assert (sizes["aux"] + sizes["final"]) / KIMI.num_tokens == 57_344
    assert (sizes["aux"] + sizes["final"]) / 2**40 == pytest.approx(4.58, abs=0.005)


def test_the_table_has_every_codec_by_tensor():
    table = {(entry["codec"], entry["final"]): entry for entry in codec_table(KIMI, 7168, 3)}
    assert list(table) == [("bf16", "all"), ("bf16", "supervised"), ("fp8", "all"), ("fp8", "supervised")]
    assert table["bf16", "all"]["state_bytes_per_token"] == 57_344
    assert table["fp8", "supervised"]["bytes_per_token"]["aux"] == 3 * 7172
    assert table["fp8", "supervised"]["bytes_per_token"]["final"] == 3586
    assert format_codec(table["bf16", "all"]) == "bf16, all: 57,344 B a token, 4.58 TiB"


def test_compact_codec_is_at_most_045_of_bf16_with_half_the_tokens_supervised():
    full = sum(state_bytes(KIMI, 7168, 3, "bf16", "all").values())
    assert sum(state_bytes(KIMI, 7168, 3, "fp8", "supervised").values()) <= 0.45 * full


def test_a_real_shard_is_as_large_as_planned(tmp_path):
    records = make_records(200)
    corpus = CorpusNumbers.of(records)
    with StoreWriter(tmp_path, store_meta(codec="fp8", final="supervised")) as writer:
        for record in records:
            writer.add(sample_of(record))
    planned = sum(state_bytes(corpus, HIDDEN, 3, "fp8", "supervised").values())
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir() if path.is_file())
    assert 0.9 * on_disk < planned + 40_000  # headers and an empty ledger are about 40 kB
    assert corpus.num_final_rows == sum(sum(record.loss_mask[1:]) for record in records)


def test_sizes_are_readable():
    assert [format_bytes(n) for n in (512, 4 << 30, 5_034_803_200_000)] == ["512 B", "4 GiB", "4.58 TiB"]


def test_a_corpus_longer_than_the_parameters_or_the_model_is_refused():
    KIMI.require_lengths(8192, 262_144)
    with pytest.raises(UserError, match="8192 tokens, max_seq_len is 4096"):
        KIMI.require_lengths(4096, 262_144)
    with pytest.raises(UserError, match="max_position_embeddings is 2048"):
        KIMI.require_lengths(8192, 2048)
