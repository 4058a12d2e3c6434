"""A storm of random faults on the recipe `smoke`; `python -m tests.faults.storm --help`."""
