"""Sweeps over the problems of a batch and the rollouts of a problem, as courses in one process each."""
