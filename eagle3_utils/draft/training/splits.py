"""The two splits of a run's states as the packed batches of one rank: those it trains on, those it validates on."""

from __future__ import annotations

from eagle3_utils.config import TrainConfig
from eagle3_utils.draft.training.distributed import Ranks
from eagle3_utils.errors import UserError
from eagle3_utils.runs import data_folder
from eagle3_utils.states.dataset import PackedDataset
from eagle3_utils.states.reader import StoreReader

_NAMED = 5  # samples in an error


def open_splits(config: TrainConfig, ranks: Ranks) -> tuple[PackedDataset, PackedDataset]:
    """Batches to train on, as many for every rank, and to validate on, of which a rank may have one less or none.

    Raises `UserError` when a sample is in both, also when its states are another run's.
    """
    data = data_folder(config)
    train, val = (StoreReader.of_split(split, data, config.more_data) for split in ("train", "val"))
    if shared := sorted(set(train.ids) & set(val.ids)):
        names = ", ".join(shared[:_NAMED]) + (" …" if len(shared) > _NAMED else "")
        raise UserError(
            f"{len(shared)} samples of the train split are in the val split too: {names}",
            ", ".join(map(str, val.folders)),
            "the figures would be of text learnt by heart: leave one of these runs out of more_data"
            if config.more_data else "split the corpus again: stage 01",
        )  # fmt: skip
    sharing = {"seed": config.seed, "rank": ranks.rank, "num_ranks": ranks.num_ranks,
               "prefetch": config.prefetch_batches, "pin_memory": ranks.device.type == "cuda"}  # fmt: skip
    return (
        PackedDataset(train, config.max_tokens_per_step, multiple_of=config.batches_per_step, **sharing),
        PackedDataset(val, config.max_tokens_per_step, shuffle=False, multiple_of=1, **sharing),
    )
