"""Placement policies, one small file each."""
