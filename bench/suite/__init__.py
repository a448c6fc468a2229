"""`ngu bench`: what is fast, against whom, and how far from the limit. docs/BENCH.md says how to read and extend it."""
