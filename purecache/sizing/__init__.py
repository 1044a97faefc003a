"""Which sizes and policies suit a workload: `purecache size`. docs/sizing.md."""
