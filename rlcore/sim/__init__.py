"""Simulation of a cluster: the shipped controller and policies over virtual engines and a virtual
clock."""
