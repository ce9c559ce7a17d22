// Copies.
