// Copies on the host.
