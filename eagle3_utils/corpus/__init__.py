"""Text in, training records out: prompts → responses → token ids with a loss mask (notebooks 00 and 01)."""
