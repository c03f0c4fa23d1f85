"""What the probe asks, what it measures and by which threshold it judges."""
