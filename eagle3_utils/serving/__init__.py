"""An SGLang server that can be trusted: launch, capture of hidden states, and the probe that gates extraction."""
