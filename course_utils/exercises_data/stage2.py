"""The exercises of notebook 2: from operations to graph and IR."""
