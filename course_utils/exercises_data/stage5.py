"""The exercises of notebook 5: from kernel to chip."""
