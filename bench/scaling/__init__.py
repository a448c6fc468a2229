"""Scaling-law fits: reward against compute, rollouts per problem against compute, and coverage against k.

Everything here is numpy and scipy on numbers that runs left behind: no torch, no processes, minutes on one core.
"""
