"""Which losses survive which lag: the pieces of a real run at an exact lag, in one process and on no clock."""
