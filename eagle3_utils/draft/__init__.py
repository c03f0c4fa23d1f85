"""Hidden states in, a draft that SGLang loads out: network, training-time test, export, checks (notebook 04)."""
