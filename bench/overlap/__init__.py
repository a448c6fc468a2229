"""The system's own coordinator with simulated devices on a virtual clock."""
