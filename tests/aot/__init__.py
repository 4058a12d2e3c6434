"""The product's programs compiled ahead of time for TPUs that are not here: what they hold, compute and send."""
