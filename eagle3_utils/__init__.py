"""Train EAGLE-3 draft models for LLMs served by SGLang: text in, a served draft out, every number proved."""
