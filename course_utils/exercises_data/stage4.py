"""The exercises of notebook 4: from dispatch to kernel execution."""
