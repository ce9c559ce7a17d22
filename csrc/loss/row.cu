// Row kernels.
