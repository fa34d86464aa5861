"""Look inside a model while it runs: attention maps, logit lens, ablation, patching."""
