"""Layers: attention with projections, positions, norms, blocks."""
