"""Studies: real training runs, several variants under several seeds, compared with their uncertainty."""
