"""A draft and a target in, acceptance out: reference decoding, offline and served figures, and both compared."""
