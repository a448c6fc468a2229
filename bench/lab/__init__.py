"""The sampler lab: samplers against a population of problems, on a virtual clock, with no model and no GPU."""
