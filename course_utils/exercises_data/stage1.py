"""The exercises of notebook 1: from model to operations."""
