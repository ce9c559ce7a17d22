"""Simulation of a cluster: the shipped controller and policies run on virtual engines and a virtual
clock."""
