"""Evaluation of a policy: many rollouts of every held-out problem, and what can be said from their verdicts."""
