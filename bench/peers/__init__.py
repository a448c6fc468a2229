"""What runs in the peers' environment (`just peers`), beside which this package is only on the path, not installed."""
