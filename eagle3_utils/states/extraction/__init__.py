"""The machinery of an extraction: the pool of work, dumps, progress and the pilot."""
