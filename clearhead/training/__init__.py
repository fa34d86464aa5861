"""Training: recipes, tasks, the loop, optimizers, checkpoints and runs."""
