"""The studio: interactive views of a model, served on this machine, in one HTML file, or in a notebook."""
