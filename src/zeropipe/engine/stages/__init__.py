"""Models cut along their depth: what a stage is, and where its modules and weights come from."""
