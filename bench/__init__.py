"""Everything that measures: throughput, peers, planner, sampler lab, scaling-law fits and reports."""
