"""Prompts to responses, through any endpoint; and prompts that the target makes up itself."""
