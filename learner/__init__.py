"""Everything that learns: advantages, corrections, losses, packing, the model, the optimizer and checkpoints."""
