"""Forms of quantised weights, and kernels that multiply them without unpacking."""
