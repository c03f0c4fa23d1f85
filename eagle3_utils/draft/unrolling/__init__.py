"""The parts of training-time test: which slots are computed, their attention, teacher and loss."""
