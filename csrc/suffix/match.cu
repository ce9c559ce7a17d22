// Suffix forest: one launch per batch.
