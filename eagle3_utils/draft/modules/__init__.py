"""The parts that the draft network is built of."""
