"""Looking into a model while it runs."""
