"""From a model and a prompt to more tokens."""
