"""Figures of what ran and of the data it ran on."""
