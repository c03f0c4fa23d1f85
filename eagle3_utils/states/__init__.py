"""Records in, hidden states on disk, batches out: planner, extract, store, codec, dataset."""
