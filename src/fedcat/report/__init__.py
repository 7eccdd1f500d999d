"""Plots of data."""
