"""Simulation of a cluster: the shipped controller and policies with virtual engines and a virtual
clock."""
