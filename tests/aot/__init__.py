"""The product's programs compiled ahead of time for devices that are not here: what they hold, compute and send."""
