"""Configurations to start from, and profiles of simulated models; data only, shipped inside the wheel."""
