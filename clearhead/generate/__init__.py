"""Generate tokens from a model and a prompt."""
