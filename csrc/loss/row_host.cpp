// Row kernels on the host.
