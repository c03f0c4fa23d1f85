"""Figures: one file per room, small functions that return a matplotlib Figure; the shared look is in style.py."""
