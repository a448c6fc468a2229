"""What training did to a policy: which problems it can solve, how often, and by which strategy, before and after."""
