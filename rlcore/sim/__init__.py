"""What a cluster would do: the shipped controller and policies over virtual replicas and a virtual
clock."""
