"""Everything that moves: wire types, channels, coordinator, engines, verifiers, weights, daemon, command line."""
