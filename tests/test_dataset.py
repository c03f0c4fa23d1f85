from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_capture import HIDDEN, make_records, states_of
from fake_capture import fill as fill_store

from eagle3_utils.draft.training.build import token_counts
from eagle3_utils.errors import UserError
from eagle3_utils.states.codec import supervised_rows
from eagle3_utils.states.dataset import PackedDataset, pack
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.shards.shard import Shard
from eagle3_utils.states.store import Sample, StoreMeta, StoreWriter

RECORDS = {record.id: record for record in make_records(80)}


def fill(folder, **changes):
    meta = StoreMeta(hidden_size=HIDDEN, aux_layers=[1, 2, 3], **changes)
    with StoreWriter(folder, meta, shard_bytes=100_000) as writer:
        for record in RECORDS.values():
            ids, mask = np.array(record.input_ids, np.int32), np.array(record.loss_mask, np.uint8)
            writer.add(Sample(record.id, ids, mask, *states_of(record.input_ids), source=record.source))
    return StoreReader(folder)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("store"))


def same(left, right) -> bool:
    tensors = ("input_ids", "loss_mask", "position_ids", "document_ids", "cu_seqlens", "aux", "final", "final_index")
    return left.sample_ids == right.sample_ids and all(
        torch.equal(getattr(left, t), getattr(right, t)) for t in tensors
    )


def test_every_sample_once_and_whole(reader):
    seen = []
    for batch in PackedDataset(reader, max_tokens=256).epoch(0):
        assert batch.num_tokens <= 256
        for number, sample_id in enumerate(batch.sample_ids):
            rows = slice(*batch.cu_seqlens[number : number + 2].tolist())
            record, (aux, final) = RECORDS[sample_id], states_of(RECORDS[sample_id].input_ids)
            seen.append(sample_id)
            assert batch.input_ids[rows].tolist() == record.input_ids
            assert batch.loss_mask[rows].int().tolist() == record.loss_mask
            assert batch.position_ids[rows].tolist() == list(range(len(record.input_ids)))
            assert (batch.document_ids[rows] == number).all() and batch.sources[number] == record.source
            assert torch.equal(batch.aux[rows], aux)
            for position, index in enumerate(batch.final_index[rows].tolist()):
                supervised = position + 1 < len(record.input_ids) and record.loss_mask[position + 1]
                assert (index >= 0) == bool(supervised)
                if supervised:
                    assert torch.equal(batch.final[index], final[position])
    assert sorted(seen) == sorted(RECORDS)


def test_batches_do_not_depend_on_the_final_codec(reader, tmp_path):
    other = fill(tmp_path, final="supervised")
    for left, right in zip(PackedDataset(reader, 200).epoch(1), PackedDataset(other, 200).epoch(1), strict=True):
        assert same(left, right)


def test_batches_of_an_fp8_store_hold_what_its_samples_decode_to(tmp_path):
    reader = fill(tmp_path, codec="fp8")
    for batch in PackedDataset(reader, 200).epoch(0):
        samples = [reader.read(reader.index_of(sample_id)) for sample_id in batch.sample_ids]
        assert torch.equal(batch.aux, torch.cat([sample.aux for sample in samples]))
        needed = torch.from_numpy(np.concatenate([supervised_rows(sample.loss_mask) for sample in samples]))
        assert torch.equal(batch.final, torch.cat([sample.final for sample in samples])[needed])


@pytest.mark.parametrize("final", ["all", "supervised"])
def test_encoded_batches_of_an_fp8_store_are_decoded_by_to(tmp_path, final):
    reader = fill(tmp_path, codec="fp8", final=final)
    decoded, encoded = PackedDataset(reader, 200), PackedDataset(reader, 200)
    encoded.encoded = True  # as with `pin_memory`
    for left, right in zip(decoded.epoch(0), encoded.epoch(0), strict=True):
        assert right.aux.dtype == right.final.dtype == torch.uint8 and not same(left, right)
        assert right.aux_scale.shape == right.aux.shape[:2] and right.final_scale.shape == right.final.shape[:1]
        moved = right.to("cpu")
        assert same(left, moved) and moved.aux_scale is None and moved.final_scale is None
        assert same(left, moved.to("cpu"))


def test_batches_stay_encoded_in_page_locked_memory_where_all_stores_are_fp8(reader, tmp_path):
    folders, records = [tmp_path / name for name in "abc"], make_records(30)
    for number, codec in enumerate(("bf16", "fp8", "fp8")):
        fill_store(folders[number], records[number::3], codec=codec)
    readers = [StoreReader(some) for some in (folders[:1], folders[1:], folders)]
    assert [some.codec for some in readers] == ["bf16", "fp8", None]
    assert [PackedDataset(some, 200, pin_memory=True).encoded for some in readers] == [False, True, False]
    assert not PackedDataset(readers[1], 200).encoded
    mixed = readers[2]
    for batch in PackedDataset(mixed, 200).epoch(0):
        samples = [mixed.read(mixed.index_of(sample_id)) for sample_id in batch.sample_ids]
        assert torch.equal(batch.aux, torch.cat([sample.aux for sample in samples])) and batch.aux_scale is None


def test_codes_of_a_bf16_store_are_an_error(reader):
    codes = torch.empty(int(reader.lengths[0]), 3, HIDDEN, dtype=torch.uint8)
    with pytest.raises(ValueError, match="no codes in a store of bf16"):
        reader.copy_states(0, codes, codes[:0, 0], np.zeros(len(reader.read(0).final), bool))


def test_counting_tokens_asks_the_disk_for_no_states(reader, monkeypatch):
    monkeypatch.setattr(Shard, "_ask_for", lambda *_: pytest.fail("states were asked for"))
    predicted, all_tokens = token_counts(reader, SimpleNamespace(vocab_size=900))
    assert all_tokens.sum() == reader.lengths.sum()
    assert predicted.sum() == sum(sum(record.loss_mask[1:]) for record in RECORDS.values())


def test_a_final_state_that_is_not_there_is_an_error(reader):
    aux, final = torch.empty(int(reader.lengths[0]), 3, HIDDEN).bfloat16(), torch.empty(2, HIDDEN).bfloat16()
    wanted = np.zeros(len(reader.read(0).final), bool)
    wanted[0] = True
    with pytest.raises(ValueError, match=f"{reader.ids[0]}: 2 final states wanted, 1 are stored"):
        reader.copy_states(0, aux, final, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a CUDA GPU")
def test_page_locked_states_are_the_same_and_their_memory_is_used_again(reader):
    places = set()
    for plain, pinned in zip(
        PackedDataset(reader, 256).epoch(0),
        PackedDataset(reader, 256, prefetch=0, pin_memory=True).epoch(0),
        strict=True,
    ):
        assert same(plain, pinned) and pinned.aux.is_pinned() and pinned.final.is_pinned()
        assert pinned.pin_memory().aux.data_ptr() == pinned.aux.data_ptr()  # no second copy
        places.add(pinned.aux.data_ptr())
    assert len(places) <= 4  # of about 16 batches


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a CUDA GPU")
def test_encoded_states_are_page_locked_and_a_gpu_decodes_them_to_the_same_bits(tmp_path):
    reader = fill(tmp_path, codec="fp8")
    for plain, encoded in zip(
        PackedDataset(reader, 256).epoch(0), PackedDataset(reader, 256, pin_memory=True).epoch(0), strict=True
    ):
        pinned = encoded.pin_memory()
        assert all(tensor.is_pinned() for tensor in (encoded.aux, encoded.final, pinned.aux_scale, pinned.final_scale))
        assert pinned.aux.dtype == torch.uint8 and same(plain, pinned.to("cuda", non_blocking=True).to("cpu"))


def test_order_is_fixed_by_seed_and_epoch(reader):
    plans = [PackedDataset(reader, 256, seed=seed).plan(epoch) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert plans[0] == plans[1] and plans[0] != plans[2] and plans[0] != plans[3]
    still = PackedDataset(reader, 256, shuffle=False)
    assert still.plan(0) == still.plan(5)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_epoch_resumes_at_any_batch(reader, prefetch):
    dataset = PackedDataset(reader, 256, prefetch=prefetch)
    whole = list(dataset.epoch(2))
    rest = list(dataset.epoch(2, start=4))
    assert len(rest) == len(whole) - 4 == dataset.num_batches(2) - 4
    assert all(same(left, right) for left, right in zip(whole[4:], rest, strict=True))


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_ranks_share_an_epoch_evenly_without_loss_or_double(reader, num_ranks):
    plans = [PackedDataset(reader, 256, rank=rank, num_ranks=num_ranks).plan(0) for rank in range(num_ranks)]
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(index for plan in plans for batch in plan for index in batch) == list(range(80))


def test_batches_are_nearly_full():
    lengths = np.random.default_rng(0).lognormal(6.9, 0.8, 5000).clip(16, 8192).astype(np.int32)
    batches = pack(lengths, 8192, np.random.default_rng(1))
    assert sorted(index for batch in batches for index in batch) == list(range(5000))
    assert lengths.sum() / (len(batches) * 8192) > 0.95


def test_a_sample_longer_than_a_batch_is_named(reader):
    with pytest.raises(UserError, match=r"sample '.*' has \d+ tokens"):
        PackedDataset(reader, max_tokens=20)


def test_more_ranks_than_samples_is_an_error(reader):
    with pytest.raises(UserError, match="too few samples"):
        PackedDataset(reader, 256, num_ranks=100).plan(0)


def test_to_moves_every_tensor(reader):
    batch = next(PackedDataset(reader, 256).epoch(0)).to("meta")
    assert batch.aux.device.type == batch.cu_seqlens.device.type == "meta" and batch.sample_ids


def test_any_number_of_ranks_shares_the_same_batches_when_their_multiple_is_given(reader):
    whole = PackedDataset(reader, 256, multiple_of=4).plan(0)
    for num_ranks in (2, 4):
        shares = [
            PackedDataset(reader, 256, rank=rank, num_ranks=num_ranks, multiple_of=4).plan(0)
            for rank in range(num_ranks)
        ]
        together = [share[number] for number in range(len(shares[0])) for share in shares]
        assert together == whole


@pytest.mark.parametrize("prefetch", [0, 2])
def test_prepare_sees_every_batch_before_it_is_handed_out(reader, prefetch):
    dataset = PackedDataset(reader, 256, prefetch=prefetch, prepare=lambda batch: (batch.sample_ids, "prepared"))
    assert [ids for ids, word in dataset.epoch(0) if word == "prepared"] == [
        batch.sample_ids for batch in PackedDataset(reader, 256).epoch(0)
    ]
