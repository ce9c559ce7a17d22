// Row kernels, clusters.
