"""Clients of the systems compared, one file each, written as their documentation shows."""
