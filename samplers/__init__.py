"""Which problem, how many rollouts, when to stop: pure policies with no I/O, no clock and no torch."""
