"""What the Makefile calls; not part of the course's package."""
