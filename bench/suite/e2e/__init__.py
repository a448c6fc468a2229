"""The built-in job from start to finish: this system, asynchronous and synchronous, and TRL's GRPOTrainer."""
