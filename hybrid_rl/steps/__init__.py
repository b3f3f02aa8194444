"""The computations that the phases of the loop call."""
