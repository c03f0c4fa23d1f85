"""The machinery of a training run: optimiser, schedule, ranks, checkpoints, journal."""
