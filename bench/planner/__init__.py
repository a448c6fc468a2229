"""What a job will cost before it runs: work, depth, memory and period by placement, and the split that is best."""
