"""Matrices in few bits: how they are rounded, kept and multiplied."""
