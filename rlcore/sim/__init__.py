"""Simulate a cluster: the shipped controller and policies, on virtual engines in virtual time."""
