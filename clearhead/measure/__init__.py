"""Measuring: what a machine can do, and what a model costs on it."""
