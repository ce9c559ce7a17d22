// Device forest.
