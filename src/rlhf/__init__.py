"""The import name of the project: links to the folders `flows`, `stages` and `tuning` at the top of the repository."""
